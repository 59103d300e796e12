"""Attention by a work list against its definition in torch. Without a GPU: TRITON_INTERPRET=1 and the package triton.

Every cell of the pool that is no sequence's holds NaN, and every block that a table names past a sequence's end too.
"""

from __future__ import annotations

import random as dice
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy
import pytest
import torch
from engine_player import assert_equal, served, workload
from kernel_cases import DEVICE, DTYPES, IS_INTERPRETED, SCALE, alike, close, config, random, span_inputs
from runner_player import build, save

from trtx.checkpoint.model_config import ModelConfig
from trtx.torch_engine.kv_layout import first_block
from trtx.torch_engine.runner import RunnerArgs, create_runner
from trtx.torch_engine.runner.fp8 import to_fp8
from trtx.torch_engine.runner.kernels import FIXED_CHUNK, Attention, KvCache, PassInputs
from trtx.torch_engine.runner.rope import rotary_table
from trtx.torch_engine.runner.torch_kernels import TorchKernels

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not (torch.cuda.is_available() or IS_INTERPRETED), reason="needs CUDA or TRITON_INTERPRET=1"),
]
RAGGED = [Attention.BY_LENGTH, Attention.FIXED]
TOKENS_PER_BLOCK, LAYERS = 8, 2
EDGES = [0, 1, 31, 32, 63, 64, 65, 127, 128, FIXED_CHUNK - 1, FIXED_CHUNK, FIXED_CHUNK + 1, 2 * FIXED_CHUNK]


@dataclass
class Case:
    """``spans``: (tokens in the pool before the pass, new tokens) of each sequence, whose slot is its place.

    ``window``: of every layer. The table has no blocks before the window of a sequence's first new token.
    ``has_sinks``: whether each head has a sink.
    """

    spans: list[tuple[int, int]]
    heads: tuple[int, int, int] = (4, 2, 16)  # query heads, KV heads, their dimension
    dtype: torch.dtype = torch.float32
    is_fp8: bool = False
    seed: int = 0
    window: int | None = None
    has_sinks: bool = False
    cache: KvCache = field(init=False)
    sinks: torch.Tensor | None = field(init=False, default=None)  # [heads]: some above all scores, some far below

    def __post_init__(self) -> None:
        torch.manual_seed(self.seed)
        lengths = [context + new for context, new in self.spans]
        width = -(-max(lengths) // TOKENS_PER_BLOCK) + 1
        needed = [-(-length // TOKENS_PER_BLOCK) for length in lengths]
        order = (torch.randperm(sum(needed) + 3, device=DEVICE) + 1).int()  # block 0 is nobody's
        table = torch.zeros(len(lengths) + 1, width, dtype=torch.int32, device=DEVICE)
        _, kv_heads, dim = self.heads
        pool = torch.full((len(order) + 1, LAYERS, 2, TOKENS_PER_BLOCK, kv_heads, dim), torch.nan, device=DEVICE)
        taken = 0
        for slot, (length, count) in enumerate(zip(lengths, needed, strict=True)):
            blocks = order[taken : taken + count]
            freed = first_block(self.window, self.spans[slot][0], TOKENS_PER_BLOCK)
            table[slot, freed:count] = blocks[freed:]
            taken += count
            for index, block in enumerate(blocks.tolist()[freed:], freed):
                tokens = min(TOKENS_PER_BLOCK, length - index * TOKENS_PER_BLOCK)
                pool[block, :, :, :tokens] = torch.randn(LAYERS, 2, tokens, kv_heads, dim, device=DEVICE)
        scales = torch.tensor([[0.02, 0.5], [0.04, 0.25]], device=DEVICE) if self.is_fp8 else None
        stored = pool.to(self.dtype) if scales is None else to_fp8(pool, scales[None, :, :, None, None, None])
        if self.has_sinks:
            self.sinks = (torch.randn(self.heads[0], device=DEVICE) * 4).to(self.dtype)
        self.cache = KvCache(stored.permute(0, 4, 1, 2, 3, 5).contiguous().permute(0, 2, 3, 4, 1, 5), table, scales)

    @property
    def inputs(self) -> PassInputs:
        return span_inputs([(slot, context, new) for slot, (context, new) in enumerate(self.spans)])

    def queries(self) -> torch.Tensor:
        return random(sum(new for _, new in self.spans), *self.heads[::2], dtype=self.dtype)

    def triton(self, attention: Attention, processors: int = 132):  # type: ignore[no-untyped-def]
        from trtx.torch_engine.runner.triton_kernels import TritonKernels

        return TritonKernels(self.shape, self.cache, torch.empty(0), processors, attention)

    @property
    def shape(self) -> ModelConfig:
        heads, kv_heads, dim = self.heads
        windows = () if self.window is None else (self.window,) * LAYERS
        return config(heads=heads, kv_heads=kv_heads, head_dim=dim, windows=windows)

    def attend(self, attention: Attention, q: torch.Tensor, inputs: PassInputs, processors: int = 132) -> torch.Tensor:
        kernels = self.triton(attention, processors)
        planned = kernels.planned(inputs, q.dtype)
        out: torch.Tensor = kernels.attend(q, 1, planned, sinks=self.sinks)
        for work in planned.work:
            count = int(work.num_items)
            assert count <= len(work.items)
            assert not work.arrived[:count].any(), "the next layer would begin with what this one left"
        return out

    def expected(self, q: torch.Tensor, inputs: PassInputs) -> torch.Tensor:
        rotary = rotary_table(self.shape.rope, self.shape.head_dim, 1, DEVICE)
        return TorchKernels(self.shape, self.cache, rotary).attend(q, 1, inputs, sinks=self.sinks)


def decodes(case: Case) -> PassInputs:
    """A pass of the case's sequences, each with its last token alone."""
    positions = [context + new - 1 for context, new in case.spans]
    tensor = torch.tensor([[0] * len(positions), positions, list(range(len(positions)))], device=DEVICE)
    return PassInputs(*tensor.int().unbind(0))


def product_row_by_row(a: numpy.ndarray, b: numpy.ndarray, dtype: type) -> numpy.ndarray:
    return (a.astype(dtype)[:, None, :] * b.astype(dtype).T[None]).sum(-1)


def mixture(seed: int) -> list[tuple[int, int]]:
    """Some sequences of few new tokens at awkward contexts; some have none, one is long."""
    rolled = dice.Random(seed)
    spans = [(rolled.choice(EDGES) + rolled.choice([0, 0, 3]), rolled.randint(0, 16)) for _ in range(5)]
    spans.append((rolled.randint(1000, 1100), rolled.randint(1, 16)))
    rolled.shuffle(spans)
    return [(context, new) if context + new else (0, 1) for context, new in spans]


@pytest.mark.parametrize("attention", RAGGED)
@pytest.mark.parametrize("processors", [1, 132])  # nothing cut, everything cut
@pytest.mark.parametrize("seed", range(4))
def test_any_mixture_of_lengths_and_new_tokens_equals_torch(attention: Attention, processors: int, seed: int) -> None:
    dtype = DTYPES[seed % len(DTYPES)]
    heads = [(4, 2, 16), (7, 1, 24), (4, 4, 32), (8, 2, 16)][seed]
    case = Case(mixture(seed), heads=heads, dtype=dtype, seed=seed)
    q = case.queries()
    close(case.attend(attention, q, case.inputs, processors), case.expected(q, case.inputs))


@pytest.mark.parametrize("attention", RAGGED)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("is_fp8", [False, True])
def test_one_long_sequence_among_short_ones_and_padding_equals_torch(
    attention: Attention, dtype: torch.dtype, is_fp8: bool
) -> None:
    case = Case([(0, 1), (1299, 1), (40, 1), (7, 1), (63, 1)], dtype=dtype, is_fp8=is_fp8)
    inputs = decodes(case)
    q = random(5, *case.heads[::2], dtype=dtype)
    close(case.attend(attention, q, inputs), case.expected(q, inputs))
    padded = PassInputs(*(torch.cat((each, each.new_full((3,), 0))) for each in (inputs.token_ids, inputs.positions)),
                        torch.cat((inputs.slots, inputs.slots.new_full((3,), case.cache.padding_slot))))  # fmt: skip
    more = torch.cat((q, random(3, *case.heads[::2], dtype=dtype)))
    out = case.attend(attention, more, padded)
    close(out[:5], case.expected(q, inputs))
    assert not out[5:].any()


@pytest.mark.parametrize("attention", RAGGED)
@pytest.mark.parametrize("spans", [[(700, 40)], [(0, 150), (600, 1), (530, 64)]])
def test_chunks_of_prompts_over_a_long_prefix_equal_torch(attention: Attention, spans: list[tuple[int, int]]) -> None:
    case = Case(spans, dtype=torch.float16)
    q = case.queries()
    scale = torch.tensor(SCALE, device=DEVICE)
    close(case.attend(attention, q, case.inputs), case.expected(q, case.inputs))
    kernels = case.triton(attention)
    out = kernels.attend(q, 1, kernels.planned(case.inputs, q.dtype), scale)  # for a product that takes float8
    alike(out, to_fp8(case.expected(q, case.inputs), scale), q.dtype)


@pytest.mark.parametrize("attention", RAGGED)
def test_decodes_before_chunks_in_one_pass_equal_torch(attention: Attention) -> None:
    case = Case([(700, 1), (9, 1), (63, 1), (130, 30), (0, 5)], dtype=torch.float16)
    whole = case.inputs
    tail = span_inputs([(3, 130, 30), (4, 0, 5)]).spans
    assert tail is not None
    merged = replace(whole, spans=replace(tail, starts=tail.starts + 3), num_decodes=3)
    q = case.queries()
    expected = case.expected(q, whole)
    close(case.expected(q, merged), expected)
    close(case.attend(attention, q, merged), expected)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("is_fp8", [False, True])
def test_fixed_answers_are_the_same_bits_alone_in_a_batch_and_however_they_were_cut(
    dtype: torch.dtype, is_fp8: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if IS_INTERPRETED:  # its products are numpy's, where a row's last bits depend on its place among the rows
        monkeypatch.setattr(numpy, "matmul", product_row_by_row)
    length = FIXED_CHUNK + 60
    shape = (2, 1, 16)
    case = Case([(0, length), (0, 1), (0, 2 * FIXED_CHUNK + 200), (100, 40)], shape, dtype, is_fp8)
    asked = [63, FIXED_CHUNK - 1, length - 1]  # positions of the first sequence
    q = random(length, *case.heads[::2], dtype=dtype)
    filler = random(500, *case.heads[::2], dtype=dtype)

    def within(first: int, count: int, others: list[tuple[int, int, int]], processors: int) -> torch.Tensor:
        """Answers of ``count`` rows from position ``first`` on, behind ``others`` in one pass."""
        before = sum(new for _, _, new in others)
        rows = torch.cat((filler[:before], q[first : first + count]))
        inputs = span_inputs([*others, (0, first, count)])
        return case.attend(Attention.FIXED, rows, inputs, processors)[before:]

    whole = within(0, length, [], 132)
    for position in asked:
        tensor = torch.tensor([[0, 0, 0], [position, 2 * FIXED_CHUNK + 100, 0], [0, 2, 1]], device=DEVICE).int()
        batch, alone = PassInputs(*tensor.unbind(0)), PassInputs(*tensor[:, :1].unbind(0))
        row = q[position : position + 1]
        ways = [
            case.attend(Attention.FIXED, row, alone, 132),
            case.attend(Attention.FIXED, row, alone, 1),
            case.attend(Attention.FIXED, torch.cat((row, filler[:2])), batch, 132)[:1],
            within(position, 1, [(1, 0, 1), (3, 100, 40)], 132),
        ]
        for answer in ways:
            assert torch.equal(answer[0], whole[position]), position
    cut = FIXED_CHUNK - 7
    assert torch.equal(within(cut, length - cut, [(2, 2 * FIXED_CHUNK, 190)], 132), whole[cut:])
    assert torch.equal(within(3, 50, [], 1), whole[3:53])


@pytest.mark.skipif(IS_INTERPRETED, reason="needs CUDA graphs")
@pytest.mark.parametrize("attention", RAGGED)
def test_a_graph_takes_new_lengths_and_its_answers_never_change(attention: Attention) -> None:
    case = Case([(20_000, 1), *[(640, 1)] * 30, (3, 1)], heads=(32, 8, 128), dtype=torch.bfloat16)
    full = decodes(case)
    inputs = PassInputs(
        full.token_ids, torch.zeros_like(full.positions), torch.full_like(full.slots, case.cache.padding_slot)
    )
    q = random(32, 32, 128, dtype=torch.bfloat16)
    kernels = case.triton(attention)

    def run() -> list[torch.Tensor]:
        planned = kernels.planned(inputs, q.dtype)
        return [kernels.attend(q, layer, planned) for layer in (0, 1, 1)]

    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outs = run()
    first: list[torch.Tensor] = []
    for _ in range(300):  # a race between parts would show as another bit now and then
        inputs.positions.copy_(full.positions)
        inputs.slots.copy_(full.slots)
        graph.replay()
        first = first or [out.clone() for out in outs]
        assert all(torch.equal(out, once) for out, once in zip(outs, first, strict=True))
    assert torch.equal(outs[1], outs[2])
    close(outs[1], case.expected(q, full))
    inputs.positions.copy_(full.positions.clamp(max=77))
    graph.replay()
    shorter = PassInputs(full.token_ids, inputs.positions, full.slots)
    close(outs[2], case.expected(q, shorter))


@pytest.mark.skipif(IS_INTERPRETED, reason="needs gigabytes")
@pytest.mark.parametrize("attention", RAGGED)
def test_long_contexts_and_wide_chunks_equal_torch(attention: Attention) -> None:
    case = Case([(31_000, 600), (0, 300), (32_000, 1), (9_000, 16)], heads=(32, 8, 128), dtype=torch.bfloat16)
    q = case.queries()
    close(case.attend(attention, q, case.inputs), case.expected(q, case.inputs))


@pytest.mark.skipif(IS_INTERPRETED, reason="needs CUDA")
@pytest.mark.parametrize("merges_passes", [False, True])
def test_an_engines_tokens_in_float32_are_the_cpus(merges_passes: bool, tmp_path: Path) -> None:
    directory = save(build("qwen3"), tmp_path)
    wishes = workload(1)
    answers = []
    for device in ("cpu", "cuda"):
        runner = create_runner(
            RunnerArgs(
                model_dir=directory, device=device, dtype="float32", tokens_per_block=8, num_blocks=60,
                max_batch_size=5, merges_passes=merges_passes and device == "cuda",
            )
        )  # fmt: skip
        answers.append(served(runner, wishes, overlap=device == "cuda")[0])
        runner.close()
    assert_equal(answers[1], answers[0], wishes)
