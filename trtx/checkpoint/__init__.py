"""Turns the name of a model into a Hugging Face directory that every engine, the frontend and aiperf can load.

Owns look-up (a directory, the Hugging Face cache), the reading of config.json and of what says how weights are stored,
and the synthetic checkpoints: shapes, tokenizer, weights, cache.
Does not read weights into an engine: ``trtx.torch_engine`` does, and draws those of the big shapes on its device.
Enter through :func:`resolve_checkpoint`; :func:`list_shapes` names what ``synthetic:`` knows. Facts of any model come
with the checkpoint; :func:`read_model_config` reads a dense decoder strictly: each field is honoured or refused.
A returned path is complete, never half written, and nothing here imports torch, except the training script.
"""

from trtx.checkpoint.facts import Checkpoint, read_end_ids
from trtx.checkpoint.model_config import ModelConfig, read_model_config
from trtx.checkpoint.resolve import default_model, describe_checkpoint, hub_revision, resolve_checkpoint
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
