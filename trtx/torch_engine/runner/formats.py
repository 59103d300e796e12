"""Arithmetic of the supported quantized formats: dequantization of weights, and rounding of activations.

``trtx.checkpoint.formats`` has a row for each format, with its storage layout and all other facts. The code here is
plain torch and runs on any device. Layouts and roundings follow ModelOpt 0.47's ``export/quant_utils.py``,
``quantization/qtensor/nvfp4_tensor.py`` and ``quantization/tensor_quant.py``, and compressed-tensors 0.20's
``quantization/lifecycle/forward.py``, which has the block scales of DeepSeek's checkpoints too.
``tests/unit/torch_engine/runner/test_formats.py`` compares them with the results of both.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from trtx.checkpoint.formats import AWQ_GROUP, FP8_BLOCK, NVFP4_BLOCK
from trtx.checkpoint.quantization import Quantization
from trtx.torch_engine.runner.fp8 import quantize_rows, to_fp8

_E2M1_MAX = 6.0
_INT8_MIN, _INT8_MAX = -128.0, 127.0
_SCALE = "weight_scale"

Part = Mapping[str, Tensor]
"""The stored tensors of one linear module by suffix: ``weight``, ``weight_scale``, …"""
Prepare = Callable[[Tensor], Tensor]
"""Rounds the input of a matmul as the format represents it: takes x and returns the rounded x in x's dtype."""


@dataclass(frozen=True, slots=True)
class RoundFp8:
    """Rounds to float8_e4m3fn with one scale."""

    scale: Tensor

    def __call__(self, x: Tensor) -> Tensor:
        return (to_fp8(x, self.scale).float() * self.scale).to(x.dtype)


@dataclass(frozen=True, slots=True)
class RoundFp8Rows:
    """Rounds each row to float8_e4m3fn with a scale of its own, which maps the row's largest magnitude to 448.

    ``group``: the number of columns that share a scale; None: all columns. The last group may have fewer.
    """

    group: int | None = None

    def __call__(self, x: Tensor) -> Tensor:
        if self.group is None:
            return _round_fp8_rows(x)
        columns = x.shape[-1]
        filled = F.pad(x, (0, -columns % self.group)) if columns % self.group else x
        rounded = _round_fp8_rows(filled.reshape(*x.shape[:-1], -1, self.group)).flatten(-2)
        return rounded[..., :columns].contiguous() if filled is not x else rounded


@dataclass(frozen=True, slots=True)
class RoundNvfp4:
    """Rounds to e2m1 with a scale for each block; ``scale`` is the tensor's."""

    scale: Tensor

    def __call__(self, x: Tensor) -> Tensor:
        return _round_nvfp4(x, self.scale)


@dataclass(frozen=True, slots=True)
class RoundInt8:
    """Rounds to int8 with one scale, after smoothing."""

    scale: Tensor
    smoothing: Tensor | None

    def __call__(self, x: Tensor) -> Tensor:
        smooth = x if self.smoothing is None else x * self.smoothing.to(x.dtype)
        return ((smooth.float() / self.scale).round_().clamp_(_INT8_MIN, _INT8_MAX) * self.scale).to(x.dtype)


class QuantizedFormat(ABC):
    """One quantized format of linear weights ``[rows, columns]``."""

    def __init__(self, group_size: int = AWQ_GROUP) -> None:
        """``group_size``: number of columns that share a scale, for formats in which the export chooses it."""
        self._group_size = group_size

    @abstractmethod
    def dequantize(self, part: Part) -> Tensor:
        """Returns the weight in float32, ``[rows, columns]``."""

    @abstractmethod
    def prepare(self, parts: Sequence[Part]) -> Prepare | None:
        """Returns the input rounding for modules that share one matmul; None: activations stay unchanged."""


class Fp8(QuantizedFormat):
    """Weights and activations in float8_e4m3fn, with one static scale for each tensor."""

    def dequantize(self, part: Part) -> Tensor:
        return part["weight"].float() * part["weight_scale"]

    def prepare(self, parts: Sequence[Part]) -> Prepare:
        return RoundFp8(shared_input_scale(parts))


class Fp8PerChannel(QuantizedFormat):
    """Weights in float8_e4m3fn with one scale for each row; activations too, with one dynamic scale for each token."""

    def dequantize(self, part: Part) -> Tensor:
        return part["weight"].float() * part["weight_scale"][:, None]

    def prepare(self, parts: Sequence[Part]) -> Prepare:
        return RoundFp8Rows()


class Fp8Blocks(QuantizedFormat):
    """Weights in float8_e4m3fn with one scale for each block of 128 rows and 128 columns.

    Activations too, with one dynamic scale for each 128 columns of a token. The scale that multiplies is called
    ``weight_scale_inv`` by DeepSeek and Qwen, and ``weight_scale`` by compressed-tensors.
    """

    def dequantize(self, part: Part) -> Tensor:
        return _dequantize_blocks(part["weight"], block_scales(part))

    def prepare(self, parts: Sequence[Part]) -> Prepare:
        return RoundFp8Rows(FP8_BLOCK)


class Fp8WeightBlocks(QuantizedFormat):
    """Weights as in :class:`Fp8Blocks`, whose scale is ``[blocks of rows, 1, blocks of columns, 1]``."""

    def dequantize(self, part: Part) -> Tensor:
        return _dequantize_blocks(part["weight"], part[_SCALE][:, 0, :, 0])

    def prepare(self, parts: Sequence[Part]) -> None:
        return None


class Int4Awq(QuantizedFormat):
    """Weights in signed 4 bits, two rows in a byte (the even row in the low bits), one scale for each group of columns.

    The format multiplies the unquantized input by ``pre_quant_scale``; here it multiplies the weight's columns instead.
    """

    def dequantize(self, part: Part) -> Tensor:
        packed = part["weight"]
        values = torch.stack((packed & 0xF, packed >> 4), dim=1).flatten(0, 1).float()
        values = torch.where(values > 7, values - 16, values)
        weight = values * part["weight_scale"].repeat_interleave(self._group_size, dim=1)
        if "pre_quant_scale" in part:
            weight *= part["pre_quant_scale"]
        return weight

    def prepare(self, parts: Sequence[Part]) -> None:
        return None


class Nvfp4(QuantizedFormat):
    """Weights and activations in e2m1, two columns in a byte (the even column in the low bits).

    There are two levels of scales. A block of 16 columns has a float8_e4m3fn scale (stored for weights, computed for
    activations); the tensor has a float32 scale: ``weight_scale_2`` or ``input_scale``.
    """

    def dequantize(self, part: Part) -> Tensor:
        values = _e2m1(part["weight"])
        scale = part["weight_scale"].float() * part["weight_scale_2"]
        return values * scale.repeat_interleave(NVFP4_BLOCK, dim=1)

    def prepare(self, parts: Sequence[Part]) -> Prepare:
        return RoundNvfp4(shared_input_scale(parts))


class Int8SmoothQuant(QuantizedFormat):
    """Weights and activations in int8: one scale for each row of the weight, one for the whole input.

    ``pre_quant_scale`` moves outliers of single input columns into the weight, before the input is quantized.
    """

    def dequantize(self, part: Part) -> Tensor:
        return part["weight"].float() * part["weight_scale"][:, None]

    def prepare(self, parts: Sequence[Part]) -> Prepare:
        scale, smoothing = shared_input_scale(parts), parts[0].get("pre_quant_scale")
        if any(not _equal(smoothing, part.get("pre_quant_scale")) for part in parts[1:]):
            raise ValueError("pre_quant_scale differs between modules that share their input")
        return RoundInt8(scale, smoothing)


def dequantize_mxfp4(blocks: Tensor, scales: Tensor) -> Tensor:
    """Dequantizes OCP's MXFP4: returns float32 ``[rows, columns]``.

    ``blocks`` [rows, columns / 32, 16] uint8: e2m1, two columns in a byte (the even column in the low bits). ``scales``
    [rows, columns / 32] uint8: the exponent of 2 of each block, plus 127.
    """
    return torch.ldexp(_e2m1(blocks), (scales.to(torch.int32) - 127).unsqueeze(-1)).flatten(-2)


def _e2m1(packed: Tensor) -> Tensor:
    """Unpacks e2m1: ``[..., columns / 2]`` uint8 to ``[..., columns]`` float32."""
    codes = torch.stack((packed & 0xF, packed >> 4), dim=-1).flatten(-2)
    magnitudes = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0], device=packed.device)
    return torch.cat((magnitudes, -magnitudes))[codes.int()]


FORMATS: Mapping[str, type[QuantizedFormat]] = {
    "FP8": Fp8,
    "W4A16_AWQ": Int4Awq,
    "NVFP4": Nvfp4,
    "W8A8_SQ_PER_CHANNEL": Int8SmoothQuant,
    "FP8_PER_CHANNEL_PER_TOKEN": Fp8PerChannel,
    "FP8_BLOCK_SCALES": Fp8Blocks,
    "FP8_PB_WO": Fp8WeightBlocks,
}
"""Formats by algorithm: one for each algorithm that ``trtx.checkpoint.formats`` marks as loadable."""


def format_of(quantization: Quantization) -> QuantizedFormat:
    """Returns the format of a quantization whose ``algorithm`` is not None."""
    return FORMATS[str(quantization.algorithm)](quantization.group_size)


def shared_input_scale(parts: Sequence[Part]) -> Tensor:
    """The largest ``input_scale``, a float32 scalar.

    ModelOpt exports equal ones; TensorRT-LLM takes the maximum too.
    """
    return torch.stack([part["input_scale"] for part in parts]).amax()


def block_scales(part: Part) -> Tensor:
    """The scales of a weight of :class:`Fp8Blocks`, ``[blocks of rows, blocks of columns]``."""
    return part["weight_scale_inv" if "weight_scale_inv" in part else _SCALE]


def _dequantize_blocks(weight: Tensor, scale: Tensor) -> Tensor:
    """Multiplies ``weight`` [rows, columns] by ``scale`` [blocks of rows, blocks of columns], in float32.

    The last block of rows or columns may be smaller. One float32 weight is allocated, and no scale of its size.
    """
    rows, columns = weight.shape
    whole = columns - columns % FP8_BLOCK
    scale = scale.float().repeat_interleave(FP8_BLOCK, dim=0)[:rows]  # [rows, blocks of columns]
    found = weight.float()
    if whole:
        found[:, :whole].view(rows, -1, FP8_BLOCK).mul_(scale[:, : whole // FP8_BLOCK, None])
    if whole < columns:
        found[:, whole:].mul_(scale[:, -1:])
    return found


def _round_fp8_rows(x: Tensor) -> Tensor:
    """Rounds with a scale for each row of the last dimension. Zeros stay zeros."""
    values, scales = quantize_rows(x)
    return (values.float() * scales).to(x.dtype)


def _round_nvfp4(x: Tensor, scale: Tensor) -> Tensor:
    """Rounds to the nearest e2m1 value, ties to even codes, with a float8_e4m3fn scale for each block."""
    blocks = x.float().view(*x.shape[:-1], -1, NVFP4_BLOCK)
    block_scale = to_fp8(blocks.abs().amax(-1, keepdim=True) / _E2M1_MAX, scale).float() * scale
    magnitudes = blocks.abs() / torch.where(block_scale > 0, block_scale, 1.0)
    # Step widths: 0.5 up to 2, 1 up to 4, 2 up to 6. round() sends ties to even multiples, which are even codes.
    step = torch.where(magnitudes < 2, 0.5, torch.where(magnitudes < 4, 1.0, 2.0))
    rounded = ((magnitudes / step).round() * step).clamp(max=_E2M1_MAX)
    return (rounded.copysign(blocks) * block_scale).flatten(-2).to(x.dtype)


def _equal(one: Tensor | None, other: Tensor | None) -> bool:
    if one is None or other is None:
        return one is other
    if one.is_meta:  # without values: the load that had them compared them
        return one.shape == other.shape
    return torch.equal(one, other)
