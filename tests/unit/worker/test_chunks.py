"""Cumulative results of the LLM API become Dynamo's chunks: each token once, with its logprob, then one terminal."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from examples import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from trtx.stop_strings import StopStrings
from trtx.text import TextStream
from trtx.torch_engine.llmapi import CompletionOutput, Logprob
from trtx.torch_engine.llmapi.completions import KvCacheMetrics, RequestPerfMetrics
from trtx.worker.requests.chunks import ChunkWriter
from trtx.worker.requests.request import parse

PROMPT = [1, 2, 3, 4, 5]


class Letters:
    """A tokenizer whose token ``n`` is the letter with that code."""

    def encode(self, sequence: str, *, add_special_tokens: bool = True) -> Any:
        raise NotImplementedError

    def decode(self, ids: Any, skip_special_tokens: bool = True) -> str:
        return "".join(map(chr, ids))


def writer(*, stop: str | None = None, **options: Any) -> ChunkWriter:
    wire = {"token_ids": PROMPT, "stop_conditions": {"stop": stop}, "output_options": options.pop("output", {})}
    request = parse(wire, context_length=1000)
    if stop is not None:
        stream = TextStream(Letters(), skip_special_tokens=True)
        stops = StopStrings(request.stop_strings, stream, include=False, min_tokens=0)
        options |= {"stops": stops, "tokenizer": Letters()}
    return ChunkWriter(request, block_size=4, **options)


def look(output: CompletionOutput, token_ids: list[int], finish_reason: str | None = None) -> Any:
    """The same result, further on."""
    output.token_ids += token_ids
    output.logprobs += [{token_id: Logprob(-token_id / 100, 1), 0: Logprob(-9.0, 2)} for token_id in token_ids]
    output.finish_reason = finish_reason
    return SimpleNamespace(outputs=[output])


@pytest.mark.parametrize(
    ("given_reason", "sent"),
    [("length", "length"), ("not_finished", "length"), ("stop", "stop"), ("cancelled", "cancelled")],
)
def test_each_reason_in_dynamos_words(given_reason: str, sent: str) -> None:
    chunk = writer().next(look(CompletionOutput(0), [7], given_reason))
    assert chunk is not None
    assert (chunk["token_ids"], chunk["finish_reason"]) == ([7], sent)


def test_a_result_that_ends_without_a_reason_is_not_said_to_be_complete() -> None:
    ending = writer()
    chunk = ending.next(look(CompletionOutput(0), [7]))
    assert chunk is not None
    assert "finish_reason" not in chunk
    assert ending.cancelled()["finish_reason"] == "cancelled"


def test_a_look_that_finds_nothing_new_makes_no_chunk() -> None:
    output, chunks = CompletionOutput(0), writer()
    assert chunks.next(look(output, [])) is None
    assert chunks.next(look(output, [7, 8])) == {"token_ids": [7, 8], "index": 0}
    assert chunks.next(look(output, [])) is None
    assert chunks.sent == 2


@settings(max_examples=examples(30), derandomize=True, deadline=None)
@given(looks=st.lists(st.lists(st.integers(65, 90), max_size=4), min_size=1, max_size=8))
def test_chunks_join_to_the_whole_with_a_logprob_for_each_token(looks: list[list[int]]) -> None:
    output, chunks = CompletionOutput(0), writer(output={"logprobs": 1})
    reasons = [*[None] * (len(looks) - 1), "stop"]
    made = [chunks.next(look(output, tokens, reason)) for tokens, reason in zip(looks, reasons, strict=True)]
    whole = [token_id for tokens in looks for token_id in tokens]
    found = [chunk for chunk in made if chunk is not None]
    assert [token_id for chunk in found for token_id in chunk["token_ids"]] == whole
    assert [value for chunk in found for value in chunk.get("log_probs", [])] == [-token_id / 100 for token_id in whole]
    assert all(len(chunk.get("top_logprobs", [])) == len(chunk["token_ids"]) for chunk in found)
    assert [chunk.get("finish_reason") for chunk in found] == [None] * (len(found) - 1) + ["stop"]
    assert found[-1]["completion_usage"] == {
        "prompt_tokens": 5,
        "completion_tokens": len(whole),
        "total_tokens": 5 + len(whole),
        "prompt_tokens_details": {"cached_tokens": 0},
    }


@pytest.mark.parametrize(
    ("reused_blocks", "at_prefill", "mine", "told"), [(1, None, 4, 4), (2, None, 5, 5), (1, 3, 4, 3), (0, 0, 0, 0)]
)
def test_cached_tokens_are_those_of_the_prompt_and_what_prefill_found_is_what_clients_are_told(
    reused_blocks: int, at_prefill: int | None, mine: int, told: int
) -> None:
    output = CompletionOutput(0, request_perf_metrics=RequestPerfMetrics(KvCacheMetrics(reused_blocks)))
    chunks = writer(cached_at_prefill=at_prefill)
    chunk = chunks.next(look(output, [7], "length"))
    assert chunk is not None
    assert chunk["completion_usage"]["prompt_tokens_details"]["cached_tokens"] == told
    assert chunks.cached_tokens == mine


def test_what_may_begin_a_stop_string_is_held_back_and_what_is_one_ends_the_request() -> None:
    output, chunks = CompletionOutput(0), writer(stop="END", output={"logprobs": 1})
    first = chunks.next(look(output, [*b"abE"]))
    assert first is not None
    assert (first["token_ids"], first["text"], first["tokens"]) == ([*b"ab"], "ab", ["a", "b"])
    assert len(first["log_probs"]) == len(first["top_logprobs"]) == 2
    assert chunks.next(look(output, [*b"N"])) is None
    last = chunks.next(look(output, [*b"Dx"]))
    assert last is not None
    assert (last["token_ids"], last["text"], last["finish_reason"]) == ([], "", "stop")
    assert last["completion_usage"]["completion_tokens"] == 2
    assert "log_probs" not in last


def test_what_only_looked_like_a_stop_string_comes_with_the_end() -> None:
    output, chunks = CompletionOutput(0), writer(stop="END")
    assert chunks.next(look(output, [*b"EN"])) is None
    last = chunks.next(look(output, [], "length"))
    assert last is not None
    assert (last["token_ids"], last["text"], last["finish_reason"]) == ([*b"EN"], "EN", "length")


def test_prompt_logprobs_come_with_the_terminal_chunk() -> None:
    output, chunks = CompletionOutput(0, prompt_logprobs=[{2: Logprob(-0.5, 1)}]), writer()
    first, last = chunks.next(look(output, [7])), chunks.next(look(output, [8], "length"))
    assert first is not None and last is not None
    assert "engine_data" not in first
    assert last["engine_data"]["prompt_logprobs"]


def test_prompt_logprobs_that_prefill_computed_come_with_the_terminal_chunk_of_decode() -> None:
    told = [{"7": {"logprob": -0.5}}]
    chunks = writer(prompt_logprobs=told)
    last = chunks.next(look(CompletionOutput(0), [8], "length"))
    assert last is not None and last["engine_data"]["prompt_logprobs"] == told
