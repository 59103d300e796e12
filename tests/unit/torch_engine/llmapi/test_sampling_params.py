"""SamplingParams: TensorRT-LLM's names, and what each of them refuses."""

from __future__ import annotations

import json
import math
from contextlib import suppress
from dataclasses import astuple, replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from examples import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.torch_engine.llmapi.sampling_probes import TABLE, WITHOUT_EFFECT, without_the_likeliest
from trtx.torch_engine.llmapi.guided_decoding import GuidedDecodingParams
from trtx.torch_engine.llmapi.sampling import (
    FIELDS,
    GREEDY_CHOICES_VARIABLE,
    FieldUse,
    SamplingParams,
    resolve_sampling,
)
from trtx.torch_engine.sampling_plan import SamplingPlan


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
        ({"logits_processor": [3]}, "logits_processor is [3]; expected a callable with the parameters req_id, logits"),
        ({"logits_processor": lambda logits: None}, "logits_processor is <function"),
        ({"best_of": 3}, "3 choices without randomness"),
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


FACTS = Path(__file__).parents[3] / "standin" / "llm_api.json"
# Fields whose effect is on the prompt, the choices or the text: what they change is shown where requests are answered.
BESIDE_THE_PLAN = {
    "stop", "truncate_prompt_tokens", "n", "logits_processor", "detokenize", "add_special_tokens",
    "skip_special_tokens",
}  # fmt: skip


def test_every_field_of_tensorrt_llm_is_honoured_without_effect_or_refused() -> None:
    facts = json.loads(FACTS.read_text(encoding="utf-8"))
    theirs = {field["name"] for part in facts.values() for field in part["dataclasses"].get("SamplingParams", [])}
    theirs = {name for name in theirs if not name.startswith("_")}
    assert len(theirs) > 40
    assert FIELDS.keys() == theirs, (
        f"{sorted(FIELDS.keys() ^ theirs)} are in one only of {TABLE} and the facts of TensorRT-LLM's SamplingParams; "
        f"give each of the facts' fields its row in {TABLE}"
    )


def test_a_field_that_is_left_out_means_what_it_means_to_tensorrt_llm() -> None:
    facts = json.loads(FACTS.read_text(encoding="utf-8"))
    rows = [field for part in facts.values() for field in part["dataclasses"]["SamplingParams"]]
    ours = SamplingParams()
    for name in FIELDS:
        told, theirs = getattr(ours, name), [row["default"] for row in rows if row["name"] == name]
        expected = " or ".join(map(repr, theirs))  # of several versions; an enum's member, or its value
        assert repr(told).upper() in (repr(one).upper() for one in theirs), (
            f"SamplingParams.{name} is {told!r} where a request leaves it out, and TensorRT-LLM's is {expected}: take "
            f"that for the default of its row in {TABLE}"
        )


EXTREMES = (-1, 2**64, 10**400)


@pytest.mark.parametrize("extreme", EXTREMES, ids=["-1", "2**64", "10**400"])
@pytest.mark.parametrize("name", [name for name, field in FIELDS.items() if field.torch is FieldUse.HONOURED])
def test_a_number_of_any_size_is_refused_or_reaches_the_engine(name: str, extreme: int) -> None:
    beside = {"temperature": 1.0, "max_tokens": None} | ({} if name == "n" else {"n": 2})
    try:
        params = SamplingParams(**beside | {name: extreme})
    except ValueError:
        return
    try:
        for choice in range(2):
            sent = msgspec.msgpack.encode(resolve_sampling(params, choice))
            msgspec.msgpack.decode(sent, type=SamplingPlan)
    except (OverflowError, msgspec.MsgspecError) as error:
        pytest.fail(
            f"SamplingParams({name}={'10**400' if extreme > 2**64 else extreme}) is taken, and can't be sent to the "
            f"engine ({error}): give integer() or number() of its row in {TABLE} bounds, or min() in resolve_sampling"
        )


def test_no_refusal_becomes_silence() -> None:
    silent = {name for name, field in FIELDS.items() if field.torch is FieldUse.WITHOUT_EFFECT}
    assert silent == WITHOUT_EFFECT.keys(), (
        f"{sorted(silent ^ WITHOUT_EFFECT.keys())}: without effect in one only of {TABLE} and sampling_probes.py. "
        "A field that changes answers in TensorRT-LLM is honoured or refused; say there why this one can't"
    )


@pytest.mark.parametrize("name", [name for name, field in FIELDS.items() if field.torch is FieldUse.REFUSED])
def test_a_refused_field_is_refused_whatever_it_holds(name: str) -> None:
    for value in (object(), 2, ["x"], "x", 0.5):
        with pytest.raises(ValueError, match=f"SamplingParams.{name} is .*; expected "):
            SamplingParams(**{name: value})


PROBES: tuple[Any, ...] = (1, 3, 0.25, True, [3], "x", GuidedDecodingParams(regex="x"), without_the_likeliest)


def _plan(**fields: Any) -> str:
    return repr(resolve_sampling(SamplingParams(**fields), model_end_ids=(2,)))


@pytest.mark.parametrize("name", [name for name, field in FIELDS.items() if field.torch is not FieldUse.REFUSED])
def test_a_field_changes_the_plan_exactly_if_it_is_honoured_there(name: str) -> None:
    """A refusal that is lifted with nothing built, or an effect that is lost, shows here."""
    plans = set()
    for value in PROBES:
        with suppress(ValueError):  # of another type than the field's
            plans.add(_plan(**{"temperature": 1.0} | {name: value}))
    assert plans, "no probe suits this field; add one"
    changes = plans != {_plan(temperature=1.0)}
    assert changes is (FIELDS[name].torch is FieldUse.HONOURED and name not in BESIDE_THE_PLAN), (
        f"{TABLE} calls {name} {FIELDS[name].torch.value}, and "
        + ("it changes the plan" if changes else "no value of it changes the plan that the engine gets: resolve it in "
           "resolve_sampling, or refuse it")
    )  # fmt: skip


class Unspeakable:
    def __repr__(self) -> str:
        raise RuntimeError("no repr")


anything = st.one_of(
    st.floats(), st.integers(), st.booleans(), st.none(), st.text(), st.binary(), st.complex_numbers(),
    st.sampled_from(
        [10**5000, -(10**400), [10**5000], "\ud800", ["\ud800"], object(), Unspeakable(), {}, [], [[]], {1: 2}]
    ),
    st.lists(st.one_of(st.integers(), st.floats(), st.text())), st.just("x" * 10**6),
    st.just([[["x" * 99] * 9] * 9]),
)  # fmt: skip


@settings(max_examples=examples(200), deadline=None, derandomize=True)
@given(st.dictionaries(st.sampled_from(sorted(FIELDS)), anything, max_size=5))
def test_whatever_is_given_is_taken_or_refused_in_one_sentence(given_fields: dict[str, Any]) -> None:
    try:
        params = SamplingParams(**given_fields)
    except ValueError as error:
        said = str(error)
        assert said.startswith("SamplingParams") and len(said) < 1000 and said.isprintable(), said
        return
    plan = resolve_sampling(params, choice=2)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(plan), type=SamplingPlan) == plan
    numbers = [value for value in astuple(plan) if isinstance(value, float)]
    assert all(math.isfinite(value) for value in numbers)
    assert plan.repetition_penalty > 0 and plan.max_tokens >= 1


def test_numbers_of_numpy_are_numbers() -> None:
    params = SamplingParams(max_tokens=np.int64(4), temperature=np.float32(0.5), stop_token_ids=[np.int32(3)])
    assert [type(value) for value in (params.max_tokens, params.temperature)] == [int, float]
    assert params.stop_token_ids == [3]


def test_ignore_eos_ignores_ends_of_sequence_and_no_stop_id() -> None:
    """As vLLM does; TensorRT-LLM leaves out both."""
    plan = resolve_sampling(SamplingParams(ignore_eos=True, end_id=4, stop_token_ids=[9]), model_end_ids=(2, 3))
    assert (plan.end_ids, plan.stop_ids) == ((), (9,))


def test_choices_of_the_largest_seed_have_seeds_of_their_own() -> None:
    params = SamplingParams(seed=2**64 - 1, n=3, temperature=1.0)
    assert [resolve_sampling(params, choice).seed for choice in range(3)] == [2**64 - 1, 0, 1]
