"""The formats that ``trtx build`` makes: ModelOpt's recipe for each, which GPUs run it, and which models it fits."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from trtx.errors import UsageError
from trtx.memory import Device

NO_FORMAT = "none"


@dataclass(frozen=True, slots=True)
class Format:
    """One format of the weights of a decoder's linear layers. Embeddings, head and norms keep the model's dtype."""

    name: str
    recipe: str  # the config's name in modelopt.torch.quantization
    quant_algo: str  # what the export calls it, and TensorRT-LLM's QuantAlgo
    bits: float  # stored a weight, scales included
    block: int  # a linear layer's inputs are cut into blocks of this many
    passes: int  # over the calibration text
    oldest: tuple[int, int]  # compute capability that can run it
    generation: str  # the same in words


# Generations: the support matrix in TensorRT-LLM's documentation (features/quantization). fp8: the engines' scaled
# products want rows of 16 (torch._scaled_mm). int8_sq: the PyTorch backend's matrix has no row for it.
FORMATS: Mapping[str, Format] = MappingProxyType(
    {
        form.name: form
        for form in (
            Format("fp8", "FP8_DEFAULT_CFG", "FP8", 8, 16, 1, (8, 9), "Ada, Hopper or later (sm89)"),
            Format("int4_awq", "INT4_AWQ_CFG", "W4A16_AWQ", 4.25, 128, 2, (8, 0), "Ampere or later (sm80)"),
            Format("nvfp4", "NVFP4_DEFAULT_CFG", "NVFP4", 4.5, 16, 1, (10, 0), "Blackwell or later (sm100)"),
            Format(
                "int8_sq", "INT8_SMOOTHQUANT_CFG", "W8A8_SQ_PER_CHANNEL", 8.1, 1, 1, (8, 0), "Ampere or later (sm80)"
            ),
        )
    }
)


def check_gpu(form: Format, gpu: Device) -> None:
    """Raises UsageError where ``gpu`` can't run ``form``. A GPU of unknown capability passes."""
    if gpu.capability is not None and gpu.capability < form.oldest:
        runs = [name for name, other in FORMATS.items() if other.oldest <= gpu.capability]
        raise UsageError(
            f"{gpu.name} (sm{gpu.capability[0]}{gpu.capability[1]}) can't run {form.name}, which needs "
            f"{form.generation}; choose --quant {' or '.join([*runs, NO_FORMAT])}, or name the GPU to build for with "
            "--gpu"
        )


def check_model(form: Format, config: Mapping[str, Any], *, name: str) -> None:
    """Raises UsageError for a model that is quantized already, or whose layers ``form`` does not fit.

    ``config``: content of config.json. ``name``: what to call the model.
    """
    already = config.get("quantization_config")
    if already:
        method = already.get("quant_algo") or already.get("quant_method") if isinstance(already, Mapping) else already
        raise UsageError(
            f"model {name} is quantized already ({method}); give the unquantized checkpoint, or --quant {NO_FORMAT}"
        )
    heads, head = int(config.get("num_attention_heads", 0)), int(config.get("head_dim") or 0)
    hidden = int(config.get("hidden_size", 0))
    inputs = {
        "hidden_size": hidden,
        "intermediate_size": int(config.get("intermediate_size", 0)),
        "num_attention_heads x head_dim": heads * head or hidden,
    }
    for field, size in inputs.items():
        if size % form.block:
            raise UsageError(
                f"model {name} has {field} {size}, and {form.name} scales blocks of {form.block} inputs; expected a "
                f"multiple of {form.block}: choose another --quant"
            )
