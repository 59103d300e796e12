"""The size of a model's weights in TensorRT-LLM, read from the files' headers or computed from the config."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from fnmatch import fnmatch
from math import ceil
from pathlib import Path

from trtx.checkpoint.formats import DTYPE_BYTES, FORMATS
from trtx.checkpoint.quantization import Quantization
from trtx.memory.limits import Limits
from trtx.memory.rank_shares import Weights
from trtx.memory.shapes import ModelShape, Parameters
from trtx.memory.weight_files import StoredWeights, stored_weights

# For each kind of weight, an example module name to match the exclusions against.
_MODULES = {
    "heads": "model.layers.0.self_attn.q_proj",
    "kv_heads": "model.layers.0.self_attn.k_proj",
    "latent": "model.layers.0.self_attn.kv_a_proj_with_mqa",
    "mlp": "model.layers.0.mlp.down_proj",
    "experts": "model.layers.0.mlp.experts.0.down_proj",
}


def model_weights(directory: Path, shape: ModelShape, quantization: Quantization | None, limits: Limits) -> Weights:
    """Returns the sizes of the stored weights or, if they are not on this machine, the computed sizes."""
    stored = stored_weights(directory)
    if stored is not None:
        weights = _read(stored, shape, limits)
    else:
        weights = count_weights(shape, quantization, full_width(shape, limits), with_draft=uses_mtp(limits))
    draft = draft_weights(limits)
    return weights if draft is None else replace(weights, layers=weights.layers + _draft_layers(draft))


def draft_weights(limits: Limits) -> StoredWeights | None:
    """Returns the weights of the draft model (Eagle3); None if there is none on this machine."""
    directory = None if limits.draft_model is None else Path(limits.draft_model)
    return stored_weights(directory) if directory is not None and directory.is_dir() else None


def _draft_layers(draft: StoredWeights) -> tuple[Counter[str], ...]:
    """Returns the draft model's layers, to append to the decoder's.

    The weights outside of layers (vocabulary, the joining matmul) count in the first layer and are sharded.
    """
    first, *others = [layer for _, layer in sorted(draft.layers.items())] or [Counter()]  # Eagle3 names one "midlayer"
    outside = draft.embedding + draft.head + draft.other
    return (first + Counter({"mlp": outside}), *others)


def count_weights(shape: ModelShape, quantization: Quantization | None, width: float, *, with_draft: bool) -> Weights:
    """Computes the sizes of the weights. ``width``: bytes of an unquantized parameter.

    Embedding, head, norms and vision tower are never quantized.
    """
    layers = shape.layers + ((shape.draft,) if with_draft and shape.draft else ())
    return Weights(
        layers=tuple(_counted(layer, quantization, width) for layer in layers),
        embedding=ceil(shape.embedding * width),
        head=ceil(shape.head * width),
        vision=ceil(shape.vision * width),
        norm=ceil(shape.hidden * width),
        source=f"counted, {(quantization and quantization.algorithm) or width_text(width)}",
    )


def full_width(shape: ModelShape, limits: Limits) -> float:
    """Returns the bytes of an unquantized parameter or activation."""
    return float(DTYPE_BYTES.get(shape.dtype if limits.dtype == "auto" else limits.dtype, 2))


def parameter_bytes(quantization: Quantization | None, kind: str, full: float) -> float:
    """Returns the bytes per parameter of the weights of ``kind``, a key of shapes.Parameters.

    ``full``: the unquantized width. Exporters other than ModelOpt list exclusions by a part of a module's name.
    """
    form = FORMATS.get(str(quantization.algorithm)) if quantization is not None else None
    if quantization is None or form is None or kind not in _MODULES:
        return full
    if form.algorithm == "MXFP4" and kind != "experts":  # gpt-oss quantizes only its experts
        return full
    module = _MODULES[kind]
    if not quantization.covers(module) or any(
        pattern in module or fnmatch(module, f"{pattern}*") for pattern in quantization.excluded
    ):
        return full
    return form.bytes_a_parameter


def uses_mtp(limits: Limits) -> bool:
    """Returns whether the model uses MTP, which loads one draft layer for any draft length.

    That layer runs again for each draft token (get_num_spec_layers, MTP with Eagle).
    """
    return limits.speculation == "MTP"


def _counted(layer: Parameters, quantization: Quantization | None, width: float) -> Counter[str]:
    return Counter({kind: ceil(count * parameter_bytes(quantization, kind, width)) for kind, count in layer.items()})


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


def width_text(width: float) -> str:
    """Formats the width of an unquantized parameter."""
    return {4.0: "float32", 2.0: "16 bits"}.get(width, f"{width} B a parameter")
