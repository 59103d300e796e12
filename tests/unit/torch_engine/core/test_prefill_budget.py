"""How prompts are spread over steps that have decodes, seen in what the runner is given."""

from __future__ import annotations

import random

import pytest

from tests.unit.torch_engine.core.oracle_runner import VOCAB, OracleRunner, undisturbed
from tests.unit.torch_engine.core.test_disaggregation import Pair
from trtx.config.torch_passes import WIDEST
from trtx.torch_engine.core.engine_core import EngineCore
from trtx.torch_engine.core.prefill_budget import TILE_TOKENS, PromptPace
from trtx.torch_engine.core.scheduler_limits import SchedulerLimits
from trtx.torch_engine.llmapi.sampling import SamplingParams, resolve_sampling
from trtx.torch_engine.messages import Submit

pytestmark = pytest.mark.slow

ISL, OSL, CLIENTS = 200, 40, 16


def prompt_of(seed: int) -> list[int]:
    return random.Random(seed).choices(range(VOCAB), k=ISL)


def closed_loop(limits: SchedulerLimits, rounds: int) -> tuple[list[tuple[int, int]], dict[int, list[int]]]:
    """((decodes, prompt tokens) of each step in the last of ``rounds``, tokens of each request): clients that begin
    together and send their next request at once."""
    core = EngineCore(OracleRunner(1200), limits, enable_iter_perf_stats=True)
    plan = resolve_sampling(SamplingParams(max_tokens=OSL))
    tokens: dict[int, list[int]] = {}
    left, steps = rounds * CLIENTS, list[tuple[int, int]]()

    def submit() -> None:
        core.submit(Submit(len(tokens), prompt_of(len(tokens)), plan))
        tokens[len(tokens)] = []

    for _ in range(CLIENTS):
        submit()
    while left > 0:
        report = core.step()
        for update in report.updates if report is not None else ():
            tokens[update.sequence_id] += update.token_ids
            if update.finish_reason is not None:
                left -= 1
                submit()
        if report is not None and report.stats and left <= CLIENTS:
            batch = report.stats["inflightBatchingStats"]
            steps.append((batch["numGenRequests"], batch["numCtxTokens"]))
    return steps, tokens


@pytest.mark.slow
def test_waves_become_an_even_stream() -> None:
    """A decode brings 200 / 40 prompt tokens: 88 a step of 16 with some slack, 240 in whole tiles with the decodes."""
    waves, _ = closed_loop(SchedulerLimits(CLIENTS, 8192, paced_steps=None), 8)
    assert max(tokens for _, tokens in waves) == CLIENTS * ISL, "all at once, beside no decode"
    even, tokens = closed_loop(SchedulerLimits(CLIENTS, 8192, paced_steps=32), 8)
    assert max(tokens for _, tokens in even) < 256
    assert min(decodes for decodes, _ in even) > CLIENTS / 2
    for at, found in tokens.items():
        assert found == undisturbed(prompt_of(at), OSL)[: len(found)]


def test_without_chunked_prefill_prompts_stay_whole_and_one_begins_whatever_the_share() -> None:
    limits = SchedulerLimits(CLIENTS, 8192, enable_chunked_prefill=False, paced_steps=32)
    steps, _ = closed_loop(limits, 8)
    assert {tokens % ISL for _, tokens in steps} == {0}
    assert max(tokens for _, tokens in steps) == 2 * ISL


def test_a_prompt_with_nobody_beside_it_is_not_paced() -> None:
    runner = OracleRunner(600)
    core = EngineCore(runner, SchedulerLimits(4, 8192, paced_steps=32), max_seq_len=1000)
    core.submit(Submit(0, prompt_of(0) * 4 + prompt_of(1)[:100], resolve_sampling(SamplingParams(max_tokens=1))))
    core.step()
    assert runner.steps == [(1, 900)]


def test_where_requests_end_with_their_first_token_prompts_are_not_paced() -> None:
    pace = PromptPace(32)
    assert pace.share(0, 8192) == 1024
    for outputs in [1] * 60 + [16] + [1] * 3:
        pace.ended(512, outputs)
    assert pace.share(0, 8192) == 8192
    for _ in range(10):
        pace.ended(512, 16)
    assert pace.share(0, 8192) == 1024


@pytest.mark.parametrize("decodes", [1, 64, 127, 128, 129])
@pytest.mark.parametrize("there", [1, 500, 40_000])
def test_a_share_makes_whole_tiles_with_the_decodes(decodes: int, there: int) -> None:
    pace = PromptPace(32)
    assert (decodes + pace.share(decodes, there)) % TILE_TOKENS == 0
    assert pace.share(decodes, there) >= min(there / 32, WIDEST - decodes)
    for _ in range(3):
        pace.ended(512, 128)
    assert pace.share(decodes, there) >= 4 * decodes


def test_the_pace_follows_what_ended_last() -> None:
    pace = PromptPace(10**9)
    for _ in range(10):
        pace.ended(8192, 16)
    assert pace.share(1, 1) >= 512
    for _ in range(1000):
        pace.ended(16, 512)
    assert pace.share(64, 1) <= 256


@pytest.mark.parametrize("decodes", [1, 64, 129, 1900])
def test_whatever_waits_a_step_fits_the_widest_pass(decodes: int) -> None:
    pace = PromptPace(32)
    for _ in range(10):
        pace.ended(8192, 1)
        assert decodes + pace.share(decodes, 10**6) == WIDEST


def test_prompts_that_a_peer_computed_set_no_pace() -> None:
    """Of a decode worker: what it was sent costs it no prompt tokens, and what little it computes is not hurried."""
    pair, pace, prompt = Pair(), PromptPace(32), prompt_of(0)[:30]
    pair.decode.core.scheduler._pace = pace
    pair.decode.submit(1, prompt, 5, handoff=pair.context(1, prompt))
    pair.finish_decode()
    assert pace.share(64, 1) == PromptPace(32).share(64, 1)
    pair.decode.submit(2, prompt[::-1], 5)
    pair.finish_decode()
    assert pace.share(64, 1) > PromptPace(32).share(64, 1)
