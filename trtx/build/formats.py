"""Checks whether a GPU and a model support a format of ``trtx build``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from trtx.checkpoint.facts import text_config
from trtx.checkpoint.formats import BUILT as FORMATS
from trtx.checkpoint.formats import BuiltFormat
from trtx.checkpoint.model_config import head_shape
from trtx.errors import UsageError
from trtx.memory import MemoryDevice

__all__ = ["FORMATS", "NO_FORMAT", "check_gpu", "check_model"]

NO_FORMAT = "none"


def check_gpu(form: BuiltFormat, gpu: MemoryDevice) -> None:
    """Raises UsageError if ``gpu`` can't run ``form``. A GPU of unknown capability passes."""
    if gpu.capability is not None and gpu.capability < form.oldest:
        runs = [name for name, other in FORMATS.items() if other.oldest <= gpu.capability]
        raise UsageError(
            f"{gpu.name} (sm{gpu.capability[0]}{gpu.capability[1]}) can't run {form.name}, which needs "
            f"{form.generation}; choose --quant {' or '.join([*runs, NO_FORMAT])}, or name the GPU to build for with "
            "--gpu"
        )


def check_model(form: BuiltFormat, config: Mapping[str, Any], *, name: str) -> None:
    """Raises UsageError for a model that is already quantized, or whose layer sizes don't fit ``form``.

    ``config``: the content of config.json. ``name``: the model's name in messages.
    """
    already = config.get("quantization_config")
    if already:
        method = already.get("quant_algo") or already.get("quant_method") if isinstance(already, Mapping) else already
        raise UsageError(
            f"model {name} is quantized already ({method}); give the unquantized checkpoint, or --quant {NO_FORMAT}"
        )
    text = text_config(config)
    inputs = {name: int(text.get(name) or 0) for name in ("hidden_size", "intermediate_size", "moe_intermediate_size")}
    if text.get("num_attention_heads"):
        heads, _, head_dim = head_shape(text)
        inputs["num_attention_heads x head_dim"] = heads * head_dim
    for field, size in inputs.items():
        if size % form.block:
            raise UsageError(
                f"model {name} has {field} {size}, and {form.name} scales blocks of {form.block} inputs; expected a "
                f"multiple of {form.block}: choose another --quant"
            )
