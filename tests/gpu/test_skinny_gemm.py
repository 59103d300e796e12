"""Products of few rows, and decoders whose layers are made of them. Without a GPU: TRITON_INTERPRET=1 and triton."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from kernel_cases import DEVICE, IS_INTERPRETED, TOLERANCE, Pair, config, decode_inputs, random, span_inputs

from trtx.torch_engine.runner.decoder import Decoder
from trtx.torch_engine.runner.linear import LIBRARY_MULTIPLIER, PlainLinear
from trtx.torch_engine.runner.mlp import DenseMlp, ExpertBackend, ExpertMlp, ExpertWeights, LayerMlp, LoopedExperts
from trtx.torch_engine.runner.rope import rotary_table
from trtx.torch_engine.runner.weights import DecoderWeights, LayerWeights

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not (torch.cuda.is_available() or IS_INTERPRETED), reason="needs CUDA or TRITON_INTERPRET=1"),
]
HAS_OVERLAP = torch.cuda.is_available() and torch.cuda.get_device_capability() >= (9, 0)
DTYPES = [torch.float16] if IS_INTERPRETED else [torch.float16, torch.bfloat16]
# No multiple of a tile: 203 outputs, and columns that end inside a step, a part or a load of several.
SHAPES = [(203, 1104), (96, 336), (40, 203)]  # 203 columns are the library's
ROWS = [1, 3, 16] if IS_INTERPRETED else list(range(1, 18))
EPS = 1e-6


def error_of(actual: torch.Tensor, expected: torch.Tensor) -> float:
    assert actual.shape == expected.shape
    return float((actual.double() - expected.double()).norm() / expected.double().norm())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_rows", ROWS)
@pytest.mark.parametrize(("outputs", "width"), SHAPES)
def test_a_product_is_as_exact_as_its_dtype_and_has_the_same_bits_again(
    outputs: int, width: int, num_rows: int, dtype: torch.dtype
) -> None:
    from trtx.torch_engine.runner.skinny_gemm import FewRowsMultiplier, Workspace

    multiplier = FewRowsMultiplier(Workspace.of(DEVICE))
    torch.manual_seed(0)
    weight, x = random(outputs, width, dtype=dtype), random(num_rows, width, dtype=dtype)
    for bias in (None, random(outputs, dtype=dtype)):
        multiplier.admit(weight, bias)
        expected = x.double() @ weight.double().t() + (0 if bias is None else bias.double())
        first = multiplier(x, weight, bias)
        assert first.dtype == dtype
        assert error_of(first, expected) < TOLERANCE[dtype] / 4
        out = torch.empty_like(first)
        assert multiplier(x, weight, bias, out=out) is out
        assert torch.equal(out, first)


def test_a_product_of_strided_rows_takes_the_rows(width: int = 336) -> None:
    from trtx.torch_engine.runner.skinny_gemm import FewRowsMultiplier, Workspace

    weight, x = random(96, width, dtype=torch.float16), random(8, width, dtype=torch.float16)[::2]
    assert error_of(FewRowsMultiplier(Workspace.of(DEVICE))(x, weight), x.double() @ weight.double().t()) < 1e-3


def test_float32_and_many_rows_are_the_librarys_to_the_bit() -> None:
    from trtx.torch_engine.runner.skinny_gemm import FewRowsMultiplier, Workspace

    multiplier = FewRowsMultiplier(Workspace.of(DEVICE))
    for dtype, num_rows in ((torch.float32, 2), (torch.float16, 17)):
        weight, x = random(96, 336, dtype=dtype), random(num_rows, 336, dtype=dtype)
        assert torch.equal(multiplier(x, weight), LIBRARY_MULTIPLIER(x, weight))


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("name", ["FEW_WIDE_PROGRAMS", "MANY_TALL_PROGRAMS"])
@pytest.mark.parametrize(("outputs", "width"), SHAPES[:2])
def test_tiles_for_fast_memory_are_as_exact(outputs: int, width: int, name: str, gated: bool) -> None:
    from trtx.torch_engine.runner import skinny_gemm

    torch.manual_seed(0)
    dtype, num_rows = torch.float16, 5
    workspace, tile = skinny_gemm.Workspace.of(DEVICE), getattr(skinny_gemm, name)
    x, residual = random(num_rows, width, dtype=dtype), random(num_rows, outputs, dtype=dtype)
    weight = random(outputs * (2 if gated else 1), width, dtype=dtype) / width**0.5
    expected = x.double() @ weight.double().t()
    if gated:
        expected = F.silu(expected[:, :outputs]) * expected[:, outputs:]
    out = torch.empty(num_rows, outputs, dtype=dtype, device=DEVICE)
    skinny_gemm.few_rows_product(
        x, weight, None, out, workspace, residual=residual, gated=gated, overlaps=HAS_OVERLAP, tile=tile
    )
    assert error_of(out, expected + residual.double()) < TOLERANCE[dtype]


def test_a_tile_follows_from_the_shape_and_the_memory() -> None:
    """Those of the 8B shape, as measured on an H200: output and down, gate and up, and qkv as on an H100."""
    from trtx.torch_engine.runner.skinny_gemm import (
        FEW_WIDE_PROGRAMS,
        MANY_TALL_PROGRAMS,
        ONE_ROW,
        SEVERAL_ROWS,
        tile_for,
    )  # fmt: skip

    fast = {(4096, 4096): FEW_WIDE_PROGRAMS, (4096, 12288): FEW_WIDE_PROGRAMS, (24576, 4096): MANY_TALL_PROGRAMS,
            (6144, 4096): SEVERAL_ROWS}  # fmt: skip
    for (outputs, width), tile in fast.items():
        assert tile_for(8, outputs, width, has_fast_memory=True) == tile
        assert tile_for(8, outputs, width) == SEVERAL_ROWS
        assert tile_for(1, outputs, width, has_fast_memory=True) == ONE_ROW


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_rows", [1, 5])
@pytest.mark.parametrize(("outputs", "width"), [(203, 336), (48, 1040)])
def test_norm_gate_and_residual_of_a_product_equal_operations_of_their_own(
    outputs: int, width: int, num_rows: int, dtype: torch.dtype
) -> None:
    from trtx.torch_engine.runner.skinny_gemm import Workspace, few_rows_product

    torch.manual_seed(0)
    workspace = Workspace.of(DEVICE)
    x, residual = random(num_rows, width, dtype=dtype) * 3, random(num_rows, outputs, dtype=dtype)
    norm = random(width, dtype=dtype) if num_rows == 1 else None
    normed = x.double()
    if norm is not None:
        normed = normed * torch.rsqrt((normed * normed).mean(1, keepdim=True) + EPS) * norm.double()
    for gated in (False, True):
        weight = random(outputs * (2 if gated else 1), width, dtype=dtype) / width**0.5
        bias = random(weight.shape[0], dtype=dtype)
        expected = normed @ weight.double().t() + bias.double()
        if gated:
            gate, up = expected.chunk(2, dim=1)
            expected = F.silu(gate) * up
        out = torch.empty(num_rows, outputs, dtype=dtype, device=DEVICE)
        few_rows_product(
            x, weight, bias, out, workspace, norm=norm, eps=EPS, residual=residual, gated=gated
        )  # fmt: skip
        assert error_of(out, expected + residual.double()) < TOLERANCE[dtype] / 2


def test_parts_are_added_in_one_order_and_leave_their_memory_ready() -> None:
    from trtx.torch_engine.runner.skinny_gemm import Workspace, few_rows_product, tile_for

    workspace = Workspace.of(DEVICE)
    x, weight = random(3, 2064, dtype=torch.float16), random(40, 2064, dtype=torch.float16)
    assert tile_for(3, 40, 2064).parts == 4
    answers = torch.empty(5, 3, 40, dtype=torch.float16, device=DEVICE)
    for answer in answers:
        few_rows_product(x, weight, None, answer, workspace)
        assert not workspace.arrived.any()
    assert error_of(answers[0], x.double() @ weight.double().t()) < 1e-3
    assert all(torch.equal(answer, answers[0]) for answer in answers)


def weights_of(
    dtype: torch.dtype, *, heads: int, kv_heads: int, head_dim: int, hidden: int, experts: ExpertBackend | None = None
) -> DecoderWeights:
    """``experts``: the second layer is a mixture of experts, computed by this."""
    intermediate, query = 112, heads * head_dim

    def linear(outputs: int, width: int, *, has_bias: bool = False) -> PlainLinear:
        return PlainLinear(
            random(outputs, width, dtype=dtype) / width**0.5, random(outputs, dtype=dtype) if has_bias else None
        )

    def mlp(layer: int) -> LayerMlp:
        if layer == 0 or experts is None:
            return DenseMlp(linear(2 * intermediate, hidden), linear(hidden, intermediate))
        shapes = ((6, hidden), (6, 2 * intermediate, hidden), (6, hidden, intermediate))
        router, gate_up, down = (random(*shape, dtype=dtype) / shape[-1] ** 0.5 for shape in shapes)
        return ExpertMlp(ExpertWeights(router, gate_up, down, 2, normalizes=True), experts)

    layers = tuple(
        LayerWeights(
            random(hidden, dtype=dtype), linear(query + 2 * kv_heads * head_dim, hidden, has_bias=True),
            random(head_dim, dtype=dtype), random(head_dim, dtype=dtype), linear(hidden, query),
            random(hidden, dtype=dtype), mlp(layer),
        )
        for layer in range(2)
    )  # fmt: skip
    embedding = random(64, hidden, dtype=dtype)
    return DecoderWeights(embedding, layers, random(hidden, dtype=dtype), embedding, torch.ones(2, 2, device=DEVICE))


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_decoder_of_fused_products_computes_what_one_of_single_operations_does(dtype: torch.dtype) -> None:
    from trtx.torch_engine.runner.skinny_gemm import FewRowsLayers, Workspace

    pair = Pair(config(heads=4, kv_heads=2, head_dim=32), dtype)
    experts = LoopedExperts(LIBRARY_MULTIPLIER)
    weights = weights_of(dtype, heads=4, kv_heads=2, head_dim=32, hidden=96, experts=experts)
    layers = FewRowsLayers(weights, pair.triton, EPS, Workspace.of(DEVICE), overlaps=HAS_OVERLAP)
    ours, reference = Decoder(weights, pair.triton, few_tokens=layers), Decoder(weights, pair.reference)
    inputs = [decode_inputs([63], [2]), decode_inputs([0, 7, 159], [0, 3, 1]), span_inputs([(4, 11, 5)])]
    for one in inputs:
        assert error_of(ours.hidden(one), reference.hidden(one)) < TOLERANCE[dtype]
    assert error_of(pair.cache.pool, pair.reference_cache.pool) < TOLERANCE[dtype]


@pytest.mark.skipif(not HAS_OVERLAP, reason="needs a Hopper GPU")
@pytest.mark.parametrize("num_rows", [1, 8])
def test_launches_that_overlap_change_no_bit(num_rows: int) -> None:
    """In a graph, many times, over layers large enough to be still running when the next launch begins."""
    from trtx.torch_engine.runner.skinny_gemm import FewRowsLayers, Workspace
    from trtx.torch_engine.runner.triton_kernels import TritonKernels

    shape = config(heads=32, kv_heads=8, head_dim=128)
    pair = Pair(shape, torch.bfloat16)
    weights = weights_of(torch.bfloat16, heads=32, kv_heads=8, head_dim=128, hidden=4096)
    inputs = decode_inputs([64 + row for row in range(num_rows)], [row % 5 for row in range(num_rows)])
    rotary = rotary_table(shape.rope, shape.head_dim, shape.max_position, DEVICE)
    answers = []
    for overlaps in (False, True):
        kernels = TritonKernels(shape, pair.cache, rotary, 132, overlapped_tokens=16 if overlaps else 0)
        layers = FewRowsLayers(weights, kernels, EPS, Workspace.of(DEVICE), overlaps=overlaps)
        decoder = Decoder(weights, kernels, few_tokens=layers)
        decoder.hidden(inputs)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = decoder.hidden(inputs)
        for _ in range(50):
            graph.replay()
            answers.append(out.clone())
    assert all(torch.equal(answer, answers[0]) for answer in answers)
