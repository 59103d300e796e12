"""cuDNN's attention of long prompt chunks, against torch's over the same pool."""

from __future__ import annotations

import pytest
import torch
from kernel_cases import TOLERANCE, config

from trtx.torch_engine.runner.fp8 import to_fp8
from trtx.torch_engine.runner.kernels import KvCache, PassInputs, Spans, int32
from trtx.torch_engine.runner.rope import rotary_table
from trtx.torch_engine.runner.torch_kernels import TorchKernels

pytest.importorskip("cudnn", reason="needs nvidia-cudnn-frontend")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() < (9, 0), reason="needs a Hopper GPU"
    ),
]
TOKENS_PER_BLOCK, MOST, LAYERS = 32, 8192, 2
DEVICE = torch.device("cuda")
SHAPES = [(32, 8, 128), (16, 8, 128), (28, 4, 128), (14, 2, 64)]
CHUNKS = {
    "one prompt": [(0, 1100)],
    "behind a prefix that ends within a block": [(777, 2049)],
    "several": [(0, 1500), (33, 700), (4000, 1)],
    "as many as a plan holds": [(100 * i, 1024) for i in range(8)],
}


class Case:
    """Decodes, then chunks, of a model with ``heads``: (query heads, KV heads, head_dim)."""

    def __init__(
        self, heads: tuple[int, int, int], chunks: list[tuple[int, int]], decodes: list[int], dtype: torch.dtype,
        unused_blocks: int = 0,
    ) -> None:  # fmt: skip
        from trtx.torch_engine.runner.cudnn_attention import CudnnAttention
        from trtx.torch_engine.runner.triton_kernels import TritonKernels

        torch.manual_seed(0)
        self.shape = config(heads=heads[0], kv_heads=heads[1], head_dim=heads[2])
        lengths = [*decodes, *(context + new for context, new in chunks)]
        needed = [-(-length // TOKENS_PER_BLOCK) for length in lengths]
        pool = torch.zeros(
            sum(needed) + unused_blocks, heads[1], LAYERS, 2, TOKENS_PER_BLOCK, heads[2], dtype=dtype, device=DEVICE
        )
        pool[unused_blocks:] = torch.randn(pool[unused_blocks:].shape, device=DEVICE)
        table = torch.zeros(len(lengths) + 1, max(needed) + 3, dtype=torch.int32, device=DEVICE)
        order = torch.randperm(sum(needed), device=DEVICE).int() + unused_blocks
        for slot, blocks in enumerate(order.split(needed)):  # type: ignore[no-untyped-call]  # torch's
            table[slot, : len(blocks)] = blocks
        self.cache = KvCache.of(pool, table)
        self.inputs = self._inputs(chunks, decodes)
        self.q = torch.randn(self.inputs.token_ids.shape[0], heads[0], heads[2], device=DEVICE).to(dtype)
        long_chunks = CudnnAttention.of(self.shape, self.cache, MOST)
        assert long_chunks is not None
        self.kernels = TritonKernels(self.shape, self.cache, torch.empty(0), 132, long_chunks=long_chunks)

    def _inputs(self, chunks: list[tuple[int, int]], decodes: list[int]) -> PassInputs:
        first = len(decodes)
        positions = [length - 1 for length in decodes]
        slots = list(range(first))
        for slot, (context, new) in enumerate(chunks, first):
            positions += range(context, context + new)
            slots += [slot] * new
        starts = [first + sum(new for _, new in chunks[:index]) for index in range(len(chunks) + 1)]
        spans = Spans(
            int32(list(range(first, first + len(chunks))), DEVICE), int32(starts, DEVICE),
            int32([context for context, _ in chunks], DEVICE), max(new for _, new in chunks),
            max(context for context, _ in chunks),
        )  # fmt: skip
        ids = int32([0] * len(positions), DEVICE)
        return PassInputs(ids, int32(positions, DEVICE), int32(slots, DEVICE), spans, first)

    def attended(self, scale: torch.Tensor | None = None) -> torch.Tensor:
        planned = self.kernels.planned(self.inputs, self.q.dtype)
        assert planned.long_chunks is not None, "the Triton kernels would compute the chunks"
        return self.kernels.attend(self.q, 1, planned, scale)

    def expected(self) -> torch.Tensor:
        rotary = rotary_table(self.shape.rope, self.shape.head_dim, 1, DEVICE)
        return TorchKernels(self.shape, self.cache, rotary).attend(self.q, 1, self.inputs)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("heads", SHAPES)
@pytest.mark.parametrize("name", CHUNKS)
def test_chunks_equal_torch_alone_and_beside_decodes(
    heads: tuple[int, int, int], name: str, dtype: torch.dtype
) -> None:
    for decodes in ([], [1, 40, 3000]):
        case = Case(heads, CHUNKS[name], decodes, dtype)
        torch.testing.assert_close(
            case.attended().float(), case.expected().float(), atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype]
        )


def test_blocks_far_behind_two_billion_elements_are_read() -> None:
    unused = 2**32 // (8 * LAYERS * 2 * TOKENS_PER_BLOCK * 128) + 7
    case = Case(SHAPES[0], [(500, 1200)], [700], torch.bfloat16, unused_blocks=unused)
    torch.testing.assert_close(case.attended().float(), case.expected().float(), atol=3e-2, rtol=3e-2)


def test_the_output_is_float8_for_a_float8_product() -> None:
    case = Case(SHAPES[0], [(50, 1500)], [90], torch.bfloat16)
    scale = torch.tensor(0.01, device=DEVICE)
    attended = case.attended()
    assert torch.equal(case.attended(scale).float()[1:], to_fp8(attended[1:], scale).float())


def test_short_chunks_and_those_of_a_graph_stay_with_triton() -> None:
    case = Case(SHAPES[0], [(0, 1100)], [], torch.bfloat16)
    short = Case(SHAPES[0], [(0, 300)], [], torch.bfloat16)
    assert short.kernels.planned(short.inputs, short.q.dtype).long_chunks is None
    assert case.kernels.planned(case.inputs, torch.float32).long_chunks is None
    spans = case.inputs.spans
    assert spans is not None
    unknown = Spans(spans.slots, spans.starts, spans.contexts, spans.max_length)  # as in a CUDA graph
    padded = PassInputs(case.inputs.token_ids, case.inputs.positions, case.inputs.slots, unknown)
    assert case.kernels.planned(padded, case.q.dtype).long_chunks is None
