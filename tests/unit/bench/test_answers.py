"""The judge of one answer: the rule as a property, and what servers were seen to send."""

from __future__ import annotations

import json
from typing import Any

import pytest
from examples import examples
from hostile_server import END, OSL, chunk, usage, words
from hypothesis import given, settings
from hypothesis import strategies as st

from trtx.bench.answers import Answer, RequestedOutput, not_a_count
from trtx.bench.answers import words as said

EXACT = {"stream": True, "max_completion_tokens": OSL, "min_tokens": OSL, "ignore_eos": True}
Events = list[dict[str, Any]]


def fault(events: Events, *, is_done: bool = True, **asked: Any) -> str | None:
    answer = Answer()
    for event in events:
        answer.add_text(json.dumps(event))
    if is_done:
        answer.add_text("[DONE]")
    return answer.fault(RequestedOutput.of(EXACT | asked))


@st.composite
def whole_answers(draw: st.DrawFn) -> Events:
    """An honest stream of ``OSL`` tokens, some of them in one event, some without text of their own."""
    pieces = draw(st.integers(1, OSL))
    return [*words(pieces), END, usage(OSL)]


@given(whole_answers())
@settings(derandomize=True, max_examples=examples(30))
def test_an_honest_stream_is_whole_however_its_tokens_are_grouped(events: Events) -> None:
    assert fault(events) is None


@given(whole_answers(), st.data())
@settings(derandomize=True, max_examples=examples(100))
def test_a_stream_cut_anywhere_before_its_end_is_a_failure(events: Events, data: st.DataObject) -> None:
    kept = events[: data.draw(st.integers(0, len(events)))]
    assert fault(kept, is_done=False) is not None
    if END not in kept:  # Dynamo ends a stream whose worker died with [DONE]
        assert fault(kept) is not None


@given(
    whole_answers(), st.integers(0, 10), st.sampled_from([{"error": {"message": "m"}}, {"error": "m", "choices": []}])
)
@settings(derandomize=True, max_examples=examples(50))
def test_an_error_anywhere_on_a_stream_is_a_failure(events: Events, where: int, error: dict[str, Any]) -> None:
    assert fault([*events[:where], error, *events[where:]]) == "error in the answer: m"


@given(st.integers(0, 4 * OSL), st.integers(1, OSL), st.sampled_from(["length", "stop"]), st.booleans())
@settings(derandomize=True, max_examples=examples(200))
def test_a_count_passes_only_if_it_is_what_was_asked_or_a_stop_explains_it(
    tokens: int, pieces: int, finish_reason: str, may_stop: bool
) -> None:
    asked = {} if not may_stop else {"ignore_eos": False, "min_tokens": 0}
    passes = fault([*words(pieces), chunk({}, finish_reason), usage(tokens)], **asked) is None
    explained = tokens == OSL or (may_stop and finish_reason == "stop" and tokens < OSL)
    assert passes == (explained and (pieces <= tokens or tokens == OSL))


@pytest.mark.parametrize("finish_reason", ["error", "abort", "cancelled", "content_filter", "timeout"])
def test_a_finish_reason_that_is_no_ending_is_a_failure(finish_reason: str) -> None:
    assert (
        fault([*words(OSL), chunk({}, finish_reason), usage(OSL)])
        == f"ended early with finish_reason {finish_reason!r}"
    )


def test_every_choice_must_end() -> None:
    second = {"choices": [{"index": 1, "delta": {}, "finish_reason": "length"}], "object": "chat.completion.chunk"}
    assert fault([*words(OSL), END, usage(2 * OSL)], n=2) == "cut off: no finish_reason"
    assert fault([*words(OSL), END, second, usage(2 * OSL)], n=2) is None
    assert fault([*words(OSL), END, second, usage(OSL)]) == "2 choices ended, but 1 was requested"
    begun = {"choices": [{"index": 1, "delta": {"content": "w"}}], "object": "chat.completion.chunk"}
    assert fault([*words(OSL), begun, END, usage(OSL)]) == "cut off: no finish_reason"


def test_an_end_that_cuts_a_choice_is_not_mended_by_one_after_it() -> None:
    assert fault([*words(OSL), chunk({}, "abort"), END, usage(OSL)]) == "ended early with finish_reason 'abort'"
    assert fault([*words(OSL), END, chunk({}, "abort"), usage(OSL)]) == "ended early with finish_reason 'abort'"
    assert fault([*words(OSL), END, END, usage(OSL)]) is None


def test_stop_strings_may_end_an_answer_that_ignores_the_end_of_sequence() -> None:
    events = [*words(4), chunk({}, "stop"), usage(4)]
    assert fault(events, min_tokens=0) == "stopped after 4 tokens, although ignore_eos was requested"
    assert fault(events, min_tokens=0, stop=["\n"]) is None


def test_min_tokens_forbids_an_earlier_stop_whatever_else_allows_one() -> None:
    events = [*words(4), chunk({}, "stop"), usage(4)]
    assert fault(events, ignore_eos=False, min_tokens=4) is None
    assert (
        fault(events, ignore_eos=False, min_tokens=5) == "stopped after 4 tokens, although min_tokens 5 was requested"
    )


def test_without_usage_a_stop_that_was_forbidden_still_shows() -> None:
    assert fault([*words(OSL), chunk({}, "stop")]) == "stopped by itself, although ignore_eos was requested"
    assert fault([*words(OSL), END]) is None


def test_a_whole_body_is_whole_where_no_stream_was_asked() -> None:
    body = {
        "object": "text_completion",
        "choices": [{"index": 0, "text": "a b", "finish_reason": "length"}],
        "usage": {"completion_tokens": OSL},
    }
    assert fault([body], is_done=False, stream=False) is None
    assert fault([body | {"usage": {"completion_tokens": "8"}}], stream=False) == (
        'usage without a count of completion tokens: {"completion_tokens": "8"}'
    )


@pytest.mark.parametrize(
    ("text", "short"),
    [
        ('{"error": {"message": "model not found"}}', "model not found"),
        ('{"error": "no such model"}', "no such model"),
        ('{"detail": [{"loc": ["body"], "msg": "field required"}]}', "field required"),
        ('{"object": "error", "message": "bad\\nrequest"}', "bad request"),
        ("<html><head><title>502 Bad\nGateway</title></head><body>nginx</body></html>", "502 Bad Gateway"),
        ("<p>Not <b>here</b></p><script>alert(1)</script>", "Not here"),
        ("\x1b[31mred\x1b[0m\x07 alert", "[31mred [0m alert"),
        ("{not json", "{not json"),
        ("", ""),
    ],
)
def test_a_servers_own_words_are_short_and_harmless(text: str, short: str) -> None:
    assert said(text) == short


def test_long_words_are_shortened() -> None:
    assert len(said("x" * 5000)) == 200


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.sampled_from(["", "8", "w", "error"]),
    lambda inner: (
        st.lists(inner, max_size=2)
        | st.dictionaries(
            st.sampled_from(
                ["object", "choices", "delta", "message", "content", "finish_reason", "usage", "completion_tokens"]
            ),
            inner,
            max_size=3,
        )
    ),
    max_leaves=8,
)
EVENTS = st.fixed_dictionaries(
    {},
    optional={
        "object": st.sampled_from(["chat.completion.chunk", "chat.completion", "", None]) | JSON,
        "choices": st.lists(
            st.fixed_dictionaries({}, optional=dict.fromkeys(("delta", "message", "index", "finish_reason"), JSON))
            | JSON,
            max_size=2,
        ),
        "usage": JSON,
    },
)


@given(st.lists(EVENTS | JSON, max_size=3))
@settings(derandomize=True, max_examples=examples(100))
def test_whatever_json_a_server_sends_is_judged(events: list[Any]) -> None:
    assert fault([*events, *words(OSL - 1)]) is not None  # the answer itself has no end


def test_text_in_more_pieces_than_tokens_is_whole_where_as_many_tokens_came_as_asked() -> None:
    assert fault([*words(OSL + 4), END, usage(OSL)]) is None
    assert fault([*words(6), chunk({}, "stop"), usage(4)], ignore_eos=False, min_tokens=0) == (
        "usage counts 4 tokens, but text came in 6 pieces"
    )


@pytest.mark.parametrize(
    ("counts", "bad"),
    [
        ({"completion_tokens": 8}, None),
        ({"completion_tokens": 8, "prompt_tokens": None, "queue_time": 0.5, "service_tier": "x"}, None),
        ({"completion_tokens": "8"}, "completion_tokens"),
        ({"completion_tokens": 8.0}, "completion_tokens"),
        ({"completion_tokens": -1}, "completion_tokens"),
        ({"completion_tokens": True}, "completion_tokens"),
        ({"completion_tokens": 2**80}, "completion_tokens"),
        ({"output_tokens": 8}, "completion_tokens"),
        ({"completion_tokens": 8, "prompt_tokens": 64.0}, "prompt_tokens"),
        ({"completion_tokens": 8, "prompt_tokens_details": {"cached_tokens": "3"}}, "cached_tokens"),
        ([8], "a form"),
    ],
)
def test_a_usage_is_one_only_if_all_its_counts_are_counts(counts: Any, bad: str | None) -> None:
    assert not_a_count(counts) == bad
