"""Three positions a token and deepstack, against transformers' Qwen2.5-VL and Qwen3-VL: positions, and logits.

Not tokens alone: random models answer the same with the positions of a transposed picture.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from engine_player import Answer, Engine
from examples import first_of
from mrope_player import FAMILIES, IMAGE, PROMPTS, VIDEO, Film, Grid, Seen, build_vl

from trtx.torch_engine.core.engine_core import EngineCore
from trtx.torch_engine.core.scheduler_limits import SchedulerLimits
from trtx.torch_engine.handoff import KvTransport, create_transport
from trtx.torch_engine.llmapi.sampling import SamplingParams, resolve_sampling
from trtx.torch_engine.media_positions import extent, position_delta
from trtx.torch_engine.messages import Handoff, Submit
from trtx.torch_engine.runner import RunnerArgs, TorchRunner, create_runner
from trtx.torch_engine.runner.mrope import positions_between
from trtx.torch_engine.step import StepEmbedding

pytestmark = pytest.mark.slow

COUNT = 8
CLOSE = 2e-4
FAR = 20 * CLOSE  # what a wrong position moves at least, somewhere


@pytest.fixture(scope="module", params=FAMILIES)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    made, directory = build_vl(request.param), tmp_path_factory.mktemp("checkpoint")
    made.save_pretrained(directory)
    return made, directory


def new_runner(model: tuple[Any, Path], num_blocks: int = 90) -> TorchRunner:
    return create_runner(
        RunnerArgs(model_dir=model[1], device="cpu", tokens_per_block=4, num_blocks=num_blocks, max_batch_size=6)
    )


@pytest.fixture(scope="module")
def runner(model: tuple[Any, Path]) -> TorchRunner:
    return new_runner(model)


@pytest.fixture(scope="module")
def prompts(model: tuple[Any, Path]) -> list[Seen]:
    return [Seen(model[0], parts) for parts in PROMPTS.values()]


def engine_of(runner: TorchRunner, tokens: int = 64, transport: KvTransport | None = None) -> Engine:
    engine = Engine(runner, overlap=True, transport=transport)
    engine.core = EngineCore(runner, SchedulerLimits(6, tokens), transport=transport)
    return engine


def put(engine: Engine, prompts: list[Seen]) -> None:
    for one in prompts:
        for key, rows in one.features().items():
            engine.core.scheduler.media.put(key, StepEmbedding(rows.shape[0], rows))


def submit(
    engine: Engine, at: int, one: Seen, handoff: Handoff | None = None, *, count: int = COUNT, prompt: int | None = 0
) -> None:
    plan = resolve_sampling(
        SamplingParams(max_tokens=count, ignore_eos=True, logprobs=3, prompt_logprobs=prompt, temperature=0.0)
    )
    engine.core.submit(Submit(at, one.ids, plan, handoff=handoff, media=one.spans))


def assert_logits(one: Seen, answer: Answer) -> None:
    """Of the prompt's tokens, where they were asked for, and of all that was generated."""
    # transformers takes a placeholder that was generated for one of a picture.
    count = next((at for at, token in enumerate(answer.tokens) if token in (IMAGE, VIDEO)), len(answer.tokens))
    ids = one.ids + answer.tokens[:count]
    expected = one.logprobs(ids)
    entries = answer.prompt_logprobs + answer.logprobs[:count]
    start = len(ids) - len(entries)
    for position, entry in enumerate(entries, start=start):
        for token, value in entry.items():
            assert value.logprob == pytest.approx(expected[position - 1, token].item(), abs=CLOSE), (position, token)


@pytest.mark.parametrize(
    "tokens", [pytest.param(6, marks=pytest.mark.proof), 7, pytest.param(11, marks=pytest.mark.proof), 64]
)
def test_logits_are_transformers_wherever_a_prompt_is_cut(
    runner: TorchRunner, prompts: list[Seen], tokens: int
) -> None:
    engine = engine_of(runner, tokens)
    put(engine, prompts)
    for at, one in enumerate(prompts):
        submit(engine, at, one)
    engine.finish()
    for at, one in enumerate(prompts):
        answer = engine.answers[at]
        assert len(answer.tokens) == COUNT and len(answer.prompt_logprobs) == len(one.ids) - 1
        assert_logits(one, answer)


def test_logits_are_transformers_from_the_prefix_cache_and_after_preemption(
    model: tuple[Any, Path], prompts: list[Seen]
) -> None:
    engine = engine_of(new_runner(model, num_blocks=16))
    put(engine, prompts)
    for first in (0, 10):
        for at, one in enumerate(prompts):
            submit(engine, first + at, one, count=20, prompt=None)
        engine.finish()
    assert engine.paused and engine.core.scheduler.pool.counters.reused
    for at, one in enumerate(prompts):
        assert_logits(one, engine.answers[at])
        assert_logits(one, engine.answers[10 + at])


def test_a_decode_side_knows_the_positions_and_needs_no_picture(
    runner: TorchRunner, model: tuple[Any, Path], prompts: list[Seen]
) -> None:
    there = new_runner(model)
    ends = [create_transport(one.pool, one.geometry, routes=["direct"]) for one in (runner, there)]
    try:
        prefill, decode = engine_of(runner, transport=ends[0]), engine_of(there, transport=ends[1])
        put(prefill, prompts)
        for at, one in enumerate(prompts):
            submit(prefill, at, one, Handoff("context_only"), prompt=None)
        handed = 0
        for _ in range(2000):
            prefill.step()
            for at, answer in prefill.answers.items():
                if answer.handoff is not None:
                    state = msgspec.structs.replace(answer.handoff, request_type="generation_only")
                    submit(decode, at, prompts[at], state, prompt=None)
                    answer.handoff, handed = None, handed + 1
            decode.step()
            if handed == len(prompts) and decode.is_idle:
                break
        for at, one in enumerate(prompts):
            assert len(decode.answers[at].tokens) == COUNT
            assert_logits(one, decode.answers[at])
    finally:
        for end in ends:
            end.close()


@pytest.mark.parametrize("name", ["portrait", "several"])
def test_a_transposed_grid_is_seen_in_the_logits(runner: TorchRunner, prompts: list[Seen], name: str) -> None:
    """What the tests above rest on: a wrong position is further off than they allow."""
    one = prompts[list(PROMPTS).index(name)]
    engine = engine_of(runner)
    put(engine, [one])
    spans = [
        msgspec.structs.replace(span, grid=(span.grid[0], span.grid[2], span.grid[1]))
        for span in one.spans
        if span.grid
    ]
    plan = resolve_sampling(SamplingParams(max_tokens=1, ignore_eos=True, prompt_logprobs=0))
    engine.core.submit(Submit(0, one.ids, plan, media=spans))
    engine.finish()
    expected = one.logprobs(one.ids)
    off = [
        abs(entry[token].logprob - expected[position, token].item())
        for position, (entry, token) in enumerate(zip(engine.answers[0].prompt_logprobs, one.ids[1:], strict=True))
    ]
    assert max(off) > FAR


def test_seconds_of_a_video_are_seen_in_the_logits(model: tuple[Any, Path], runner: TorchRunner) -> None:
    """Of Qwen2.5-VL, in whose positions they are; Qwen3-VL reads them."""
    parts: list[int | Grid | Film] = [3, Film((3, 2, 1), 1.3), 4]
    one = Seen(model[0], parts)
    engine = engine_of(runner)
    put(engine, [one])
    spans = [msgspec.structs.replace(span, time_step=1.0) for span in one.spans]
    plan = resolve_sampling(SamplingParams(max_tokens=1, ignore_eos=True, prompt_logprobs=0))
    engine.core.submit(Submit(0, one.ids, plan, media=spans))
    engine.finish()
    expected = one.logprobs(one.ids)
    entries = engine.answers[0].prompt_logprobs
    off = max(
        abs(entry[token].logprob - expected[position, token].item())
        for position, (entry, token) in enumerate(zip(entries, one.ids[1:], strict=True))
    )
    assert off > FAR if spans != one.spans else off < CLOSE


def test_a_second_turn_reuses_the_answer_about_a_video(model: tuple[Any, Path]) -> None:
    """What was generated behind a long video has the positions that it has as text of the next prompt."""
    engine = engine_of(new_runner(model))
    parts: list[int | Grid | Film] = [3, Film((3, 2, 1), 2.3), 5]
    one = Seen(model[0], parts)
    put(engine, [one])
    submit(engine, 0, one, count=12, prompt=None)
    engine.finish()
    turn = Seen(model[0], parts)
    assert not {IMAGE, VIDEO} & {*engine.answers[0].tokens}, "transformers would take it for one of a video"
    turn.ids += [*engine.answers[0].tokens, 7, 8, 9]
    before = engine.core.scheduler.pool.counters.reused
    submit(engine, 1, turn, prompt=None)
    engine.finish()
    known = len(one.ids) + 11  # the last generated token was never computed
    assert engine.core.scheduler.pool.counters.reused - before == known // 4
    assert_logits(turn, engine.answers[1])


def test_a_video_that_plays_on_leaves_fewer_positions_for_the_answer(
    model: tuple[Any, Path], runner: TorchRunner
) -> None:
    """Of 360, which the blocks hold: no position past them is computed, which no table has."""
    engine = engine_of(runner)
    for at, (step_s, expected) in enumerate(((40.0, 360 - 2 - 2 * 160 - 1), (80.0, 0))):
        one = Seen(model[0], [1, Film((3, 1, 1), step_s)])
        if len(one.spans) > 1:
            pytest.skip("Qwen3-VL reads when a step is, and has it in no position")
        put(engine, [one])
        plan = resolve_sampling(SamplingParams(max_tokens=500, ignore_eos=True, temperature=0.0))
        engine.core.submit(Submit(at, one.ids, plan, media=one.spans))
        if expected:
            engine.finish()
            assert len(engine.answers[at].tokens) == expected
        else:
            with pytest.raises(AssertionError, match="5 tokens, and a video in it plays 638 positions longer"):
                engine.finish()


def test_media_without_a_grid_are_refused(runner: TorchRunner, prompts: list[Seen]) -> None:
    engine = engine_of(runner)
    put(engine, prompts)
    one = prompts[0]
    spans = [msgspec.structs.replace(span, grid=None) for span in one.spans]
    engine.core.submit(Submit(0, one.ids, resolve_sampling(SamplingParams(max_tokens=1)), media=spans))
    with pytest.raises(AssertionError, match="media 0 has no grid"):
        engine.finish()


@pytest.mark.parametrize(
    "parts",
    [
        *PROMPTS.values(),
        [(1, 5, 1), 1, (1, 1, 5)],
        [1, Film((4, 2, 2), 1.0), 1, (1, 2, 2), 2],
        [1, Film((6, 1, 2), 1.0)],
        [Film((5, 1, 1), 1.0), 2, (1, 3, 3)],
        [Film((4, 1, 2), 0.3), 1, (1, 1, 2)],
        [1, Film((3, 2, 2), 11.7)],
        [2, Film((2, 1, 1), 0.9), 1, Film((2, 1, 1), 0.9), Film((2, 1, 1), 3.1), 1],
        [1, Film((16, 4, 6), 2.25), 7, Film((2, 6, 4), 0.5), 1, (1, 2, 1), 3],
    ],
)
def test_positions_are_those_of_get_rope_index_in_every_cut(
    model: tuple[Any, Path], parts: list[int | Grid | Film]
) -> None:
    """Of the prompt and of what is generated behind it."""
    one = Seen(model[0], parts)
    whole, length = one.positions(5), len(one.ids)
    assert position_delta(one.spans) == int(whole[0, length]) - length
    for cut in range(length + 5):
        assert torch.tensor(positions_between(one.spans, 0, cut)).tolist() == whole[:, :cut].tolist()
        assert torch.tensor(positions_between(one.spans, cut, length + 5)).tolist() == whole[:, cut:].tolist()


@pytest.mark.parametrize("name", PROMPTS)
def test_where_transformers_own_rule_differs(model: tuple[Any, Path], name: str) -> None:
    """Behind videos of Qwen2.5-VL that last longer than they are wide or high, and nowhere else. Once this fails,
    ``rope_index`` can go, and what docs/multimodal.md says of it."""
    one = Seen(model[0], PROMPTS[name])
    is_long = any(span.grid and extent(span) > max(span.grid[1:]) for span in one.spans)
    if one.spans:
        assert torch.equal(one.positions(3), one.own_positions(3)) == (not is_long)


@pytest.mark.parametrize("tokens", first_of(1, [7, 64]))
def test_tokens_are_those_of_generate(runner: TorchRunner, prompts: list[Seen], tokens: int) -> None:
    """Behind text: behind a placeholder, with which no chat template ends, ``generate()`` goes on from its own three
    positions."""
    prompts = [one for one in prompts if one.ids[-1] not in (IMAGE, VIDEO)]
    engine = engine_of(runner, tokens)
    put(engine, prompts)
    for at, one in enumerate(prompts):
        submit(engine, at, one, count=12, prompt=None)
    engine.finish()
    for at, one in enumerate(prompts):
        expected, found = one.generated(12), engine.answers[at].tokens
        # transformers takes a placeholder that was generated for one of a picture.
        count = next((at for at, token in enumerate(expected) if token in (IMAGE, VIDEO)), 11) + 1
        assert found[:count] == expected[:count]
