"""Prompts of ``needle``: of the length that was asked, with the fact where it was asked to be."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trtx.errors import UsageError
from trtx.evals import needle
from trtx.evals.forms import Judged, Sample, SampleRequest
from trtx.evals.messages import NeedleAsked


def words(prompt: str) -> int:
    return len(prompt.split())


def made(haystack: needle.Haystack = "prose", context: int | None = 4096, **asked: Any) -> list[dict[str, Any]]:
    return needle.rows(NeedleAsked(**asked), haystack, words, context)


@given(st.integers(0, 40), st.lists(st.integers(1, 30), min_size=1, max_size=40), st.integers(0, 900))
def test_as_many_units_as_fit_are_found_whatever_each_takes(first: int, sizes: list[int], room: int) -> None:
    def tokens_of(count: int) -> int:
        return first + sum(sizes[place % len(sizes)] for place in range(count))

    found = needle.most_that_fit(tokens_of, room)
    if found is None:
        assert first > room
    else:
        count, tokens = found
        assert tokens == tokens_of(count) <= room < tokens + max(sizes) + 1


@pytest.mark.parametrize("haystack", ["prose", "look-up"])
def test_a_prompt_is_as_long_as_whole_units_make_it(haystack: needle.Haystack) -> None:
    longest_unit = 18  # words
    for row in made(haystack, lengths=(128, 700), samples=3):
        assert row["prompt_tokens"] == words(needle.prompt(row))
        assert 0 <= row["length"] - needle.ANSWER_TOKENS - row["prompt_tokens"] < longest_unit


@pytest.mark.parametrize("haystack", ["prose", "look-up"])
def test_the_needle_lies_at_its_depth_once_and_the_question_at_the_end(haystack: needle.Haystack) -> None:
    for row in made(haystack, lengths=(2000,), depths=(0, 30, 100), samples=2):
        prompt = needle.prompt(row)
        fact = f"number of the {row['key']} is {row['answer']}" if haystack == "prose" else f"{row['key']} is "
        assert prompt.count(fact) == 1
        assert prompt.index(fact) / len(prompt) == pytest.approx(row["depth"] / 100, abs=0.06)
        assert row["key"] in prompt[-90:] and row["answer"] not in prompt[-60:].partition("?")[2]


def test_samples_differ_and_come_again_the_same() -> None:
    rows = made(lengths=(256,), samples=4)
    assert len({needle.prompt(row) for row in rows}) == len(rows) == 20
    assert made(lengths=(256,), samples=4) == rows
    assert [row["depth"] for row in rows[:5]] == [0, 25, 50, 75, 100]  # one of each before a second of any


@pytest.mark.parametrize(
    ("haystack", "context", "lengths"),
    [
        ("prose", 4096, [512, 1024, 2048, 4096]),
        ("prose", 5000, [512, 1024, 2048, 4096, 5000]),
        ("look-up", 300, [64, 128, 256, 300]),
        ("prose", 200, [200]),
    ],
)
def test_lengths_are_powers_of_two_up_to_the_context_and_it(
    haystack: needle.Haystack, context: int, lengths: list[int]
) -> None:
    assert [row["length"] for row in made(haystack, context, depths=(50,), samples=1)] == lengths


@pytest.mark.parametrize(
    ("asked", "context", "said"),
    [
        ({"lengths": (512, 8192)}, 4096, "--needle-lengths 8192 exceeds the context length of 4096 tokens"),
        ({"lengths": (40,)}, 4096, "--needle-lengths 40: the question and its answer alone take"),
        ({}, None, "does not report its context length; give lengths with --needle-lengths"),
    ],
)
def test_a_length_that_can_not_be_is_refused_by_name(asked: dict[str, Any], context: int | None, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        made(context=context, **asked)


@pytest.mark.parametrize(
    ("haystack", "answer", "found"),
    [
        ("prose", " 4829173", True), ("prose", "The special number of the sea is 4,829,173.", True),
        ("prose", "It is 48291730", False), ("prose", "", False), ("prose", "482 9173", False),
        ("look-up", " 4829173\nman is 5", True), ("look-up", "", False), ("look-up", "5\n4829173", False),
    ],
)  # fmt: skip
def test_what_counts_as_retrieved(haystack: str, answer: str, found: bool) -> None:
    assert needle.is_retrieved({"haystack": haystack, "answer": "4829173"}, answer) is found


def test_a_field_without_an_answer_has_no_share() -> None:
    rows = made(lengths=(256, 512), depths=(0, 100), samples=2)
    asked = SampleRequest("generate_until", "", None, {}, "no", None, None, "stop")
    judged = (Judged("none", ("no",), {"acc": 0}),)
    answered = [Sample("needle", n, f"{n}", row, "", (asked,), judged) for n, row in enumerate(rows) if row["depth"]]
    found = needle.retrievals(rows, answered)
    assert [(one.length, one.depth, one.samples, one.answered) for one in found] == [
        (256, 0, 2, 0), (256, 100, 2, 2), (512, 0, 2, 0), (512, 100, 2, 2),
    ]  # fmt: skip
    assert found[0].retrieved is None
    assert found[1].retrieved is not None and found[1].retrieved.estimate == 0 < found[1].retrieved.high
