"""Mixed batches of decodes and prompt chunks, and forwards padded to some sizes: the same tokens, no other KV."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from engine_player import assert_equal, served, workload
from examples import first_of
from runner_player import VOCAB, Player, build, random_prompt, save, small_runner

from trtx.checkpoint.model_config import read_model_config
from trtx.checkpoint.shapes import SHAPES
from trtx.config.torch_passes import PACED_STEPS, PASS_SIZES
from trtx.errors import UsageError
from trtx.torch_engine.runner import RunnerArgs
from trtx.torch_engine.runner.args import Passes
from trtx.torch_engine.runner.packed_pass import PackedPass
from trtx.torch_engine.runner.padded_passes import PassSize
from trtx.torch_engine.step import FROM_SLOT, Batch

pytestmark = pytest.mark.slow

SIZES = (3, 8, 24)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(build("qwen3"), tmp_path_factory.mktemp("checkpoint"))


new_runner = partial(small_runner, num_blocks=60)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("merges", "sizes", "overlap"),
    first_of(
        3,
        [(True, (), False), (False, SIZES, False), (True, SIZES, True), (True, (), True), (False, SIZES, True),
         (True, SIZES, False)],
    ),
)  # fmt: skip
@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.proof)])
def test_tokens_are_those_of_two_forwards_that_are_not_padded(
    checkpoint: Path, seed: int, overlap: bool, merges: bool, sizes: tuple[int, ...]
) -> None:
    wishes = workload(seed)
    expected, _ = served(new_runner(checkpoint), wishes, overlap=False)
    found, _ = served(new_runner(checkpoint, merges_passes=merges, pass_sizes=sizes), wishes, overlap=overlap)
    assert_equal(found, expected, wishes)


def rows_of_layers(seen: torch.profiler.profile) -> list[int]:
    """With how many rows the layers' weights were multiplied, one after another."""
    shapes = [event.input_shapes for event in seen.events() if event.name == "aten::linear"]
    return [count for count, _ in groupby(x[0] for x, weight, *_ in shapes if weight[0] != VOCAB)]


@pytest.mark.parametrize(
    ("merges", "sizes", "late", "rows"),
    [
        (False, (), 12, [2, 12, 1]),
        (True, (), 12, [14, 3]),
        (True, SIZES, 1, [3]),
        (True, SIZES, 5, [8, 6]),
        (True, SIZES, 6, [8, 6]),
        (True, SIZES, 7, [24, 7]),
        (True, SIZES, 22, [24, 7]),
        (True, SIZES, 23, [25, 3]),
    ],
)
def test_a_mixed_step_is_one_forward_padded_to_the_smallest_size_that_holds_it(
    checkpoint: Path, merges: bool, sizes: tuple[int, ...], late: int, rows: list[int]
) -> None:
    """After the last layer's attention, only rows for the last tokens of sequences remain, if that is fewer."""
    player = Player(new_runner(checkpoint, merges_passes=merges, pass_sizes=sizes))
    decoding = [player.add(random_prompt(30, 1)), player.add(random_prompt(40, 2))]
    player.step(decoding)
    another = player.add(random_prompt(late, 3))
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], record_shapes=True) as seen:
        player.step([*decoding, another])
    assert rows_of_layers(seen) == rows


def test_padding_writes_no_kv(checkpoint: Path) -> None:
    pools = []
    for sizes in ((), (64,)):
        runner = new_runner(checkpoint, merges_passes=True, pass_sizes=sizes)
        player = Player(runner)
        decoding = [player.add(random_prompt(9, 1)), player.add(random_prompt(20, 2))]
        player.step(decoding)
        player.step([*decoding, player.add(random_prompt(12, 3)), player.add(random_prompt(1, 4))])
        pools.append(runner.pool.clone())
    assert torch.equal(pools[0] != 0, pools[1] != 0)
    assert torch.allclose(pools[0], pools[1], atol=1e-4)


def test_a_decode_whose_token_the_host_has_not_seen_takes_it_from_its_slot(checkpoint: Path) -> None:
    answers = []
    for merges, sizes in ((False, ()), (True, ()), (True, (16,))):
        player = Player(new_runner(checkpoint, merges_passes=merges, pass_sizes=sizes))
        first, second = player.add(random_prompt(9, 1)), player.add(random_prompt(12, 2))
        launched = player.runner.launch(Batch([first.share(100)]))
        share = first.share(100)
        share.is_first, share.start, share.new_token_ids = False, 9, [FROM_SLOT]
        mixed = player.runner.launch(Batch([share, second.share(100)]))
        answers.append([sampled.token_id for step in (launched, mixed) for sampled in step.results()])
    assert answers[0] == answers[1] == answers[2] and None not in answers[0]


def packed(decodes: int, chunks: list[tuple[int, int]]) -> PackedPass:
    """``chunks``: (tokens before the pass, tokens of it)"""
    player = [
        *((slot, [7], 20 + slot) for slot in range(decodes)),
        *((decodes + at, [9] * count, context) for at, (context, count) in enumerate(chunks)),
    ]
    from runner_player import Playing

    shares = []
    for slot, tokens, start in player:
        share = Playing(slot, tokens, []).share(10_000)
        share.start = start
        shares.append(share)
    return PackedPass(shares, decodes)


@pytest.mark.parametrize(("decodes", "chunks"), [(0, [(0, 5)]), (3, [(0, 4), (12, 1)]), (4, [(8, 12)])])
def test_the_layout_of_a_padded_pass(decodes: int, chunks: list[tuple[int, int]]) -> None:
    size, one = PassSize.of(32, 5), packed(decodes, chunks)
    assert size.holds(one)
    memory = np.full(size.num_inputs, -77, np.int32)
    size.fill(memory, one, 5)
    inputs = size.inputs(torch.from_numpy(memory))
    real = len(one.tokens)
    assert inputs.slots.tolist() == one.slots + [5] * (32 - real)
    assert inputs.positions[:real].tolist() == one.positions
    assert inputs.decodes is not None and inputs.spans is not None
    for spans in (inputs.decodes, inputs.spans):
        assert all(
            address % 16 == 0 for address in (spans.slots.storage_offset() * 4, spans.starts.storage_offset() * 4)
        )
    ones = inputs.decodes.starts.diff().tolist()
    assert ones == [1] * decodes + [0] * (len(ones) - decodes)
    assert inputs.decodes.contexts[:decodes].tolist() == [20 + slot for slot in range(decodes)]
    lengths = inputs.spans.starts.diff().tolist()
    assert lengths == [count for _, count in chunks] + [0] * (len(lengths) - len(chunks))
    assert inputs.spans.starts[0] == decodes
    assert inputs.spans.contexts[: len(chunks)].tolist() == [context for context, _ in chunks]


def test_a_size_holds_as_many_sequences_as_it_has_room_for() -> None:
    size = PassSize.of(64, 6)
    assert size.holds(packed(6, [(0, 58)])) and not size.holds(packed(6, [(0, 59)]))
    assert size.holds(packed(0, [(0, 1)] * 4)) and not size.holds(packed(0, [(0, 1)] * 5))
    assert PassSize.of(512, 6).holds(packed(0, [(0, 1)] * 6))


@pytest.mark.parametrize("wish", [{"pass_sizes": (64, 32)}, {"pass_sizes": (0, 32)}, {"pass_sizes": (64, 64)}])
def test_sizes_that_do_not_ascend_are_refused(checkpoint: Path, wish: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match="expected ascending numbers of tokens, from 1 on"):
        RunnerArgs(model_dir=checkpoint, **wish)


@pytest.mark.parametrize("asked", [{"merges_passes": True}, {"pass_sizes": (64,)}])
def test_a_deterministic_runner_neither_merges_nor_pads(tmp_path: Path, asked: dict[str, Any]) -> None:
    checkpoint = tmp_path
    with pytest.raises(UsageError, match="does not go with deterministic"):
        RunnerArgs(model_dir=checkpoint, deterministic=True, **asked)
    (checkpoint / "config.json").write_text(json.dumps(SHAPES["qwen3-8b"].config))
    config = read_model_config(checkpoint)
    plain = Passes(merges=False, padded_sizes=[], paced_steps=None)
    assert RunnerArgs(model_dir=checkpoint, deterministic=True).passes(config, torch.device("cuda")) == plain
    free = RunnerArgs(model_dir=checkpoint, max_num_tokens=200)
    assert free.passes(config, torch.device("cuda")) == Passes(
        merges=True, padded_sizes=[64, 128, 200], paced_steps=PACED_STEPS
    )
    assert free.passes(config, torch.device("cpu")) == plain
    assert replace(free, cuda_graphs=False).passes(config, torch.device("cuda")) == plain


def test_a_small_model_keeps_two_passes_and_pads_that_of_prompts(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(SHAPES["qwen3-0.6b"].config))
    args = RunnerArgs(model_dir=tmp_path)
    found = args.passes(read_model_config(tmp_path), torch.device("cuda"))
    assert found == Passes(merges=False, padded_sizes=list(PASS_SIZES), paced_steps=None)
