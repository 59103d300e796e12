"""Checks the tensors of a quantized checkpoint against its config, from the headers of its files."""

from __future__ import annotations

from array import array
from pathlib import Path

from trtx.checkpoint.dense import checkpoint_tensors
from trtx.checkpoint.formats import FP8_DTYPE
from trtx.checkpoint.model_config import ModelConfig
from trtx.checkpoint.weight_index import STORED_DTYPES, read_data, stored_tensors
from trtx.errors import UsageError

_WEIGHT, _SCALES = ".weight", ("_scale", "_scale_inv")
# Of each dtype of scales: an unsigned integer of its size, and the bits of infinity. NaN and negative numbers have
# larger ones.
_INFINITY = {"F64": ("Q", 0x7FF << 52), "F32": ("I", 0x7F80_0000), "BF16": ("H", 0x7F80), "F16": ("H", 0x7C00)}


def check_quantized_tensors(directory: Path, config: ModelConfig) -> None:
    """Raises UsageError, which names file and tensor, for a tensor that does not fit the quantization.

    That is one of a wrong shape or dtype, a missing or unexpected tensor of a quantized module, or a scale of a float8
    weight that is negative, infinite or NaN. Reads the headers, and of the data only such scales. Does nothing for a
    checkpoint that is not quantized, and for one without weights on this machine.
    """
    quantization = config.quantization
    if quantization is None or quantization.algorithm is None:
        return
    stored = stored_tensors(directory)
    if stored is None:
        return
    expected, says = checkpoint_tensors(config), quantization.source
    modules = {
        name.removesuffix(_WEIGHT)
        for name, tensor in expected.items()
        if name.endswith(_WEIGHT) and tensor.dtype == FP8_DTYPE
    }
    for name, tensor in expected.items():
        module = name.rpartition(".")[0]
        weight, found = stored.get(f"{module}.weight"), stored.get(name)
        if found is None:
            if module in modules and weight is not None and not tensor.is_optional:
                raise UsageError(
                    f"{weight.file} holds {module}.weight in {FP8_DTYPE}, and no file holds {name}, which {says} asks "
                    "for; download the checkpoint whole"
                )
            continue
        if misfit := tensor.misfit(found.shape, STORED_DTYPES.get(found.dtype, found.dtype)):
            raise UsageError(f"{found.file}: tensor {name} {misfit[0]}, {says} says {misfit[1]}")
    for name, found in stored.items():
        if name not in expected and name.rpartition(".")[0] in modules:
            raise UsageError(
                f"{found.file} holds the tensor {name}, for which {says} has no place; expected only the tensors of "
                "its format: export the checkpoint again"
            )
    scales = {
        name: found for name, found in stored.items() if name.endswith(_SCALES) and name.rpartition(".")[0] in modules
    }
    for name, data in read_data(scales):
        code, infinity = _INFINITY[scales[name].dtype]
        if max(array(code, data), default=0) >= infinity:
            raise UsageError(
                f"{scales[name].file}: tensor {name} holds a scale that is negative, infinite or NaN; expected finite "
                "numbers of at least 0: download the checkpoint again, or export it again"
            )
