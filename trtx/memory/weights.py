"""Bytes of a model's weights as an engine holds them: read from the files' headers, or counted."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from math import ceil
from pathlib import Path

from trtx.memory.gpus import Device, capability_of
from trtx.memory.limits import Limits
from trtx.memory.quantization import Quantization
from trtx.memory.shapes import ModelShape, Parameters
from trtx.memory.sizing import WIDTHS, Weights
from trtx.memory.stored import StoredWeights, stored_weights

_FP8_CAPABILITY = (8, 9)  # Ada: where the torch engine multiplies in FP8 instead of dequantizing at load


def model_weights(
    directory: Path, shape: ModelShape, quantization: Quantization, limits: Limits, device: Device
) -> Weights:
    """TensorRT-LLM keeps weights as they are stored; the torch engine casts them to its own dtype."""
    stored = stored_weights(directory) if limits.engine != "torch" else None
    if stored is not None:
        weights = _read(stored, shape, limits)
    else:
        held = _held_format(quantization, limits, device)
        weights = count_weights(shape, held, full_width(shape, limits, device), with_draft=uses_mtp(limits))
    draft = draft_weights(limits)
    return weights if draft is None else replace(weights, layers=weights.layers + _draft_layers(draft))


def draft_weights(limits: Limits) -> StoredWeights | None:
    """Of a draft model (Eagle3) that lies on this machine."""
    directory = None if limits.draft_model is None else Path(limits.draft_model)
    return stored_weights(directory) if directory is not None and directory.is_dir() else None


def _draft_layers(draft: StoredWeights) -> tuple[Counter[str], ...]:
    """Its layers after the decoder's; what is outside of them (vocabulary, joining product) with the first, split."""
    first, *others = [layer for _, layer in sorted(draft.layers.items())] or [Counter()]  # Eagle3 names one "midlayer"
    outside = draft.embedding + draft.head + draft.other
    return (first + Counter({"mlp": outside}), *others)


def count_weights(shape: ModelShape, quantization: Quantization, width: float, *, with_draft: bool) -> Weights:
    """``width``: bytes of an unquantized parameter. Embedding, head, norms and vision tower are never quantized."""
    layers = shape.layers + ((shape.draft,) if with_draft and shape.draft else ())
    return Weights(
        layers=tuple(_counted(layer, quantization, width) for layer in layers),
        embedding=ceil(shape.embedding * width),
        head=ceil(shape.head * width),
        vision=ceil(shape.vision * width),
        norm=ceil(shape.hidden * width),
        source=f"counted, {quantization.algorithm or _name(width)}",
    )


def full_width(shape: ModelShape, limits: Limits, device: Device) -> float:
    """Bytes of an unquantized parameter or activation. The torch engine computes in float32 on a CPU."""
    if limits.dtype != "auto":
        return WIDTHS.get(limits.dtype, 2.0)
    return 4.0 if not device.is_gpu else WIDTHS.get(shape.dtype, 2.0)


def uses_mtp(limits: Limits) -> bool:
    """One layer whatever the draft length: it is run again for each token (get_num_spec_layers, MTP with Eagle)."""
    return limits.speculation == "MTP"


def _held_format(quantization: Quantization, limits: Limits, device: Device) -> Quantization:
    """The torch engine keeps per-tensor FP8 where the GPU multiplies it, and dequantizes everything else."""
    if limits.engine != "torch":
        return quantization
    capability = device.capability or capability_of(device.name)
    multiplies_fp8 = device.is_gpu and capability is not None and capability >= _FP8_CAPABILITY
    return quantization if quantization.algorithm == "FP8" and multiplies_fp8 else Quantization()


def _counted(layer: Parameters, quantization: Quantization, width: float) -> Counter[str]:
    return Counter({split: ceil(count * quantization.parameter_bytes(split, width)) for split, count in layer.items()})


def _read(stored: StoredWeights, shape: ModelShape, limits: Limits) -> Weights:
    count = len(shape.layers) + (1 if uses_mtp(limits) else 0)
    return Weights(
        layers=tuple(layer for index, layer in sorted(stored.layers.items()) if index < count),
        embedding=stored.embedding,
        head=stored.head,
        vision=stored.vision,
        norm=stored.other,
        source=f"from the headers of {stored.files} file{'s' * (stored.files > 1)}",
    )


def _name(width: float) -> str:
    return {4.0: "float32", 2.0: "16 bits"}.get(width, f"{width} B a parameter")
