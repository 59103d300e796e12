"""Log-probabilities of a prompt as servers give them: summed over what is scored, or refused with what is missing."""

from __future__ import annotations

from typing import Any

import pytest

from trtx.evals.session.client import ServerRefusal
from trtx.evals.session.prompt_logprobs import Echo, EngineData, PromptLogprobs, PromptScore

IDS = [5, 6, 7, 8]  # of which the last two are scored


def engine_data(rows: Any) -> dict[str, Any]:
    return {"nvext": {"engine_data": {"prompt_logprobs": rows}}}


def row(token: int, logprob: float, *, likeliest: float | None = None) -> dict[str, Any]:
    others = {} if likeliest is None else {"99": {"logprob": likeliest, "rank": 1}}
    return {str(token): {"logprob": logprob}, **others}


def echoed(own: list[Any], tops: list[Any]) -> dict[str, Any]:
    return {"choices": [{"logprobs": {"token_logprobs": own, "top_logprobs": tops}}]}


@pytest.mark.parametrize("first", [[], [None]], ids=["without the first token", "null for the first token"])
def test_engine_data_is_summed_from_its_end(first: list[Any]) -> None:
    rows = [*first, row(6, -9.0), row(7, -1.0), row(8, -0.5)]
    assert EngineData().scored(engine_data(rows), IDS, 2) == PromptScore(-1.5, True)
    rows[-1] = row(8, -1.5, likeliest=-0.5)
    assert EngineData().scored(engine_data(rows), IDS, 2) == PromptScore(-2.5, False)


def test_an_echo_is_summed_up_to_the_token_that_was_made() -> None:
    own, tops = [None, -9.0, -1.0, -0.5, -3.0], [None, {"a": -1.0}, {"a": -1.0}, {"a": -0.25}, {"a": -3.0}]
    assert Echo().scored(echoed(own, tops), IDS, 1) == PromptScore(-0.5, False)
    assert Echo().scored(echoed(own, tops), IDS, 2) == PromptScore(-1.5, False)


def test_an_echo_of_more_tokens_than_were_sent_is_of_another_prompt() -> None:
    begun = [None, -0.1, -9.0, -1.0, -0.5, -3.0]  # a server that put a begin-of-text token before the prompt
    found = Echo().scored(echoed(begun, [None, *[{"a": -0.1}] * 5]), IDS, 2)
    assert isinstance(found, ServerRefusal) and found.reason == (
        "the answer has logprobs of 6 tokens, and 4 were sent and one made"
    )


@pytest.mark.parametrize(
    ("way", "answer"),
    [
        (EngineData(), {"choices": []}),
        (EngineData(), engine_data([row(8, -0.5)])),
        (EngineData(), engine_data([row(7, -1.0), row(9, -0.5)])),
        (EngineData(), engine_data([row(7, -1.0), row(8, float("-inf"))])),
        (Echo(), {"choices": [{"text": " 12", "logprobs": None}]}),
        (Echo(), echoed([-1.0], [{"a": -1.0}])),
        (Echo(), echoed([None, None, None, None], [None] * 4)),
    ],
)
def test_what_does_not_cover_the_prompt_is_refused(way: PromptLogprobs, answer: dict[str, Any]) -> None:
    assert isinstance(way.scored(answer, IDS, 2), ServerRefusal)


@pytest.mark.parametrize(
    ("way", "answer", "said"),
    [
        (EngineData(), engine_data([row(7, -1.0), row(8, 3.0)]), "is 3; expected 0 at most"),
        (EngineData(), engine_data([row(7, -1.0), row(8, -0.1, likeliest=-0.1)]), "sum to 1.81; expected 1 at most"),
        (EngineData(), engine_data([row(7, -1.0), row(8, -1.0, likeliest=float("nan"))]), "not a finite number"),
        (EngineData(), engine_data([row(7, -1.0), row(8, -1.0, likeliest=float("-inf"))]), "not a finite number"),
        (Echo(), echoed([None, -1.0, -1.0, 0.5], [None, *[{"a": -1.0}] * 3]), "is 0.5; expected 0 at most"),
    ],
)
def test_what_no_probability_has_as_its_logarithm_is_refused(
    way: PromptLogprobs, answer: dict[str, Any], said: str
) -> None:
    found = way.scored(answer, IDS, 2)
    assert isinstance(found, ServerRefusal) and said in found.reason


def test_each_way_asks_for_one_token_after_the_prompt_it_was_given() -> None:
    for way in (EngineData(), Echo()):
        asked = way.question(IDS)
        assert asked.path == "completions" and asked.body["prompt"] == IDS and asked.body["max_tokens"] == 1
    assert EngineData().question(IDS).body["nvext"] == {"extra_fields": ["engine_data"]}
