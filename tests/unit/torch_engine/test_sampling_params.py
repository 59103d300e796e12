"""SamplingParams: TensorRT-LLM's names, and what each of them refuses."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from trtx.torch_engine.sampling import GREEDY_CHOICES_VARIABLE, SamplingParams


@pytest.mark.parametrize(
    ("fields", "greedy"),
    [
        ({}, True),
        ({"temperature": 0.0}, True),
        ({"temperature": 0.0, "top_p": 0.9}, True),
        ({"top_k": 1}, True),
        ({"temperature": 1.0}, False),
        ({"top_k": 0}, False),
        ({"top_p": 0.5}, False),
        ({"min_p": 0.1}, True),
    ],
)
def test_greedy_unless_randomness_is_asked_for(fields: dict[str, Any], greedy: bool) -> None:
    assert SamplingParams(**fields).is_greedy is greedy


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"temperature": -0.1}, "temperature is -0.1; expected a finite number from 0"),
        ({"temperature": float("nan")}, "temperature is nan"),
        ({"top_p": 1.5}, "top_p is 1.5; expected a finite number from 0 to 1"),
        ({"top_k": -1}, "top_k is -1; expected an integer of at least 0"),
        ({"top_k": 1.5}, "top_k is 1.5"),
        ({"min_p": 2}, "min_p is 2"),
        ({"max_tokens": 0}, "max_tokens is 0; expected an integer of at least 1"),
        ({"min_tokens": 9, "max_tokens": 8}, "min_tokens is 9; expected at most max_tokens, here 8"),
        ({"repetition_penalty": 0}, "repetition_penalty is 0"),
        ({"presence_penalty": float("inf")}, "presence_penalty is inf"),
        ({"seed": -1}, "seed is -1"),
        ({"n": 0}, "n is 0"),
        ({"n": 2, "temperature": 1.0, "best_of": 1}, "best_of is 1"),
        ({"n": 2}, "2 choices without randomness"),
        ({"stop": ["a", ""]}, "non-empty strings"),
        ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens is 0"),
        ({"use_beam_search": True}, "use_beam_search is True; expected False: the torch engine does not support it"),
        ({"guided_decoding": object()}, "guided_decoding"),
        ({"bad": ["word"]}, "bad is"),
        ({"logits_processor": [print]}, "logits_processor"),
        ({"return_context_logits": True}, "return_context_logits"),
    ],
)
def test_a_bad_value_is_refused_by_name(fields: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says.replace("[", r"\[")):
        SamplingParams(**fields)


def test_an_unknown_name_is_refused() -> None:
    with pytest.raises(TypeError, match="max_token"):
        SamplingParams(max_token=3)  # type: ignore[call-arg]


def test_replace_checks_again() -> None:
    params = SamplingParams(max_tokens=5, stop="x")
    assert replace(params, stop=["y", "z"]).stop_strings == ("y", "z")
    with pytest.raises(ValueError, match="top_p"):
        replace(params, top_p=2.0)


def test_equal_greedy_choices_are_served_where_tensorrt_llms_switch_allows_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(GREEDY_CHOICES_VARIABLE, "1")
    assert SamplingParams(n=2).n == 2
