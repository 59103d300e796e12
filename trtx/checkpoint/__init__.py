"""Turns the name of a model into a Hugging Face directory that every engine, the frontend and aiperf can load.

Owns look-up (a directory, the Hugging Face cache) and the synthetic checkpoints: shapes, tokenizer, weights, cache.
Does not read weights into an engine: ``trtx.torch_engine`` does, and draws those of the big shapes on its device.
Enter through :func:`resolve_checkpoint`; :func:`list_shapes` names what ``synthetic:`` knows.
A returned path is complete, never half written, and nothing here imports torch, except the training script.
"""

from trtx.checkpoint.facts import Checkpoint
from trtx.checkpoint.resolve import default_model, resolve_checkpoint
from trtx.checkpoint.shapes import list_shapes

__all__ = ["Checkpoint", "default_model", "list_shapes", "resolve_checkpoint"]
