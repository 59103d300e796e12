"""What a worker relies on of any engine: the same assertions for torch, paced and TensorRT-LLM."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest

from trtx.engine import Engine, EngineApi
from trtx.engine.api import Hints, PicturePrompt, Result

PROMPT = [5, 6, 7, 8]
HINTS = Hints(priority=0.9, dp_rank=0, conversation_id="a conversation")  # those that it has no use for, it leaves out
LONG_S = 60.0


def begin(api: EngineApi, engine: Engine, prompt: list[int] = PROMPT, *, params: Any = None, **sampling: Any) -> Result:
    """As the worker submits a request."""
    return engine.generate_async(
        prompt,
        api.SamplingParams(**{"temperature": 0.0, "detokenize": False, "return_perf_metrics": True} | sampling),
        streaming=params is None,
        disaggregated_params=params,
        cache_salt=None,
        trace_headers=None,
        hints=HINTS,
    )


async def read(result: Result) -> Any:
    """Its only choice, at its end; what came before is a beginning of it."""
    seen: list[int] = []
    async for step in result:
        token_ids = list(step.outputs[0].token_ids)
        assert token_ids[: len(seen)] == seen
        seen = token_ids
    assert result.finished
    return result.outputs[0]


async def rows(taken: AsyncIterator[Any]) -> list[dict[str, Any]]:
    return [json.loads(row) if isinstance(row, str) else dict(row) async for row in taken]


def members() -> set[str]:
    """Of the protocol, but those that every object has."""
    return {name for name in {*vars(Engine), *Engine.__annotations__} if not name.startswith("_")}


def check_engine(api: EngineApi, engine: Engine, *, hands_off: bool, unexpected: str = "unexpected") -> None:
    """``hands_off``: it was started with what prefill needs. ``unexpected``: what it makes of an exception that it does
    not know. The engine goes on after it."""
    for name in sorted(members()):
        assert hasattr(engine, name), (
            f"{type(engine).__name__} lacks {name} of Engine: give it one, or Engine a default"
        )
    asyncio.run(asyncio.wait_for(_check(api, engine, hands_off), LONG_S))
    assert api.fault(ZeroDivisionError("planted")) == unexpected
    make = api.new_request_ids(2**63 + 1)
    ids = [make() for _ in range(3)]
    assert ids == [None] * 3 or (len(set(ids)) == 3 and all(one is not None and 2**40 < one < 2**63 for one in ids))
    assert engine.is_alive()
    assert engine.cause_of_death() == ""
    if engine.facts.image_token_id is None:  # a text model, or one whose pictures are its workers' to prepare
        assert not engine.facts.takes_handles
        if api.kind != "tensorrt-llm":  # it asks the model's processor, whatever the model
            with pytest.raises(LookupError):
                engine.prepare_prompt(PicturePrompt(PROMPT))


async def _check(api: EngineApi, engine: Engine, hands_off: bool) -> None:
    facts = engine.facts
    assert facts.context_length > len(PROMPT)
    assert facts.block_size is not None and facts.block_size > 0
    assert facts.dp_size >= 1
    output = await read(begin(api, engine, max_tokens=6, ignore_eos=True))
    assert (len(output.token_ids), output.finish_reason) == (6, "length")
    assert not output.prompt_logprobs and output.disaggregated_params is None
    assert output.request_perf_metrics is None or output.request_perf_metrics.kv_cache_metrics.num_reused_blocks >= 0
    again = await read(begin(api, engine, max_tokens=6, ignore_eos=True))
    assert list(again.token_ids) == list(output.token_ids)

    aborted = begin(api, engine, max_tokens=facts.context_length - len(PROMPT), ignore_eos=True)
    aborted.abort()
    assert (await read(aborted)).finish_reason == "cancelled"

    try:
        await read(begin(api, engine, [5] * (facts.context_length + 1), max_tokens=1))
    except Exception as error:  # a ValueError where it is begun, the engine's own where it is read
        assert isinstance(error, ValueError) or api.fault(error) == "refused", repr(error)
    else:
        raise AssertionError("a prompt that is longer than the context was answered")

    stats = await rows(engine.get_stats_async(0.5))
    assert stats and {"iter", "numActiveRequests", "numQueuedRequests"} <= stats[-1].keys()
    memory = engine.device_memory_bytes(stats)
    assert memory is None or memory > 0
    events = await rows(engine.get_kv_cache_events_async(0.1))
    assert facts.has_kv_events or not events

    assert engine.unread_handoffs([]) == 0
    totals = engine.handoff_stats()
    assert totals is None or (totals.leases, totals.reads, totals.failed_reads) == (0, 0, 0)
    if hands_off:
        ask = api.DisaggregatedParams(request_type="context_only", disagg_request_id=api.new_request_ids(1)())
        first = await read(begin(api, engine, params=ask, max_tokens=1))
        assert first.finish_reason in ("length", "not_finished")
        assert list(first.disaggregated_params.first_gen_tokens) == list(output.token_ids[:1])
        if totals is not None:
            counted = engine.handoff_stats()
            assert counted is not None
            assert (counted.leases, engine.unread_handoffs([])) == (1, 1)
