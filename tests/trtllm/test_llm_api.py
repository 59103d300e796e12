"""The LLM API that trtx's TensorRT-LLM path stands on: the same assertions for the stand-in and the real package."""

from __future__ import annotations

import asyncio
import dataclasses
import inspect
import itertools
import os
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
from engine_protocol import check_engine

from trtx.engine import load

pytestmark = pytest.mark.trtllm

PROMPT = "12 + 13 = "
COUNTING = "1 2 3 4 5"
POLL_SECONDS = 0.5
SMALL = {
    "max_batch_size": 4,
    "max_num_tokens": 512,
    "max_seq_len": 512,
    "enable_iter_perf_stats": True,
    "kv_cache_config": {"max_tokens": 4096, "enable_block_reuse": True, "event_buffer_max_size": 1024},
    "cache_transceiver_config": {"backend": "NIXL"},
    "disable_overlap_scheduler": True,
}


@pytest.fixture(scope="module")
def llm(api: Any, model_directory: str, is_standin: bool) -> Iterator[Any]:
    threads = os.environ.get("OMP_NUM_THREADS")
    if is_standin:
        os.environ["OMP_NUM_THREADS"] = "1"
    with api.LLM(model_directory, **SMALL) as engine:
        yield engine
    if threads is None:
        os.environ.pop("OMP_NUM_THREADS", None)


def greedy(api: Any, **options: Any) -> Any:
    return api.SamplingParams(max_tokens=options.pop("max_tokens", 8), **options)


# --- names and signatures ---


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        ("generate", ["inputs", "sampling_params", "use_tqdm", "lora_request", "disaggregated_params", "cache_salt"]),
        ("generate_async", ["inputs", "sampling_params", "streaming", "disaggregated_params", "trace_headers"]),
        ("get_stats_async", ["timeout"]),
        ("get_kv_cache_events_async", ["timeout"]),
    ],
)
def test_methods_take_what_trtx_gives_them(api: Any, function: str, expected: list[str]) -> None:
    given = list(inspect.signature(getattr(api.LLM, function)).parameters)
    assert set(expected) <= set(given)


def test_an_unknown_argument_of_the_llm_is_named(api: Any, model_directory: str) -> None:
    with pytest.raises(ValueError, match="max_batch_sise"):
        api.LLM(model_directory, max_batch_sise=4)


def test_an_unknown_field_of_a_section_is_named(api: Any, model_directory: str) -> None:
    with pytest.raises(ValueError, match="tokens_per_blocks"):
        api.LLM(model_directory, kv_cache_config={"tokens_per_blocks": 32})


def test_unknown_keywords_are_refused(api: Any, llm: Any) -> None:
    with pytest.raises(TypeError, match="max_token"):
        api.SamplingParams(max_token=4)
    with pytest.raises(TypeError, match="requests_type"):
        api.DisaggregatedParams(requests_type="context_only")
    with pytest.raises(TypeError, match="sampling"):
        llm.generate_async([1, 2, 3], sampling=greedy(api))


@pytest.mark.parametrize("wrong", [{"top_k": -1}, {"top_p": 1.5}, {"temperature": -1.0}, {"n": 2, "best_of": 1}])
def test_sampling_values_out_of_range_are_refused(api: Any, wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong)) if "n" not in wrong else "best_of"):
        api.SamplingParams(**wrong)


def test_sampling_params_have_no_further_attributes(api: Any) -> None:
    params = api.SamplingParams()
    with pytest.raises(AttributeError):
        params.no_such_field = 1
    with pytest.raises(TypeError):
        dataclasses.replace(params, no_such_field=1)


def test_an_unknown_request_type_is_refused(api: Any) -> None:
    with pytest.raises(ValueError, match="prefill_only"):
        api.DisaggregatedParams(request_type="prefill_only")


def test_global_request_ids_are_positive_large_and_differ(api: Any) -> None:
    ids = {api.get_global_disagg_request_id(3) for _ in range(100)}
    assert len(ids) == 100
    assert all(1 << 40 <= made < 1 << 63 for made in ids)


# --- requests ---


def test_greedy_answers_are_the_same_twice(api: Any, llm: Any) -> None:
    first, second = (llm.generate(PROMPT, greedy(api), use_tqdm=False) for _ in range(2))
    assert first.finished
    assert first.prompt_token_ids
    assert first.outputs[0].token_ids == second.outputs[0].token_ids
    assert first.outputs[0].finish_reason in ("stop", "length")


def test_a_result_counts_the_prompt_tokens_that_were_in_the_cache(api: Any, llm: Any) -> None:
    """Dynamo's worker reads it of every result."""
    prompt = [7 + number % 50 for number in range(100)]
    first, second = (llm.generate(prompt, greedy(api), use_tqdm=False) for _ in range(2))
    assert first.cached_tokens == 0
    assert 64 <= second.cached_tokens < len(prompt)


async def test_a_stream_is_cumulative(api: Any, llm: Any) -> None:
    seen: list[list[int]] = []
    output = llm.generate_async(COUNTING, greedy(api, max_tokens=6, ignore_eos=True), streaming=True)
    async for step in output:
        seen.append(list(step.outputs[0].token_ids))
    assert len(seen[-1]) == 6
    assert all(later[: len(earlier)] == earlier for earlier, later in itertools.pairwise(seen))
    assert output.outputs[0].finish_reason == "length"


async def test_an_aborted_stream_ends_as_cancelled(api: Any, llm: Any) -> None:
    output = llm.generate_async(COUNTING, greedy(api, max_tokens=400, ignore_eos=True), streaming=True)
    await anext(output)
    output.abort()
    async for _ in output:
        pass
    assert output.aborted()
    assert output.outputs[0].finish_reason == "cancelled"
    assert len(output.outputs[0].token_ids) < 400


async def test_requests_beside_each_other_do_not_mix(api: Any, llm: Any) -> None:
    alone = [(await llm.generate_async(prompt, greedy(api)).aresult()).outputs[0].token_ids for prompt in (PROMPT, "7")]
    outputs = [llm.generate_async(prompt, greedy(api)) for prompt in (PROMPT, "7")]
    together = [(await output.aresult()).outputs[0].token_ids for output in outputs]
    assert together == alone


def test_logprobs_are_one_mapping_a_token(api: Any, llm: Any) -> None:
    output = llm.generate(PROMPT, greedy(api, logprobs=2), use_tqdm=False).outputs[0]
    assert len(output.logprobs) == len(output.token_ids)
    for token_id, position in zip(output.token_ids, output.logprobs, strict=True):
        assert isinstance(position[token_id], api.Logprob)
        assert position[token_id].logprob <= 0
        assert position[token_id].rank == 1  # greedy


def forces_the_prompts_first_token(req_id: int, logits: Any, token_ids: Any, stream_ptr: Any, client_id: Any) -> None:
    wanted = token_ids[0][0]
    kept = logits[:, :, wanted].clone()
    logits.fill_(float("-inf"))
    logits[:, :, wanted] = kept


def test_logits_processors_edit_the_logits_of_their_request(api: Any, llm: Any) -> None:
    class Adapter(api.LogitsProcessor):  # type: ignore[misc, name-defined]
        def __call__(self, req_id: int, logits: Any, token_ids: Any, stream_ptr: Any, client_id: Any) -> None:
            forces_the_prompts_first_token(req_id, logits, token_ids, stream_ptr, client_id)

    free = llm.generate([9, 5, 7], greedy(api, max_tokens=4, ignore_eos=True), use_tqdm=False).outputs[0].token_ids
    for processor in (Adapter(), [Adapter()]):
        params = greedy(api, max_tokens=4, ignore_eos=True, logits_processor=processor)
        assert llm.generate([9, 5, 7], params, use_tqdm=False).outputs[0].token_ids == [9] * 4
    assert free != [9] * 4


def test_best_of_returns_the_likeliest_choices(api: Any, llm: Any) -> None:
    drawn = {"temperature": 1.5, "seed": 3, "max_tokens": 6, "ignore_eos": True}
    output = llm.generate(PROMPT, api.SamplingParams(n=2, best_of=5, **drawn), use_tqdm=False)
    assert [choice.index for choice in output.outputs] == [0, 1]
    first, second = (choice.cumulative_logprob for choice in output.outputs)
    assert first >= second


def test_a_stop_string_ends_the_text_before_it(api: Any, llm: Any) -> None:
    whole = llm.generate(PROMPT, greedy(api), use_tqdm=False).outputs[0]
    stop = whole.text[-1]
    cut = llm.generate(PROMPT, greedy(api, stop=stop), use_tqdm=False).outputs[0]
    assert cut.finish_reason == "stop"
    assert cut.stop_reason == stop
    assert cut.text == whole.text[: whole.text.index(stop)]


def test_a_prompt_that_no_iteration_holds_is_refused_alone(api: Any, llm: Any) -> None:
    with pytest.raises(api.RequestError, match="max_num_tokens"):
        llm.generate([5] * (SMALL["max_num_tokens"] + 1), greedy(api), use_tqdm=False)
    assert llm.generate(PROMPT, greedy(api), use_tqdm=False).finished


# --- disaggregation ---


def test_generation_goes_on_where_context_ended(api: Any, llm: Any, model_directory: str) -> None:
    whole = llm.generate(PROMPT, greedy(api), use_tqdm=False).outputs[0].token_ids
    ask = api.DisaggregatedParams(request_type="context_only", disagg_request_id=api.get_global_disagg_request_id(1))
    params = greedy(api)
    context = llm.generate(PROMPT, params, use_tqdm=False, disaggregated_params=ask).outputs[0]
    made = context.disaggregated_params
    assert context.finish_reason == "length"
    assert made.first_gen_tokens == whole[:1]
    assert isinstance(made.opaque_state, bytes)
    goes_on = dataclasses.replace(made, request_type="generation_only")
    # The real engine takes its own context only from another instance; two of them fit one GPU with this small model.
    with api.LLM(model_directory, **SMALL) as other:
        rest = other.generate(PROMPT, greedy(api), use_tqdm=False, disaggregated_params=goes_on)
    assert rest.outputs[0].token_ids == whole


def test_a_whole_request_needs_no_peer(api: Any, llm: Any) -> None:
    whole = llm.generate(PROMPT, greedy(api), use_tqdm=False).outputs[0].token_ids
    params = api.DisaggregatedParams(request_type="context_and_generation")
    output = llm.generate(PROMPT, greedy(api), use_tqdm=False, disaggregated_params=params)
    assert output.outputs[0].token_ids == whole


# --- what the engine says ---


async def test_stats_come_after_a_token(api: Any, llm: Any) -> None:
    await llm.generate_async(PROMPT, greedy(api)).aresult()
    rows = [row async for row in llm.get_stats_async(POLL_SECONDS)]
    assert rows
    assert {"iter", "iterLatencyMS", "numActiveRequests", "kvCacheStats", "inflightBatchingStats"} <= set(rows[-1])
    assert rows[-1]["kvCacheStats"]["tokensPerBlock"] == llm.get_kv_cache_capacity()["tokensPerBlock"]


async def test_kv_events_name_the_tokens_of_stored_blocks(api: Any, llm: Any) -> None:
    size = llm.get_kv_cache_capacity()["tokensPerBlock"]
    prompt = [11 + at % 50 for at in range(2 * size + 3)]
    await _drain(llm.get_kv_cache_events_async(POLL_SECONDS))
    await llm.generate_async(prompt, greedy(api, max_tokens=2)).aresult()
    events = await _drain(llm.get_kv_cache_events_async(POLL_SECONDS))
    ids = [event["event_id"] for event in events]
    assert ids == list(range(ids[0], ids[0] + len(ids)))
    blocks = [block for event in events if event["data"]["type"] == "stored" for block in event["data"]["blocks"]]
    stored = [token["token_id"] for block in blocks for token in block["tokens"]]
    assert stored[: 2 * size] == prompt[: 2 * size]


async def _drain(rows: AsyncIterator[dict[str, Any]]) -> list[dict[str, Any]]:
    return [row async for row in rows]


# --- the worker's side of it ---


def test_a_worker_finds_all_that_it_asks_of_an_engine(llm: Any, model_directory: str) -> None:
    from trtx.engine.tensorrt_llm.adapter import TensorRtEngine, facts_of_llm

    environment = dict(os.environ)
    try:
        api = load("tensorrt-llm")
        engine = TensorRtEngine(llm, facts_of_llm(llm, Path(model_directory), SMALL))
        check_engine(api, engine, hands_off=True, unexpected="fatal")
    finally:  # a start clears another job's variables, and sets those of the recipes
        os.environ.clear()
        os.environ.update(environment)
    assert (api.aborts_transfers, api.dies_of_stalls) == (False, True)
    assert engine.facts.block_size == llm.get_kv_cache_capacity()["tokensPerBlock"]
    assert (engine.facts.context_length, engine.facts.max_batch_size, engine.facts.dp_size) == (512, 4, 1)
    assert engine.unread_handoffs([{"numActiveRequests": 2}, {"numActiveRequests": 1, "numQueuedRequests": 4}]) == 7
    assert (engine.device_memory_bytes([{"gpuMemUsage": 5}]), engine.device_memory_bytes([{}])) == (5, None)


# --- the end ---


def test_after_shutdown_nothing_is_accepted(llm: Any) -> None:
    """Last of this engine."""
    assert llm._check_health()
    llm.shutdown()
    llm.shutdown()
    assert not llm._check_health()
    with pytest.raises(RuntimeError, match="shutting down"):
        asyncio.run(_ask(llm))


async def _ask(engine: Any) -> None:
    await engine.generate_async([1, 2, 3])
