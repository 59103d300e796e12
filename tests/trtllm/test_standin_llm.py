"""What the stand-in's LLM does with requests, where it differs from the torch engine behind it; one engine for all."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator
from typing import Any

import pytest

from trtx.torch_engine.llmapi.sampling import FIELDS, FieldUse

REFUSED = {name for name, known in FIELDS.items() if known.torch is FieldUse.REFUSED}
pytestmark = [pytest.mark.proof, pytest.mark.usefixtures("only_standin")]

PROMPT = "12 + 13 = "
WIDE, NARROW = 512, 128
BUFFER = 12
ARGUMENTS = {
    "max_batch_size": 4,
    "max_num_tokens": 256,
    "max_seq_len": 512,
    "guided_decoding_backend": "xgrammar",
    "enable_iter_perf_stats": True,
    "kv_cache_config": {
        "max_tokens": 2048,
        "max_attention_window": [NARROW, WIDE, WIDE],
        "event_buffer_max_size": BUFFER,
    },
    "cache_transceiver_config": {"backend": "NIXL", "transceiver_runtime": "PYTHON"},
}


@pytest.fixture(scope="module")
def llm(api: Any, model_directory: str) -> Iterator[Any]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "1")
        engine = api.LLM(model_directory, **ARGUMENTS)
    assert engine.get_stats(0) == []  # nothing before the first token, though both are switched on
    assert engine.get_kv_cache_events(0) == []
    yield engine
    engine.shutdown()


def answer(api: Any, llm: Any, prompt: Any = PROMPT, **sampling: Any) -> Any:
    return llm.generate(prompt, api.SamplingParams(**{"max_tokens": 8, **sampling})).outputs[0]


async def texts(api: Any, llm: Any, **sampling: Any) -> tuple[list[tuple[str, list[int]]], Any]:
    """Text and tokens after each step of a stream, and its output."""
    output = llm.generate_async(PROMPT, api.SamplingParams(**{"max_tokens": 8, **sampling}), streaming=True)
    seen = [(step.outputs[0].text, list(step.outputs[0].token_ids)) async for step in output]
    return seen, output.outputs[0]


def test_arguments_stay_as_given(llm: Any) -> None:
    assert (llm.args.max_seq_len, llm.args.max_beam_width, llm.args.tensor_parallel_size) == (512, 1, 1)
    capacity = llm.get_kv_cache_capacity()
    assert capacity["maxNumTokens"] == capacity["maxNumBlocks"] * capacity["tokensPerBlock"]
    assert not hasattr(llm, "max_seq_len")
    assert not hasattr(llm, "engine_pid")


async def test_a_stop_string_is_not_held_back_and_leaves_the_tokens_again(api: Any, llm: Any) -> None:
    whole, _ = await texts(api, llm)
    final_text, final_tokens = whole[-1]
    stop = final_text[-1]
    seen, output = await texts(api, llm, stop=stop)
    assert output.text == final_text[: final_text.index(stop)]
    assert (output.finish_reason, output.stop_reason) == ("stop", stop)
    assert output.token_ids == final_tokens[: len(output.token_ids)]
    _, output = await texts(api, llm, stop=stop, include_stop_str_in_output=True)
    assert output.text.endswith(stop)
    assert len(output.token_ids) > len(seen[-1][1])


def test_stop_strings_need_the_llm_to_choose_the_end(api: Any, llm: Any) -> None:
    with pytest.raises(api.RequestError, match="not processed by tokenizer"):
        answer(api, llm, stop="5", end_id=2)


def test_ignore_eos_ignores_stop_tokens_too(api: Any, llm: Any) -> None:
    first = answer(api, llm).token_ids[0]
    assert answer(api, llm, stop_token_ids=[first]).token_ids == []
    assert len(answer(api, llm, stop_token_ids=[first], ignore_eos=True).token_ids) == 8


def test_more_tokens_than_the_context_holds_are_fewer(api: Any, llm: Any) -> None:
    output = answer(api, llm, [7] * 200, max_tokens=100_000, ignore_eos=True)
    assert output.finish_reason == "length"
    assert len(output.token_ids) == 512 - 200


def test_what_the_engine_refuses_is_a_request_error(api: Any, llm: Any) -> None:
    with pytest.raises(api.RequestError, match="token id"):
        answer(api, llm, [10**6])
    with pytest.raises(api.RequestError, match=r"max_num_tokens \(256\)"):
        answer(api, llm, [7] * 257)
    assert llm._check_health()


@pytest.mark.parametrize("name", sorted(REFUSED | {"apply_batched_logits_processor"}))
def test_what_the_torch_engine_lacks_is_named(api: Any, llm: Any, name: str) -> None:
    with pytest.raises(NotImplementedError, match=f"SamplingParams.{name}"):
        answer(api, llm, **{name: [1]})


@pytest.mark.parametrize("name", ["lora_request", "kv_cache_retention_config", "_postproc_params"])
def test_an_object_that_would_be_acted_on_is_not_taken_in_silence(api: Any, llm: Any, name: str) -> None:
    with pytest.raises(NotImplementedError, match=name):
        llm.generate_async(PROMPT, **{name: object()})


def test_guided_decoding_takes_one_guide_and_follows_it(api: Any, llm: Any) -> None:
    with pytest.raises(ValueError, match="Only one guide"):
        api.SamplingParams(guided_decoding=api.GuidedDecodingParams(regex="a", grammar="b"))
    guides = api.GuidedDecodingParams(regex="[0-9]{3}x")
    assert re.fullmatch("[0-9]{3}x", answer(api, llm, guided_decoding=guides, temperature=1.0).text)


def test_guided_decoding_is_refused_without_a_backend(api: Any, model_directory: str) -> None:
    engine = api.LLM(model_directory, **ARGUMENTS | {"guided_decoding_backend": None})
    try:
        with pytest.raises(api.RequestError, match="guided_decoding_backend"):
            answer(api, engine, guided_decoding=api.GuidedDecodingParams(regex="[0-9]+"))
        assert engine._check_health()
    finally:
        engine.shutdown()


def test_stats_have_the_keys_of_page_and_source(api: Any, llm: Any, facts: dict[str, Any]) -> None:
    answer(api, llm)
    row = llm.get_stats(1)[-1]
    listed = facts["page"]["stats"]
    nested = {"kvCacheStats", "inflightBatchingStats"}
    assert set(row) <= {*listed["top"], *facts["source"]["iteration stats"], *nested}
    assert {name: set(row[name]) for name in nested} == {name: set(listed[name]) for name in nested}


def test_events_come_by_window_with_ids_in_a_row(api: Any, llm: Any, facts: dict[str, Any]) -> None:
    answer(api, llm)
    llm.get_kv_cache_events(0)
    answer(api, llm, [9 + at % 40 for at in range(70)], max_tokens=1)
    events = llm.get_kv_cache_events(1)
    assert {event["window_size"] for event in events} == {WIDE, NARROW}
    listed = facts["page"]["events"]
    for event in events:
        assert set(event) <= set(listed["envelope"])
        assert set(event["data"]) <= {"blocks", *listed["stored"]}
        assert all(set(block) <= set(listed["block in stored"]) for block in event["data"]["blocks"])
    ids = [event["event_id"] for event in events]
    assert ids == list(range(ids[0], ids[0] + len(ids)))
    by_window = {w: [e["data"]["blocks"] for e in events if e["window_size"] == w] for w in (WIDE, NARROW)}
    assert [[b["tokens"] for b in blocks] for blocks in by_window[WIDE]] == [
        [b["tokens"] for b in blocks] for blocks in by_window[NARROW]
    ]
    hashes = {w: {b["block_hash"] for blocks in by_window[w] for b in blocks} for w in by_window}
    assert not hashes[WIDE] & hashes[NARROW]


def test_a_full_buffer_loses_the_oldest_events(api: Any, llm: Any) -> None:
    answer(api, llm, [3] * 40, max_tokens=1)
    last = llm.get_kv_cache_events(1)[-1]["event_id"]
    for start in range(BUFFER):
        answer(api, llm, [start + 10] * 40, max_tokens=1)
    events = llm.get_kv_cache_events(1)
    assert len(events) == BUFFER
    assert events[0]["event_id"] > last + 1


def test_a_context_has_a_global_id_for_the_python_transceiver(api: Any, llm: Any) -> None:
    params = api.SamplingParams(max_tokens=8)
    context = api.DisaggregatedParams(request_type="context_only")
    with pytest.raises(api.RequestError, match="disagg_request_id"):
        llm.generate(PROMPT, params, disaggregated_params=context)
    asked = dataclasses.replace(context, disagg_request_id=1 << 41)
    made = llm.generate(PROMPT, params, disaggregated_params=asked).outputs[0]
    assert made.finish_reason == "length"  # its one token is its length; Dynamo's frontend goes on after no other
    assert made.disaggregated_params.disagg_request_id == 1 << 41
    assert params.max_tokens == 1  # the caller's object is changed, as by the real one


def test_a_context_that_its_first_token_ends_hands_nothing_over(api: Any, llm: Any) -> None:
    """TensorRT-LLM sends KV after "length" alone; its router then sees no ctx_request_id (TensorRT-LLM PR #15033)."""
    first = answer(api, llm).token_ids[0]
    params = api.SamplingParams(max_tokens=8, stop_token_ids=[first])
    asked = api.DisaggregatedParams(request_type="context_only", disagg_request_id=(1 << 41) + 1)
    made = llm.generate(PROMPT, params, disaggregated_params=asked).outputs[0]
    assert made.finish_reason == "stop"
    assert made.disaggregated_params.opaque_state is None
    assert made.disaggregated_params.ctx_request_id is None
