"""A deterministic engine: the same bits alone, in any batch, chunked, cached, preempted, handed over and migrated."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_player import Answer, Engine, Wish, served, workload
from runner_player import build, random_prompt, save

from trtx.checkpoint import read_model_config
from trtx.errors import UsageError
from trtx.torch_engine.handoff import LayoutMismatch, create_transport
from trtx.torch_engine.kv_layout import layer_groups
from trtx.torch_engine.messages import Handoff, Submit
from trtx.torch_engine.runner import RunnerArgs, TorchRunner, create_runner
from trtx.torch_engine.runner.invariant_multiplier import InvariantMultiplier, RowTile

pytestmark = pytest.mark.slow

KINDS = [("float32", "auto"), ("bfloat16", "fp8")]
ALL_KINDS = [(dtype, kv) for dtype in ("float32", "bfloat16", "float16") for kv in ("auto", "fp8")]


@pytest.fixture(
    scope="module",
    params=["qwen3", *(pytest.param(family, marks=pytest.mark.proof) for family in ("qwen3_moe", "gpt_oss"))],
)
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Its gates are no whole number of vectors wide: what is left over must not round otherwise."""
    width = {"moe_intermediate_size": 51} if request.param == "qwen3_moe" else {}
    return save(build(request.param, intermediate_size=203, **width), tmp_path_factory.mktemp("checkpoint"))


def new_runner(checkpoint: Path, kind: tuple[str, str], num_blocks: int = 60, **more: Any) -> TorchRunner:
    dtype, kv_dtype = kind
    windows = read_model_config(checkpoint).windows or (None,)
    num_blocks *= len(layer_groups(windows, 1, 1))  # each group of layers has blocks of its own
    given = {"tokens_per_block": 8, "max_batch_size": 5, "deterministic": True} | more
    return create_runner(
        RunnerArgs(
            model_dir=checkpoint, device="cpu", dtype=dtype, kv_dtype=kv_dtype, num_blocks=num_blocks,
            cpu_threads=1, **given,
        )
    )  # fmt: skip


def wishes_of(seed: int, count: int = 14) -> list[Wish]:
    """Every answer with log-probabilities: without, a rounding that moves no token would not be seen."""
    return [replace(wish, params={"logprobs": 2} | wish.params) for wish in workload(seed, count)]


def alone(runner: TorchRunner, wish: Wish) -> Answer:
    """In an engine that has nothing else to do, and nothing cached; the prompt in one piece."""
    answers, _ = served(runner, [replace(wish, arrives=0, aborts=None)], overlap=False, step_tokens=512)
    return answers[0]


def bits(answer: Answer) -> list[Any]:
    def plain(entries: list[Any]) -> list[Any]:
        return [[(token, one.rank, one.logprob.hex()) for token, one in entry.items()] for entry in entries]

    return [answer.tokens, plain(answer.logprobs), plain(answer.prompt_logprobs)]


def assert_same_bits(found: Answer, expected: Answer, wish: Wish) -> None:
    if found.reason == "cancelled":
        kept = len(found.tokens)
        expected = replace(
            expected, tokens=expected.tokens[:kept], logprobs=expected.logprobs[:kept],
            prompt_logprobs=expected.prompt_logprobs[: len(found.prompt_logprobs)],
        )  # fmt: skip
    assert bits(found) == bits(expected), wish


def check_workload(checkpoint: Path, kind: tuple[str, str], seed: int, groups: int = 1) -> tuple[int, int]:
    """(steps in which something preempted waited, blocks that the prefix cache had)"""
    reference, crowded = (new_runner(checkpoint, kind, num_blocks=blocks * groups) for blocks in (60, 11))
    wishes = wishes_of(seed)
    engine_answers, paused = served(crowded, wishes, overlap=True, step_tokens=5 + seed % 20)
    reused = 0
    for index, wish in enumerate(wishes):
        assert_same_bits(engine_answers[index], alone(reference, wish), wish)
    engine = Engine(reference, overlap=True, step_tokens=31)
    for index, wish in enumerate(wishes):
        engine.core.submit(Submit(index, wish.prompt, wish.plan))
        engine.step()
    engine.finish()
    reused = engine.core.scheduler.pool.counters.reused
    for index, wish in enumerate(wishes):
        assert_same_bits(engine.answers[index], alone(reference, wish), wish)
    return paused, reused


@pytest.mark.parametrize("kind", KINDS[1:])  # make proof has all kinds, below
def test_answers_are_those_of_the_request_alone_to_the_bit(checkpoint: Path, kind: tuple[str, str]) -> None:
    paused, reused = check_workload(checkpoint, kind, seed=1)
    assert paused, "nothing was preempted"
    assert reused, "nothing was cached"


@pytest.mark.parametrize("family", ["mistral", pytest.param("qwen3", marks=pytest.mark.proof)])
def test_so_are_those_through_windows(family: str, tmp_path: Path) -> None:
    changes: dict[str, Any] = {"sliding_window": 13}
    if family == "qwen3":
        layers = ["sliding_attention", "full_attention"]
        changes |= {"num_hidden_layers": 2, "use_sliding_window": True, "layer_types": layers}
    checkpoint = save(build(family, intermediate_size=203, **changes), tmp_path)
    paused, reused = check_workload(checkpoint, KINDS[0], seed=1, groups=2 if family == "qwen3" else 1)
    assert paused or family == "mistral", "windows alone leave room for all"
    assert reused, "nothing was cached"


@pytest.mark.proof
@pytest.mark.parametrize("kind", ALL_KINDS)
def test_answers_of_many_workloads_are_those_of_the_requests_alone(checkpoint: Path, kind: tuple[str, str]) -> None:
    found = [check_workload(checkpoint, kind, seed) for seed in range(100, 115)]
    assert sum(paused for paused, _ in found) and sum(reused for _, reused in found)


def test_without_it_they_are_not(checkpoint: Path) -> None:
    """Else the tests above could not fail."""
    runner = new_runner(checkpoint, KINDS[0], deterministic=False)
    wishes = wishes_of(1)
    answers, _ = served(runner, wishes, overlap=True)
    assert any(
        bits(answers[index]) != bits(alone(runner, wish)) for index, wish in enumerate(wishes) if wish.aborts is None
    )


@pytest.mark.parametrize("kind", [KINDS[0], pytest.param(KINDS[1], marks=pytest.mark.proof)])
def test_a_handoff_and_a_peer_that_is_gone_change_no_bit(checkpoint: Path, kind: tuple[str, str]) -> None:
    wishes = [
        replace(wish, aborts=None)
        for wish in wishes_of(20, 12)
        if "prompt_logprobs" not in wish.params and len(wish.prompt) > 8
    ]
    runners = [new_runner(checkpoint, kind, num_blocks) for num_blocks in (100, 60)]
    ends = [create_transport(runner.pool, runner.geometry, routes=["direct"]) for runner in runners]
    prefill, decode = (
        Engine(runner, overlap=True, transport=end) for runner, end in zip(runners, ends, strict=True)
    )  # fmt: skip
    try:
        for index, wish in enumerate(wishes):
            prefill.core.submit(Submit(index, wish.prompt, wish.plan, handoff=Handoff("context_only")))
        told: dict[int, Handoff] = {}
        for _ in range(200):
            prefill.step()
            for index, answer in prefill.answers.items():
                if answer.handoff is not None:
                    told[index], answer.handoff = answer.handoff, None
            if len(told) == len(wishes):
                break
        handed = sorted(index for index in told if prefill.answers[index].reason != "stop")
        for index in handed:
            begun = Handoff(
                "generation_only", told[index].first_gen_tokens, told[index].first_gen_log_probs,
                opaque_state=told[index].opaque_state,
            )  # fmt: skip
            if index == handed[len(handed) // 2]:
                decode.finish()
                ends[0].close()  # as the process's end would
            decode.core.submit(Submit(index, wishes[index].prompt, wishes[index].plan, handoff=begun))
            decode.step()
        decode.finish()
    finally:
        for end in ends:
            end.close()
    recomputed = [bool(decode.answers[index].recomputed_because) for index in handed]
    assert True in recomputed and False in recomputed, recomputed
    reference = new_runner(checkpoint, kind)
    for index in handed:
        assert_same_bits(decode.answers[index], alone(reference, wishes[index]), wishes[index])


@pytest.mark.parametrize("kind", KINDS[:1])
def test_an_answer_that_goes_on_elsewhere_goes_on_with_the_same_bits(checkpoint: Path, kind: tuple[str, str]) -> None:
    """What a frontend does when a worker dies: the tokens so far are the end of the prompt of another request."""
    runner = new_runner(checkpoint, kind)
    wishes = [
        wish for wish in wishes_of(40) if "min_tokens" not in wish.params and "prompt_logprobs" not in wish.params
    ]
    went_on = 0
    for wish in wishes:
        whole = alone(runner, wish)
        kept = len(whole.tokens) // 2
        if not kept or kept == len(whole.tokens):
            continue
        params = wish.params | {"max_tokens": wish.params["max_tokens"] - kept}
        rest = alone(runner, replace(wish, prompt=wish.prompt + whole.tokens[:kept], params=params))
        assert bits(rest)[:2] == [whole.tokens[kept:], bits(whole)[1][kept:]], wish
        went_on += "temperature" in wish.params
    assert went_on, "no sampled answer went on"


def test_engines_of_another_arithmetic_refuse_each_others_kv(checkpoint: Path) -> None:
    one, other = new_runner(checkpoint, KINDS[0]), new_runner(checkpoint, KINDS[0], deterministic=False)
    assert one.geometry == new_runner(checkpoint, KINDS[0]).geometry
    ends = [create_transport(runner.pool, runner.geometry, routes=["direct"]) for runner in (one, other)]
    try:
        exported = ends[0].export(1, [0], 8, 2e9)
        with pytest.raises(LayoutMismatch, match="arithmetic"):
            ends[1].begin_read(exported, [0], [0])
    finally:
        for end in ends:
            end.close()


def test_a_padded_prompt_of_any_length_has_the_logprobs_of_its_parts(checkpoint: Path) -> None:
    """Lengths around every edge of a tile and of a chunk of KV, each in one piece and in pieces."""
    runner = new_runner(checkpoint, KINDS[1])
    for length in (1, 3, 4, 5, 127, 128, 129, 200):
        wish = Wish(0, random_prompt(length, length), {"max_tokens": 6, "logprobs": 1, "prompt_logprobs": 1}, None)
        pieces, _ = served(runner, [wish], overlap=False, step_tokens=7)
        assert_same_bits(pieces[0], alone(runner, wish), wish)


class Placed(RowTile):
    """Rounds by a row's place."""

    def __call__(self, x: torch.Tensor, weight: torch.Tensor, bias: Any, out: torch.Tensor) -> None:
        super().__call__(x, weight, bias, out)
        out[::2] *= 1 + 2**-20


def test_a_tiling_that_rounds_by_a_rows_place_is_not_used_and_none_at_all_is_refused() -> None:
    torch.manual_seed(0)
    weight = torch.randn(24, 40)
    multiplier = InvariantMultiplier([Placed(8), RowTile(16)])
    multiplier.admit(weight)
    assert [tiling.rows for tiling in multiplier.tilings(weight)] == [16]
    fallen_back = InvariantMultiplier([RowTile(8), Placed(16)])
    fallen_back.admit(weight)
    assert [tiling.rows for tiling in fallen_back.tilings(weight)] == [8]
    with pytest.raises(UsageError, match="leave it out"):
        InvariantMultiplier([Placed(8), Placed(16)]).admit(weight)


class Other(RowTile):
    """Rounds every row alike, but otherwise than :class:`RowTile`."""

    def __call__(self, x: torch.Tensor, weight: torch.Tensor, bias: Any, out: torch.Tensor) -> None:
        super().__call__(x, weight, bias, out)
        out *= 1 + 2**-20


class Unable(RowTile):
    def takes(self, weight: torch.Tensor) -> bool:
        return False


def test_the_most_tilings_that_agree_are_used_and_none_that_cannot_take_the_weight() -> None:
    torch.manual_seed(0)
    weight = torch.randn(24, 40)
    for tilings, used in (
        ([RowTile(4), RowTile(8), Other(16)], [4, 8]),
        ([RowTile(4), Other(8), Other(16)], [8, 16]),
        ([RowTile(4), Other(8), RowTile(16)], [4, 16]),
        ([RowTile(4), Other(8)], [8]),
        ([RowTile(4), RowTile(8), Unable(16)], [4, 8]),
    ):
        multiplier = InvariantMultiplier(tilings)
        multiplier.admit(weight)
        assert [tiling.rows for tiling in multiplier.tilings(weight)] == used
