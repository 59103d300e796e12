"""The paced engine keeps its clock and the LLM API: what it yields is known beforehand."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from engine_protocol import check_engine

from tests.unit.torch_engine.llmapi import sampling_probes
from trtx.checkpoint import resolve_checkpoint
from trtx.engine import load
from trtx.engine.paced import DisaggregatedParams, PacedLLM, RequestError, RequestFailed, SamplingParams
from trtx.errors import UsageError
from trtx.stop_strings import StopStrings
from trtx.torch_engine.llmapi.sampling import FIELDS, FieldUse

PROMPT = [5, 6, 7]


@pytest.fixture(scope="module")
def model() -> Path:
    return resolve_checkpoint("synthetic:tiny").path


@pytest.fixture(scope="module")
def clock(model: Path) -> Iterator[PacedLLM]:
    with paced(model) as llm:
        yield llm


@contextmanager
def paced(model: Path, **llm_args: Any) -> Iterator[PacedLLM]:
    llm = PacedLLM(model, **llm_args)
    try:
        yield llm
    finally:
        llm.shutdown()


async def has_made(llm: PacedLLM, tokens: int) -> bool:
    """Whether the only request, of so many tokens, is through. Gives the event loop to nobody."""
    (stats,) = [stats async for stats in llm.get_stats_async(0)]
    return stats["iter"] >= tokens and stats["numActiveRequests"] == 0


async def steps(result: Any) -> list[int]:
    """How many tokens each look found."""
    widths, seen = [], 0
    async for step in result:
        widths.append(len(step.outputs[0].token_ids) - seen)
        seen = len(step.outputs[0].token_ids)
    return widths


def test_the_same_prompt_gives_the_same_tokens_and_ends_by_length(model: Path) -> None:
    async def two() -> list[Any]:
        with paced(model) as llm:
            return [await llm.generate_async(PROMPT, SamplingParams(max_tokens=9)) for _ in range(2)]

    first, second = asyncio.run(two())
    assert first.outputs[0].token_ids == second.outputs[0].token_ids
    assert len(first.outputs[0].token_ids) == 9
    assert first.outputs[0].finish_reason == "length"


def test_no_token_comes_before_its_time(model: Path) -> None:
    async def timed() -> list[float]:
        with paced(model, paced_ttft_ms=40, paced_itl_ms=10) as llm:
            started = time.monotonic()
            result = llm.generate_async(PROMPT, SamplingParams(max_tokens=4), streaming=True)
            return [time.monotonic() - started async for _ in result]

    arrived = asyncio.run(timed())
    assert arrived[0] >= 0.040
    assert arrived[-1] >= 0.070


def test_a_consumer_that_looks_late_finds_all_that_was_made_in_one_step(model: Path) -> None:
    async def late() -> list[int]:
        with paced(model) as llm:
            result = llm.generate_async(PROMPT, SamplingParams(max_tokens=50), streaming=True)
            deadline = time.monotonic() + 60
            while not await has_made(llm, 50) and time.monotonic() < deadline:
                time.sleep(0.001)  # the consumer's loop is busy; the engine's thread is not
            return await steps(result)

    assert asyncio.run(late()) == [50]


def test_output_ends_at_the_context(model: Path) -> None:
    async def ask() -> Any:
        with paced(model, max_seq_len=8) as llm:
            return await llm.generate_async(PROMPT, SamplingParams(max_tokens=100))

    assert len(asyncio.run(ask()).outputs[0].token_ids) == 5


def test_prefill_and_decode_together_give_what_one_engine_gives(model: Path) -> None:
    async def both() -> tuple[list[int], list[int]]:
        with paced(model) as prefill, paced(model) as decode:
            whole = await decode.generate_async(PROMPT, SamplingParams(max_tokens=6))
            first = await prefill.generate_async(
                PROMPT,
                SamplingParams(max_tokens=1),
                disaggregated_params=DisaggregatedParams(request_type="context_only"),
            )
            params = first.outputs[0].disaggregated_params
            rest = await decode.generate_async(
                PROMPT,
                SamplingParams(max_tokens=6),
                disaggregated_params=DisaggregatedParams(
                    request_type="generation_only", first_gen_tokens=params.first_gen_tokens
                ),
            )
            return whole.outputs[0].token_ids, rest.outputs[0].token_ids

    whole, resumed = asyncio.run(both())
    assert whole == resumed


def test_an_aborted_request_ends_as_cancelled_while_others_go_on(model: Path) -> None:
    async def ask() -> tuple[Any, Any]:
        with paced(model, paced_ttft_ms=60_000) as slow, paced(model, paced_itl_ms=1) as llm:
            never = slow.generate_async(PROMPT, SamplingParams(max_tokens=5), streaming=True)
            other = llm.generate_async(PROMPT, SamplingParams(max_tokens=5))
            never.abort()
            return await asyncio.wait_for(never.aresult(), 10), await other

    aborted, other = asyncio.run(ask())
    assert aborted.outputs[0].finish_reason == "cancelled"
    assert other.outputs[0].finish_reason == "length"


def test_batch_size_bounds_what_runs_together_and_nothing_starves(model: Path) -> None:
    async def ask() -> list[Any]:
        with paced(model, max_batch_size=2) as llm:
            return await asyncio.gather(
                *(llm.generate_async(PROMPT, SamplingParams(max_tokens=20)).aresult() for _ in range(9))
            )

    assert all(len(result.outputs[0].token_ids) == 20 for result in asyncio.run(ask()))


def test_a_stop_string_ends_a_request_and_no_part_of_it_is_text(model: Path) -> None:
    async def ask() -> Any:
        with paced(model) as llm:
            sampling = SamplingParams(max_tokens=30, stop=["HI"])
            return await llm.generate_async([1], sampling, streaming=True).aresult()

    output = asyncio.run(ask()).outputs[0]
    assert output.finish_reason == "stop"
    assert output.text.endswith("G")


def test_shutdown_ends_open_requests_with_an_error(model: Path) -> None:
    async def ask() -> None:
        llm = PacedLLM(model, paced_ttft_ms=60_000)
        result = llm.generate_async(PROMPT, SamplingParams(), streaming=True)
        asyncio.get_running_loop().call_later(0.05, llm.shutdown)
        await asyncio.wait_for(result.aresult(), 10)

    with pytest.raises(RuntimeError, match="shut down"):
        asyncio.run(ask())


def test_what_a_clock_can_not_answer_is_refused(model: Path) -> None:
    with paced(model, max_seq_len=3) as llm:
        with pytest.raises(ValueError, match="logprobs is 1; expected None: the paced engine"):
            llm.generate_async([1], SamplingParams(logprobs=1))
        with pytest.raises(RequestError, match="3 tokens; expected less than max_seq_len 3"):
            llm.generate_async(PROMPT, SamplingParams())
    with pytest.raises(UsageError, match="paced_itl_ms is -1"):
        PacedLLM(model, paced_itl_ms=-1)


@pytest.mark.parametrize("name", FIELDS)
def test_a_sampling_field_changes_answers_exactly_if_it_is_honoured(clock: PacedLLM, name: str) -> None:
    first = DisaggregatedParams(request_type="generation_only", first_gen_tokens=[1])  # special
    handed = first if name == "skip_special_tokens" else None

    def answer(**sampling: Any) -> Any:
        return clock.generate_async(PROMPT, SamplingParams(**sampling), disaggregated_params=handed).result(30)

    if FIELDS[name].torch is not FieldUse.REFUSED:  # those are refused before there is an engine
        sampling_probes.check(name, FIELDS[name].paced, answer)
    else:
        assert FIELDS[name].paced is FieldUse.REFUSED


def test_a_request_that_fails_stops_nobody_elses_clock(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = StopStrings.feed

    def feed(self: Any, token_ids: Any, *, is_last: bool) -> Any:
        if "planted" in self._stops:
            raise ZeroDivisionError("planted")
        return real(self, token_ids, is_last=is_last)

    monkeypatch.setattr(StopStrings, "feed", feed)
    with paced(model) as llm:
        bad = llm.generate_async(PROMPT, SamplingParams(max_tokens=9, stop="planted"))
        good = llm.generate_async(PROMPT, SamplingParams(max_tokens=9, stop="never said"))
        assert len(good.result(30).outputs[0].token_ids) == 9
        with pytest.raises(RequestFailed, match="ZeroDivisionError: planted"):
            bad.result(30)


def test_sampling_is_checked_when_a_request_is_made(model: Path) -> None:
    params = SamplingParams(max_tokens=None)
    with paced(model, max_seq_len=10) as llm:
        assert len(llm.generate_async(PROMPT, params).result(30).outputs[0].token_ids) == 7
        params.max_tokens = "x"  # type: ignore[assignment]
        with pytest.raises(ValueError, match="SamplingParams.max_tokens is 'x'"):
            llm.generate_async(PROMPT, params)


def test_a_worker_finds_all_that_it_asks_of_an_engine(model: Path) -> None:
    engine = load("paced").start(model, {"max_seq_len": 64, "max_batch_size": 4, "max_num_tokens": 128})
    try:
        check_engine(load("paced"), engine, hands_off=True)
        assert (engine.facts.max_batch_size, engine.facts.max_num_tokens, engine.facts.num_blocks) == (4, 128, None)
        assert engine.engine_pid is None
        assert engine.device_memory_bytes([]) is None
    finally:
        engine.shutdown()
    assert not engine.is_alive()
