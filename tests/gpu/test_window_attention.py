"""Attention through windows against its definition in float32. Without a GPU: TRITON_INTERPRET=1 and triton.

The pool holds NaN before the block where a sequence's first window begins, as if that memory had other users.
"""

from __future__ import annotations

import math
import random as dice
from dataclasses import replace

import numpy
import pytest
import torch
from kernel_cases import DEVICE, IS_INTERPRETED, TOLERANCE, config, decode_inputs, random, span_inputs
from runner_player import Playing
from test_ragged_attention import RAGGED, TOKENS_PER_BLOCK, Case, decodes, product_row_by_row

from trtx.torch_engine.kv_layout import KvGeometry, layer_groups
from trtx.torch_engine.runner.fp8 import FP8
from trtx.torch_engine.runner.kernels import FIXED_CHUNK, Attention, KvCache, PassInputs
from trtx.torch_engine.runner.linear import PlainLinear
from trtx.torch_engine.runner.mlp import DenseMlp
from trtx.torch_engine.runner.packed_pass import PackedPass
from trtx.torch_engine.runner.padded_passes import PassSize
from trtx.torch_engine.runner.rope import rotary_table
from trtx.torch_engine.runner.torch_kernels import TorchKernels
from trtx.torch_engine.runner.weights import LayerWeights

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not (torch.cuda.is_available() or IS_INTERPRETED), reason="needs CUDA or TRITON_INTERPRET=1"),
]
LAYER = 1


def plain(case: Case, q: torch.Tensor, rows: list[tuple[int, int]]) -> torch.Tensor:
    """Softmax attention in float32, one query after the other. ``rows``: (slot, position) of each."""
    heads, kv_heads, dim = case.heads
    window = case.window or 1 << 20
    sinks = None if case.sinks is None else case.sinks.float().cpu()[:, None]
    out = torch.empty(len(rows), heads, dim)
    pool = case.cache.pool[:, LAYER].to(torch.float32).cpu()
    if case.cache.scales is not None:
        pool *= case.cache.scales[LAYER].cpu()[None, :, None, None, None]
    table = case.cache.block_table.cpu()
    for row, (slot, position) in enumerate(rows):
        seen = torch.arange(max(0, position - window + 1), position + 1)
        kv = pool[table[slot, seen // TOKENS_PER_BLOCK].long(), :, seen % TOKENS_PER_BLOCK]  # [tokens, 2, heads, dim]
        keys, values = kv.repeat_interleave(heads // kv_heads, dim=2).unbind(1)
        scores = torch.einsum("hd,thd->ht", q[row].float().cpu(), keys) / math.sqrt(dim)
        shares = scores.softmax(-1) if sinks is None else torch.cat((scores, sinks), 1).softmax(-1)[:, :-1]
        out[row] = torch.einsum("ht,thd->hd", shares, values)
    return out.flatten(1)


def rows_of(case: Case) -> list[tuple[int, int]]:
    return [(slot, context + i) for slot, (context, new) in enumerate(case.spans) for i in range(new)]


def check(case: Case, attention: Attention, inputs: PassInputs, rows: list[tuple[int, int]], processors: int) -> None:
    q = random(inputs.positions.shape[0], *case.heads[::2], dtype=case.dtype)
    out = case.attend(attention, q, inputs, processors)
    tolerance = TOLERANCE[case.dtype]
    torch.testing.assert_close(
        out[: len(rows)].float().cpu(), plain(case, q, rows), atol=tolerance, rtol=tolerance
    )  # fmt: skip
    assert not out[len(rows) :].any()


def drawn(seed: int) -> tuple[int, list[tuple[int, int]]]:
    """A window, and sequences of which some are shorter, some just as long and some much longer."""
    rolled = dice.Random(seed)
    window = rolled.choice([1, 7, 8, 9, 13, 31, 64, 65, 100, 128, 130])
    contexts = [0, window - 1, window, window + rolled.randint(1, 9), rolled.randint(1, 700), FIXED_CHUNK + window]
    spans = [(context, rolled.choice([1, 1, 2, 5, 17])) for context in contexts]
    rolled.shuffle(spans)
    return window, spans


@pytest.mark.parametrize("attention", RAGGED)
@pytest.mark.parametrize("seed", range(4 if IS_INTERPRETED else 12))
def test_any_lengths_through_any_window_equal_the_definition(attention: Attention, seed: int) -> None:
    window, spans = drawn(seed)
    heads = [(4, 2, 16), (7, 1, 24), (4, 4, 32), (8, 2, 16)][seed % 4]
    dtype, is_fp8 = [(torch.float32, False), (torch.float16, False), (torch.float16, True)][seed % 3]
    case = Case(spans, heads, dtype, is_fp8, seed, window)
    check(case, attention, case.inputs, rows_of(case), [1, 132][seed // 2 % 2])


@pytest.mark.parametrize("attention", RAGGED)
@pytest.mark.parametrize(
    ("window", "spans"),
    [(13, [(300, 70), (0, 40), (511, 3)]), (200, [(300, 70), (0, 40), (511, 3)]), (2100, [(2150, 70)])],
)  # up to a window of 2,048 the tiles are narrow
def test_the_first_row_of_a_chunk_sees_the_context_and_the_last_one_only_the_chunk(
    attention: Attention, window: int, spans: list[tuple[int, int]]
) -> None:
    """Tiles of several rows whose windows begin at different tokens, with tokens that all rows see and without."""
    case = Case(spans, (8, 2, 16), torch.float16, window=window)
    check(case, attention, case.inputs, rows_of(case), 132)


@pytest.mark.parametrize("attention", RAGGED)
@pytest.mark.parametrize("seed", range(6 if IS_INTERPRETED else 18))
def test_sinks_with_and_without_a_window_equal_the_definition(attention: Attention, seed: int) -> None:
    window, spans = drawn(seed)
    heads = [(8, 1, 64), (4, 4, 32), (7, 1, 24)][seed % 3]
    dtype, is_fp8 = [(torch.float32, False), (torch.float16, False), (torch.float16, True)][seed // 2 % 3]
    case = Case(spans, heads, dtype, is_fp8, seed, [window, None][seed % 2], has_sinks=True)
    check(case, attention, case.inputs, rows_of(case), [1, 132][seed // 2 % 2])
    one = decodes(case)
    check(case, attention, one, [(slot, int(position)) for slot, position in enumerate(one.positions)], 132)


@pytest.mark.parametrize("attention", RAGGED)
@pytest.mark.parametrize("is_fp8", [False, True])
def test_decodes_and_padding_equal_the_definition(attention: Attention, is_fp8: bool) -> None:
    case = Case([(0, 1), (1299, 1), (40, 1), (99, 1), (100, 1)], dtype=torch.float16, is_fp8=is_fp8, window=100)
    inputs = decodes(case)
    slots = [*range(5), case.cache.padding_slot]
    padded = decode_inputs([*inputs.positions.tolist(), 0], slots)
    check(case, attention, padded, rows_of(case), 132)


@pytest.mark.parametrize("has_sinks", [False, True])
def test_a_padded_pass_of_decodes_and_chunks_equals_the_definition(has_sinks: bool) -> None:
    spans = [(70, 1), (200, 1), (8, 1), (0, 17), (164, 20), (61, 2)]
    case = Case(spans, (8, 2, 16), torch.float16, window=61, has_sinks=has_sinks)
    shares = [Playing(slot, [0] * (context + new), [], computed=context).share(new)
              for slot, (context, new) in enumerate(case.spans)]  # fmt: skip
    size = PassSize.of(64, 9)
    memory = numpy.zeros(size.num_inputs, numpy.int32)
    size.fill(memory, PackedPass(shares, 3), case.cache.padding_slot)
    kernels, rows = case.triton(Attention.BY_LENGTH), rows_of(case)
    planned = kernels.planned(size.inputs(torch.from_numpy(memory).to(DEVICE)), case.dtype)
    q = random(64, *case.heads[::2], dtype=case.dtype)
    out = kernels.attend(q, LAYER, planned, sinks=case.sinks)[: len(rows)]
    torch.testing.assert_close(out.float().cpu(), plain(case, q, rows), atol=4e-3, rtol=4e-3)


@pytest.mark.parametrize("attention", RAGGED)
@pytest.mark.parametrize("window", [64, 1000])
def test_work_begins_at_the_window_and_not_before(attention: Attention, window: int) -> None:
    spans = [(0, 1), (0, 0), (2000, 9), (511, 1), (3, 70), (1024, 33), (5000, 1)]
    case = Case([(0, 1)], window=window)
    kernels = case.triton(attention)
    inputs = span_inputs([(slot + 10, *span) for slot, span in enumerate(spans)])
    covered: dict[tuple[int, int], list[range]] = {}
    for work in kernels.planned(inputs, torch.float16).work:
        for item in work.items[: int(work.num_items)].tolist():
            _, num_rows, slot, position, index, chunks, chunk, _ = item
            lowest = max(0, position - window + 1)
            begin = index * chunk + (lowest // chunk * chunk if attention is Attention.FIXED else lowest)
            end = position + num_rows
            tokens = range(begin, end if chunks == 1 else min(end, begin + chunk))
            assert attention is not Attention.FIXED or chunk == FIXED_CHUNK
            assert chunks * chunk < window + work.tile_rows + 2 * FIXED_CHUNK
            for row in range(num_rows):
                covered.setdefault((slot - 10, position + row), []).append(tokens)
    for slot, (context, new) in enumerate(spans):
        for position in range(context, context + new):
            tokens = [token for part in covered.pop((slot, position)) for token in part]
            assert len(set(tokens)) == len(tokens)
            assert set(tokens) >= set(range(max(0, position - window + 1), position + 1))
    assert not covered


@pytest.mark.parametrize(("window", "has_sinks"), [(FIXED_CHUNK + 21, False), (100, False), (100, True)])
def test_fixed_answers_are_the_same_bits_alone_in_a_batch_and_however_they_were_cut(
    window: int, has_sinks: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if IS_INTERPRETED:  # its products are numpy's, where a row's last bits depend on its place among the rows
        monkeypatch.setattr(numpy, "matmul", product_row_by_row)
    length = FIXED_CHUNK + 120
    case = Case([(0, length), (0, 1), (100, 40)], (2, 1, 16), torch.float16, window=window, has_sinks=has_sinks)
    q = random(length, *case.heads[::2], dtype=case.dtype)
    filler = random(41, *case.heads[::2], dtype=case.dtype)
    whole = case.attend(Attention.FIXED, q, span_inputs([(0, 0, length)]))
    for position in (63, FIXED_CHUNK + 5, length - 1):
        row = q[position : position + 1]
        alone = case.attend(Attention.FIXED, row, decode_inputs([position], [0]))
        batch = case.attend(Attention.FIXED, torch.cat((row, filler[:1])), decode_inputs([position, 0], [0, 1]), 1)
        assert torch.equal(alone[0], whole[position]) and torch.equal(batch[0], whole[position]), position
    cut = FIXED_CHUNK - 7
    rest = torch.cat((filler, q[cut:]))
    assert torch.equal(
        case.attend(Attention.FIXED, rest, span_inputs([(1, 0, 1), (2, 100, 40), (0, cut, length - cut)]))[41:],
        whole[cut:],
    )


@pytest.mark.parametrize("dtype", ["float32", "float8_e4m3fn"])
def test_each_layer_reads_and_writes_through_the_table_of_its_group(dtype: str) -> None:
    """Gemma 3's pattern: five layers of six have a window."""
    from trtx.torch_engine.runner.triton_kernels import TritonKernels

    windows = (13, 13, 13, 13, 13, None)
    shape = replace(config(heads=4, kv_heads=2, head_dim=16, windows=windows), num_layers=6)
    geometry = KvGeometry(layer_groups(windows, 2, 16), TOKENS_PER_BLOCK, dtype)
    torch.manual_seed(0)
    count, slots, width = len(geometry.groups), 3, 12
    blocks = count * slots * width + 1
    pool = torch.randn(blocks, *geometry.block_shape, device=DEVICE)
    scales = torch.rand(6, 2, device=DEVICE) + 0.5 if dtype != "float32" else None
    pool = pool if scales is None else pool.to(FP8)
    tables = (torch.randperm(blocks - 1, device=DEVICE).int() + 1)[: count * slots * width].view(count, slots, width)
    caches = [KvCache.of_groups(pool.clone(), tables, geometry, scales) for _ in range(2)]
    rotary = rotary_table(shape.rope, 16, width * TOKENS_PER_BLOCK, DEVICE)
    ours = TritonKernels(shape, caches[0], rotary, 132)
    reference = TorchKernels(shape, caches[1], rotary)
    unused = torch.empty(0, device=DEVICE)
    linear = PlainLinear(unused)
    weights = LayerWeights(unused, linear, None, None, linear, unused, DenseMlp(linear, linear))
    inputs = span_inputs([(0, 50, 20), (1, 3, 1)])
    planned = ours.planned(inputs, torch.float32)
    for layer in range(6):
        qkv = torch.randn(21, 8 * 16, device=DEVICE)
        q, expected = (one.rope_and_write(qkv, layer, weights, inputs) for one in (ours, reference))
        torch.testing.assert_close(q, expected, atol=2e-5, rtol=2e-5)
        if scales is not None:  # Triton 3.6's interpreter rounds some values to another float8
            caches[0].pool.view(torch.uint8).copy_(caches[1].pool.view(torch.uint8))
        torch.testing.assert_close(
            ours.attend(q, layer, planned), reference.attend(q, layer, inputs), atol=1e-4, rtol=1e-4
        )  # fmt: skip
