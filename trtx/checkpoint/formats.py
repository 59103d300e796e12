"""Every format of weights that trtx knows, one row each: names, bytes, what the torch engine and ``trtx build`` do.

Whoever needs a fact of a format asks this table: the reader of checkpoints, the memory plan, the runner and the build.
The arithmetic of one, with torch, is ``trtx.torch_engine.runner.formats``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import ceil, prod
from types import MappingProxyType

DTYPES = ("float32", "bfloat16", "float16")
"""In which a model computes."""
FP8_DTYPE = "float8_e4m3fn"
DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, FP8_DTYPE: 1, "int32": 4, "int8": 1, "uint8": 1}
"""By torch's name without its "torch."."""
KV_BYTES = {"fp8": 1.0, "int8": 1.0, "nvfp4": 0.5 + 1 / 16}
"""Bytes of an element of a quantized KV cache, scales included; exports write the names in capitals."""
FP8_CAPABILITY = (8, 9)
"""Compute capability from which a GPU converts and multiplies float8_e4m3fn: Ada, Hopper and later."""
SCALED_MULTIPLE = 16
"""torch._scaled_mm takes no other rows and columns."""
NVFP4_BLOCK = 16
AWQ_GROUP = 128
_MX_BLOCK = 32
_FP8_BLOCK = 128  # rows and columns
_LARGE = 1 << 20  # rows and columns of a module, by which all blocks and groups divide


@dataclass(frozen=True, slots=True)
class Stored:
    """What a checkpoint holds under one name, and in which ``dtype`` the engine wants it; None: in its own.

    A wanted float of 16 bits or more may be stored as any other such float.
    """

    shape: tuple[int, ...]
    dtype: str | None = None
    is_optional: bool = False

    def nbytes(self, own_dtype: str) -> int:
        """As the engine holds it. ``own_dtype``: the engine's."""
        return prod(self.shape) * DTYPE_BYTES[self.dtype or own_dtype]


def _scale(*shape: int, is_optional: bool = False) -> Stored:
    return Stored(shape, "float32", is_optional)


Layout = Callable[[int, int, int], dict[str, Stored]]
"""(rows, columns, group size) of a linear module to what an export holds for it, by suffix."""


@dataclass(frozen=True, slots=True)
class Loading:
    """What the torch engine does with a format. It dequantizes a weight when it loads it, unless ``is_multiplied``.

    ``stays``: suffixes that a product keeps beside its dequantized weight, one each. ``rounding_bytes``: an element of
    a product's input, at the widest moment of rounding it to the format; 0 where inputs stay as they are.
    ``is_multiplied``: kept as stored on a GPU with scaled products (:func:`has_scaled_products`).
    """

    stays: tuple[str, ...]
    rounding_bytes: int
    is_multiplied: bool = False

    def is_kept(self, rows: int, columns: int) -> bool:
        """Whether a scaled product of that size takes the weight as it is stored."""
        return self.is_multiplied and not (rows % SCALED_MULTIPLE or columns % SCALED_MULTIPLE)


@dataclass(frozen=True, slots=True)
class Format:
    """Weights of a decoder's linear layers. ``algorithm``: TensorRT-LLM's QuantAlgo, as ModelOpt's exports have it.

    ``layout``: what an export holds for a module, optional tensors included. ``loading``: None where the torch engine
    does not load it. ``methods``: what other exporters call it, a ``quant_method`` of config.json.
    """

    algorithm: str
    layout: Layout
    loading: Loading | None = None
    methods: tuple[str, ...] = ()

    @property
    def bytes_a_parameter(self) -> float:
        """Of a large module, scales of blocks and groups included; one for each row or column is next to nothing."""
        tensors = self.layout(_LARGE, _LARGE, AWQ_GROUP).values()
        return sum(tensor.nbytes("float32") for tensor in tensors if len(tensor.shape) > 1) / _LARGE**2


@dataclass(frozen=True, slots=True, kw_only=True)
class BuiltFormat(Format):
    """One that ``trtx build`` makes too, by a recipe of ModelOpt."""

    name: str  # of --quant
    recipe: str  # the config's name in modelopt.torch.quantization
    block: int  # a linear layer's inputs are cut into blocks of this many
    passes: int  # over the calibration text
    oldest: tuple[int, int]  # compute capability that can run it
    generation: str  # the same in words


def _fp8(rows: int, columns: int, _: int) -> dict[str, Stored]:
    return {"weight": Stored((rows, columns), FP8_DTYPE), "weight_scale": _scale(), "input_scale": _scale()}


def _int4_awq(rows: int, columns: int, group: int) -> dict[str, Stored]:
    return {
        "weight": Stored((rows // 2, columns), "uint8"),
        "weight_scale": _scale(rows, columns // group),
        "pre_quant_scale": _scale(columns, is_optional=True),
    }


def _nvfp4(rows: int, columns: int, _: int) -> dict[str, Stored]:
    return {
        "weight": Stored((rows, columns // 2), "uint8"),
        "weight_scale": Stored((rows, columns // NVFP4_BLOCK), FP8_DTYPE),
        "weight_scale_2": _scale(),
        "input_scale": _scale(),
    }


def _int8_sq(rows: int, columns: int, _: int) -> dict[str, Stored]:
    return {
        "weight": Stored((rows, columns), "int8"),
        "weight_scale": _scale(rows),
        "input_scale": _scale(),
        "pre_quant_scale": _scale(columns, is_optional=True),
    }


def _fp8_per_channel(rows: int, columns: int, _: int) -> dict[str, Stored]:
    return {"weight": Stored((rows, columns), FP8_DTYPE), "weight_scale": _scale(rows)}


def _fp8_blocks(rows: int, columns: int, _: int) -> dict[str, Stored]:
    return {
        "weight": Stored((rows, columns), FP8_DTYPE),
        "weight_scale_inv": _scale(ceil(rows / _FP8_BLOCK), ceil(columns / _FP8_BLOCK)),
    }


def _w4a8_awq(rows: int, columns: int, group: int) -> dict[str, Stored]:
    return _int4_awq(rows, columns, group) | {
        "weight_scale": Stored((rows, columns // group), "float16"),
        "weight_scale_2": _scale(),
        "input_scale": _scale(),
    }


def _gptq(rows: int, columns: int, group: int) -> dict[str, Stored]:
    return {
        "qweight": Stored((columns // 8, rows), "int32"),
        "qzeros": Stored((columns // group, rows // 8), "int32"),
        "scales": Stored((columns // group, rows), "float16"),
        "g_idx": Stored((columns,), "int32"),
    }


def _nvfp4_awq(rows: int, columns: int, group: int) -> dict[str, Stored]:
    return _nvfp4(rows, columns, group) | {"pre_quant_scale": _scale(columns, is_optional=True)}


def _mxfp4(rows: int, columns: int, _: int) -> dict[str, Stored]:
    return {
        "blocks": Stored((rows, columns // _MX_BLOCK, _MX_BLOCK // 2), "uint8"),
        "scales": Stored((rows, columns // _MX_BLOCK), "uint8"),
    }


# Generations: the support matrix in TensorRT-LLM's documentation (features/quantization). fp8: the engines' scaled
# products want rows of 16. int8_sq: the PyTorch backend's matrix has no row for it.
# Layouts: ModelOpt 0.47's export; of those that are not loaded, where only the bytes count: DeepSeek-V3's 128 x 128
# blocks with a float32 scale, gpt-oss's OCP MX with a byte for 32 values, AutoGPTQ's groups.
_FORMATS = (
    BuiltFormat(
        "FP8", _fp8, Loading(("input_scale",), 8, is_multiplied=True), ("fp8",),
        name="fp8", recipe="FP8_DEFAULT_CFG", block=16, passes=1,
        oldest=(8, 9), generation="Ada, Hopper or later (sm89)",
    ),
    BuiltFormat(
        "W4A16_AWQ", _int4_awq, Loading((), 0), ("awq",),
        name="int4_awq", recipe="INT4_AWQ_CFG", block=AWQ_GROUP, passes=2,
        oldest=(8, 0), generation="Ampere or later (sm80)",
    ),
    BuiltFormat(
        "NVFP4", _nvfp4, Loading(("input_scale",), 25),
        name="nvfp4", recipe="NVFP4_DEFAULT_CFG", block=NVFP4_BLOCK, passes=1,
        oldest=(10, 0), generation="Blackwell or later (sm100)",
    ),
    BuiltFormat(
        "W8A8_SQ_PER_CHANNEL", _int8_sq, Loading(("input_scale", "pre_quant_scale"), 12),
        name="int8_sq", recipe="INT8_SMOOTHQUANT_CFG", block=1, passes=1,
        oldest=(8, 0), generation="Ampere or later (sm80)",
    ),
    Format("FP8_PER_CHANNEL_PER_TOKEN", _fp8_per_channel),
    Format("FP8_BLOCK_SCALES", _fp8_blocks),
    Format("FP8_PB_WO", _fp8_blocks),
    Format("INT8_SQ", _int8_sq),
    Format("W4A8_AWQ", _w4a8_awq),
    Format("W4A16_GPTQ", _gptq, methods=("gptq",)),
    Format("NVFP4_AWQ", _nvfp4_awq),
    Format("MXFP4", _mxfp4, methods=("mxfp4",)),
    Format("W4A8_MXFP4_FP8", _mxfp4),
    Format("W4A8_MXFP4_MXFP8", _mxfp4),
)  # fmt: skip
FORMATS: Mapping[str, Format] = MappingProxyType({form.algorithm: form for form in _FORMATS})
LOADED: Mapping[str, Loading] = MappingProxyType({form.algorithm: form.loading for form in _FORMATS if form.loading})
"""Those that the torch engine loads, by algorithm."""
BUILT: Mapping[str, BuiltFormat] = MappingProxyType(
    {form.name: form for form in _FORMATS if isinstance(form, BuiltFormat)}
)
"""Those that ``trtx build`` makes, by the name that ``--quant`` has for it."""
METHODS: Mapping[str, str] = MappingProxyType({method: form.algorithm for form in _FORMATS for method in form.methods})


def has_scaled_products(capability: tuple[int, int] | None, dtype: str) -> bool:
    """Whether products of float8 operands run on a GPU of ``capability`` (None: a CPU, or not known).

    ``dtype``: what the engine computes in; float32 asks for exactness.
    """
    return capability is not None and capability >= FP8_CAPABILITY and dtype != "float32"
