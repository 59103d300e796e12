"""The table of weight formats that trtx knows: names, sizes, and their support in the torch engine and ``trtx build``.

The checkpoint parser, the memory plan, the runner and the build all use this table. The computation of each format,
with torch, is in ``trtx.torch_engine.runner.formats``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import ceil, prod
from types import MappingProxyType

DTYPES = ("float32", "bfloat16", "float16")
"""The dtypes that a model can compute in."""
_WIDE = frozenset((*DTYPES, "float64"))
FP8_DTYPE = "float8_e4m3fn"
DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, FP8_DTYPE: 1, "int32": 4, "int8": 1, "uint8": 1}
"""Bytes of an element, by torch's dtype name without the "torch." prefix."""
KV_BYTES = {"fp8": 1.0, "int8": 1.0, "nvfp4": 0.5 + 1 / 16}
"""Bytes of an element of a quantized KV cache, including scales. Exports spell these names in capitals."""
FP8_CAPABILITY = (8, 9)
"""The lowest compute capability with conversions and matmuls of float8_e4m3fn: Ada, Hopper and later."""
SCALED_MULTIPLE = 16
"""torch._scaled_mm requires rows and columns to be multiples of this."""
TENSOR_SCALES, ROW_SCALES, BLOCK_SCALES = "one static scale", "scales of rows and tokens", "scales of blocks"
"""The kinds of scaled matmuls: what has a scale in float8 weights and inputs. See :func:`products_of`."""
NO_PRODUCTS: frozenset[str] = frozenset()
_ROW_SCALES_CAPABILITY = (9, 0)  # from which cuBLAS has them; on Ada, torch would use another library
_BLOCK_SCALES_GENERATION = 9
_SCALES_MULTIPLE = 4
NVFP4_BLOCK = 16
AWQ_GROUP = 128
MX_BLOCK = 32
FP8_BLOCK = 128
"""Rows, and columns, of a weight that share a scale in the block formats of float8; columns of an input that do."""
_LARGE = 1 << 20  # rows and columns of an example module; all block and group sizes divide it


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """The shape of one stored tensor, and the ``dtype`` that the engine needs it in; None: the engine's own dtype.

    If the needed dtype is a float of 16 bits or more, the checkpoint may store any other such float.
    """

    shape: tuple[int, ...]
    dtype: str | None = None
    is_optional: bool = False

    def misfit(self, shape: tuple[int, ...], dtype: str) -> tuple[str, str] | None:
        """Returns what a stored tensor has and what it needs, in words; None if it can be loaded.

        ``dtype``: torch's name without the "torch." prefix. Trailing dimensions of 1 are ignored: exporters store a
        scale as ``[]`` or ``[1]``, and scales of rows as ``[rows]`` or ``[rows, 1]``.
        """
        if _without_ones(shape) != _without_ones(self.shape):
            return f"has shape {list(shape)}", str(list(self.shape))
        is_wide = self.dtype is None or self.dtype in _WIDE
        if dtype == self.dtype or (is_wide and dtype in _WIDE):
            return None
        return f"is {dtype}", "a float of 16 or 32 bits" if is_wide else str(self.dtype)

    def nbytes(self, own_dtype: str) -> int:
        """Returns the size of the tensor in the engine. ``own_dtype``: the dtype that the engine computes in."""
        return prod(self.shape) * DTYPE_BYTES[self.dtype or own_dtype]


def _without_ones(shape: tuple[int, ...]) -> tuple[int, ...]:
    while shape and shape[-1] == 1:
        shape = shape[:-1]
    return shape


def _scale(*shape: int, is_optional: bool = False) -> TensorSpec:
    return TensorSpec(shape, "float32", is_optional)


Layout = Callable[[int, int, int], dict[str, TensorSpec]]
"""Maps (rows, columns, group size) of a linear module to the tensors that an export stores for it, by suffix."""


@dataclass(frozen=True, slots=True)
class Loading:
    """How the torch engine loads a format. It dequantizes a weight at load time, unless a matmul takes it as stored.

    ``stays``: the suffixes of the tensors that a matmul keeps in addition to its dequantized weight.
    ``rounding_bytes``: peak memory per input element while the input is rounded to the format; 0 without rounding.
    ``product``: the kind of scaled matmul that takes the weight as stored, on a GPU that has it (:func:`products_of`).
    """

    stays: tuple[str, ...]
    rounding_bytes: int
    product: str | None = None

    def is_kept(self, rows: Sequence[int], columns: int, *, scaled_products: frozenset[str]) -> bool:
        """Returns whether a matmul of ``scaled_products`` can use weights of these sizes as stored.

        ``rows``: those of each weight that the matmul merges. Blocks of a merged weight must be whole.
        """
        if self.product not in scaled_products:
            return False
        if self.product == BLOCK_SCALES:
            return not any(size % FP8_BLOCK for size in (*rows, columns))
        return not (sum(rows) % SCALED_MULTIPLE or columns % SCALED_MULTIPLE)


@dataclass(frozen=True, slots=True)
class WeightFormat:
    """A format of the weights of a decoder's linear layers.

    ``algorithm``: the name of TensorRT-LLM's QuantAlgo, as in ModelOpt's exports. ``layout``: the tensors that an
    export stores for a module, including optional ones. ``loading``: None if the torch engine does not load the format.
    ``methods``: the names that other exporters write as ``quant_method`` in config.json.
    """

    algorithm: str
    layout: Layout
    loading: Loading | None = None
    methods: tuple[str, ...] = ()
    is_blocked: bool = False  # FP8_BLOCK rows and columns share a scale, so that ranks can't cut a weight anywhere

    @property
    def bytes_a_parameter(self) -> float:
        """Bytes per parameter of a large module, including the scales of blocks and groups.

        Scales per row or column are negligible and not included.
        """
        tensors = self.layout(_LARGE, _LARGE, AWQ_GROUP).values()
        return sum(tensor.nbytes("float32") for tensor in tensors if len(tensor.shape) > 1) / _LARGE**2


@dataclass(frozen=True, slots=True, kw_only=True)
class BuiltFormat(WeightFormat):
    """A format that ``trtx build`` can produce, with a recipe of ModelOpt."""

    name: str  # the value of --quant
    recipe: str  # the name of the config in modelopt.torch.quantization
    block: int  # the number of inputs of a linear layer in one block
    passes: int  # the number of passes over the calibration text
    oldest: tuple[int, int]  # the lowest compute capability that can run the format
    generation: str  # the GPU generations in words


def _fp8(rows: int, columns: int, _: int) -> dict[str, TensorSpec]:
    return {"weight": TensorSpec((rows, columns), FP8_DTYPE), "weight_scale": _scale(), "input_scale": _scale()}


def _int4_awq(rows: int, columns: int, group: int) -> dict[str, TensorSpec]:
    return {
        "weight": TensorSpec((rows // 2, columns), "uint8"),
        "weight_scale": _scale(rows, columns // group),
        "pre_quant_scale": _scale(columns, is_optional=True),
    }


def _nvfp4(rows: int, columns: int, _: int) -> dict[str, TensorSpec]:
    return {
        "weight": TensorSpec((rows, columns // 2), "uint8"),
        "weight_scale": TensorSpec((rows, columns // NVFP4_BLOCK), FP8_DTYPE),
        "weight_scale_2": _scale(),
        "input_scale": _scale(),
    }


def _int8_sq(rows: int, columns: int, _: int) -> dict[str, TensorSpec]:
    return {
        "weight": TensorSpec((rows, columns), "int8"),
        "weight_scale": _scale(rows),
        "input_scale": _scale(),
        "pre_quant_scale": _scale(columns, is_optional=True),
    }


def _fp8_per_channel(rows: int, columns: int, _: int) -> dict[str, TensorSpec]:
    return {"weight": TensorSpec((rows, columns), FP8_DTYPE), "weight_scale": _scale(rows)}


def _fp8_blocks(rows: int, columns: int, _: int) -> dict[str, TensorSpec]:
    return {
        "weight": TensorSpec((rows, columns), FP8_DTYPE),
        "weight_scale_inv": _scale(ceil(rows / FP8_BLOCK), ceil(columns / FP8_BLOCK)),
    }


def _fp8_weight_blocks(rows: int, columns: int, _: int) -> dict[str, TensorSpec]:
    return {
        "weight": TensorSpec((rows, columns), FP8_DTYPE),
        "weight_scale": _scale(ceil(rows / FP8_BLOCK), 1, ceil(columns / FP8_BLOCK), 1),
    }


def _w4a8_awq(rows: int, columns: int, group: int) -> dict[str, TensorSpec]:
    return _int4_awq(rows, columns, group) | {
        "weight_scale": TensorSpec((rows, columns // group), "float16"),
        "weight_scale_2": _scale(),
        "input_scale": _scale(),
    }


def _gptq(rows: int, columns: int, group: int) -> dict[str, TensorSpec]:
    return {
        "qweight": TensorSpec((columns // 8, rows), "int32"),
        "qzeros": TensorSpec((columns // group, rows // 8), "int32"),
        "scales": TensorSpec((columns // group, rows), "float16"),
        "g_idx": TensorSpec((columns,), "int32"),
    }


def _nvfp4_awq(rows: int, columns: int, group: int) -> dict[str, TensorSpec]:
    return _nvfp4(rows, columns, group) | {"pre_quant_scale": _scale(columns, is_optional=True)}


def _mxfp4(rows: int, columns: int, _: int) -> dict[str, TensorSpec]:
    return {
        "blocks": TensorSpec((rows, columns // MX_BLOCK, MX_BLOCK // 2), "uint8"),
        "scales": TensorSpec((rows, columns // MX_BLOCK), "uint8"),
    }


# Generations: from the support matrix in TensorRT-LLM's documentation (features/quantization). fp8: the engines' scaled
# matmuls need multiples of 16 rows. int8_sq: the matrix of the PyTorch backend has no row for it.
# Layouts: those of ModelOpt 0.47's export; of FP8_BLOCK_SCALES, those of DeepSeek's and Qwen's own checkpoints. For
# formats that the engine does not load only the sizes matter; these are gpt-oss's OCP MX with one byte per 32 values,
# and AutoGPTQ's groups.
_FORMATS = (
    BuiltFormat(
        "FP8", _fp8, Loading(("input_scale",), 8, TENSOR_SCALES), ("fp8",),
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
    WeightFormat("FP8_PER_CHANNEL_PER_TOKEN", _fp8_per_channel, Loading((), 12, ROW_SCALES)),
    WeightFormat("FP8_BLOCK_SCALES", _fp8_blocks, Loading((), 12, BLOCK_SCALES), is_blocked=True),
    WeightFormat("FP8_PB_WO", _fp8_weight_blocks, Loading((), 0), is_blocked=True),
    WeightFormat("INT8_SQ", _int8_sq),
    WeightFormat("W4A8_AWQ", _w4a8_awq),
    WeightFormat("W4A16_GPTQ", _gptq, methods=("gptq",)),
    WeightFormat("NVFP4_AWQ", _nvfp4_awq),
    WeightFormat("MXFP4", _mxfp4, methods=("mxfp4",)),
    WeightFormat("W4A8_MXFP4_FP8", _mxfp4),
    WeightFormat("W4A8_MXFP4_MXFP8", _mxfp4),
)  # fmt: skip
FORMATS: Mapping[str, WeightFormat] = MappingProxyType({form.algorithm: form for form in _FORMATS})
LOADED: Mapping[str, Loading] = MappingProxyType({form.algorithm: form.loading for form in _FORMATS if form.loading})
"""The formats that the torch engine loads, by algorithm."""
BUILT: Mapping[str, BuiltFormat] = MappingProxyType(
    {form.name: form for form in _FORMATS if isinstance(form, BuiltFormat)}
)
"""The formats that ``trtx build`` produces, by their ``--quant`` name."""
METHODS: Mapping[str, str] = MappingProxyType({method: form.algorithm for form in _FORMATS for method in form.methods})


def products_of(capability: tuple[int, int] | None, dtype: str) -> frozenset[str]:
    """Returns the kinds of scaled matmuls that the engine uses on a GPU of ``capability`` (None: a CPU, or unknown).

    ``dtype``: the dtype that the engine computes in. With float32 the user wants exactness, so there are none. cuBLAS
    multiplies with scales of blocks on Hopper alone.
    """
    if capability is None or capability < FP8_CAPABILITY or dtype == "float32":
        return NO_PRODUCTS
    found = {TENSOR_SCALES}
    if capability >= _ROW_SCALES_CAPABILITY:
        found.add(ROW_SCALES)
    if capability[0] == _BLOCK_SCALES_GENERATION:
        found.add(BLOCK_SCALES)
    return frozenset(found)


def padded_blocks(columns: int) -> int:
    """Returns the number of scales in a row of blocks as cuBLAS reads them: a multiple of 4."""
    return -(-ceil(columns / FP8_BLOCK) // _SCALES_MULTIPLE) * _SCALES_MULTIPLE
