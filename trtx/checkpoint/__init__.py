"""Resolves a model name to a Hugging Face directory that every engine, the frontend and aiperf can load.

Owns the look-up (a directory, the Hugging Face cache), the parsing of config.json, of quantization configs and of
weight indexes, and the synthetic checkpoints: shapes, tokenizer, weights, cache.
Does not load weights into an engine: ``trtx.torch_engine`` does, and generates the weights of the big synthetic shapes
on its device.
Enter through :func:`resolve_checkpoint`; :func:`list_shapes` lists the ``synthetic:`` names. A :class:`Checkpoint` has
the facts of any model; :func:`read_model_config` parses a decoder strictly and honours or refuses each field.
Invariants: a returned path is complete, never half written; and no module imports torch.
"""

from trtx.checkpoint.facts import Checkpoint, read_end_ids
from trtx.checkpoint.hub import hub_revision
from trtx.checkpoint.model_config import ModelConfig, read_model_config
from trtx.checkpoint.resolve import default_model, describe_checkpoint, resolve_checkpoint
from trtx.checkpoint.shapes import list_shapes

__all__ = [
    "Checkpoint",
    "ModelConfig",
    "default_model",
    "describe_checkpoint",
    "hub_revision",
    "list_shapes",
    "read_end_ids",
    "read_model_config",
    "resolve_checkpoint",
]
