"""Dynamo's request dict becomes sampling parameters, or a refusal that names field, value and range."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from trtx.engine.api import Hints
from trtx.torch_engine.llmapi.guided_decoding import GuidedDecodingParams
from trtx.torch_engine.llmapi.sampling import SamplingParams
from trtx.worker.requests.grammars import RequestGrammar
from trtx.worker.requests.invalid_request import InvalidRequest
from trtx.worker.requests.request import parse


def request(
    *, stops: dict[str, Any] | None = None, sampling: dict[str, Any] | None = None, **others: Any
) -> dict[str, Any]:
    """As the 1.4.2 frontend sends it: every key there, most of them None."""
    return {
        "model": "tiny",
        "token_ids": [5, 6, 7],
        "stop_conditions": {"max_tokens": None, "stop": None, "stop_token_ids_hidden": [2], "ignore_eos": False}
        | (stops or {}),
        "sampling_options": {"n": None, "temperature": None, "top_k": None, "seed": None} | (sampling or {}),
        "output_options": {"logprobs": None, "prompt_logprobs": None},
        "eos_token_ids": [2],
    } | others


def test_absent_max_tokens_means_the_rest_of_the_context() -> None:
    assert parse(request(), context_length=10).sampling["max_tokens"] == 7


def test_max_tokens_past_the_context_are_clamped() -> None:
    assert parse(request(stops={"max_tokens": 100}), context_length=10).sampling["max_tokens"] == 7


def test_a_prompt_that_fills_the_context_is_refused_with_both_numbers() -> None:
    with pytest.raises(InvalidRequest, match="3 tokens and the context holds 3"):
        parse(request(), context_length=3)


def test_float32_noise_of_the_wire_is_rounded_away() -> None:
    sampling = parse(
        request(sampling={"temperature": 0.699999988079071, "top_p": 0.8999999761581421}), context_length=10
    )
    assert (sampling.sampling["temperature"], sampling.sampling["top_p"]) == (0.7, 0.9)


def test_temperature_zero_is_greedy_and_absent_temperature_is_one() -> None:
    greedy = parse(request(sampling={"temperature": 0.0}), context_length=10)
    assert SamplingParams(**greedy.sampling).is_greedy
    assert parse(request(), context_length=10).sampling["temperature"] == 1.0


def test_top_k_minus_one_means_all() -> None:
    assert parse(request(sampling={"top_k": -1}), context_length=10).sampling["top_k"] == 0


def test_a_negative_seed_becomes_an_unsigned_one_of_its_own() -> None:
    seeds = {parse(request(sampling={"seed": seed}), context_length=10).sampling["seed"] for seed in (-2, -1, 0, 1)}
    assert len(seeds) == 4
    assert min(seeds) >= 0


@pytest.mark.parametrize(
    ("sampling", "message"),
    [
        ({"n": 2}, "n is 2, expected 1"),
        ({"best_of": 3}, "best_of is 3, expected 1"),
        ({"best_of": 0}, "best_of is 0, expected 1: .*; send several requests with logprobs, and compare them$"),
        ({"temperature": -0.5}, "temperature is -0.5, expected a number from 0 to 100"),
        ({"top_p": 1.5}, "top_p is 1.5, expected a number from 0 to 1"),
        ({"top_k": -2}, "top_k is -2, expected an integer at least -1"),
        ({"min_p": float("nan")}, "min_p is nan, expected a number from 0 to 1"),
        ({"repetition_penalty": 0.0}, "repetition_penalty is 0, expected a number above 0 and at most 2"),
        ({"repetition_penalty": 2.5}, "repetition_penalty is 2.5, expected a number above 0 and at most 2"),
        ({"presence_penalty": 3.0}, "presence_penalty is 3, expected a number from -2 to 2"),
        ({"use_beam_search": True}, "use_beam_search is true, expected false"),
        ({"guided_decoding": {"json": {}, "regex": "a+"}}, r"several grammars \(json, regex\), expected one"),
        ({"guided_decoding": {"regex": ["a"]}}, r"guided_regex is \['a'\], expected text"),
        ({"guided_decoding": {"choice": ["a", ""]}}, r"guided_choice is \['a', ''\], expected a list of texts"),
    ],
)
def test_a_value_that_is_not_served_is_named_with_what_was_expected(sampling: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        parse(request(sampling=sampling), context_length=10)


def test_an_empty_stop_string_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="stop contains ''"):
        parse(request(stops={"stop": ["x", ""]}), context_length=10)


def test_no_engine_makes_text_or_sees_a_stop_string() -> None:
    parsed = parse(request(stops={"stop": ["END"]}, sampling={"include_stop_str_in_output": True}), context_length=10)
    assert parsed.sampling["detokenize"] is False
    assert "stop" not in parsed.sampling
    assert (parsed.stop_strings, parsed.includes_stop_string) == (("END",), True)


@pytest.mark.parametrize(("asked", "skips"), [(None, True), (True, True), (False, False)])
def test_special_tokens_stay_in_the_text_where_the_client_wants_them(asked: bool | None, skips: bool) -> None:
    parsed = parse(request(output_options={"skip_special_tokens": asked}), context_length=10)
    assert parsed.skip_special_tokens is skips


def test_hints_of_router_and_client_are_read_and_a_canary_comes_first() -> None:
    routed = parse(
        request(routing={"priority": 7, "dp_rank": 3, "cache_salt": "tenant"}, agent_context={"session_id": "s"}),
        context_length=10,
    )
    hints = Hints(priority=1.0, dp_rank=3, conversation_id="s", retention_priority=42)
    assert (routed.hints, routed.cache_salt) == (hints, "tenant")
    assert parse(request(), context_length=10).hints == Hints()
    assert parse(request(_HEALTH_CHECK=True), context_length=10).hints.priority == 1.0


def test_logprobs_of_the_chosen_token_alone_are_asked_for_as_one() -> None:
    parsed = parse(request(output_options={"logprobs": 0}), context_length=10)
    assert (parsed.sampling["logprobs"], parsed.wants_logprobs) == (1, True)


def test_hidden_stop_ids_and_further_eos_ids_stop_and_ignore_eos_lifts_the_first() -> None:
    wire = request(stops={"stop_token_ids": [9], "stop_token_ids_hidden": [2, 4]}, eos_token_ids=[2, 3])
    sampling = parse(wire, context_length=10).sampling
    assert (sampling["end_id"], sampling["stop_token_ids"]) == (2, [3, 4, 9])
    ignoring = request(stops={"ignore_eos": True, "stop_token_ids_hidden": []}, eos_token_ids=[])
    assert parse(ignoring, context_length=10).sampling["ignore_eos"] is True
    assert "end_id" not in parse(ignoring, context_length=10).sampling


def test_a_clients_own_stop_ids_stop_beside_ignore_eos_and_no_end_of_sequence_does() -> None:
    """As in vLLM. TensorRT-LLM leaves stop ids out (executor/base_worker.py), and the 1.4.2 frontend sends none."""
    stops = {"ignore_eos": True, "stop_token_ids": [9], "stop_token_ids_hidden": [2, 4]}
    sampling = parse(request(stops=stops, eos_token_ids=[2, 3]), context_length=10).sampling
    assert sampling["ignore_eos"] is True
    assert sampling["stop_token_ids"] == [9]
    assert "end_id" not in sampling


@pytest.mark.parametrize("penalty", [1.401298464324817e-45, 0.0010000000474974513, 1.0, 2.0])
def test_every_repetition_penalty_that_the_frontend_takes_reaches_the_engine(penalty: float) -> None:
    sampling = parse(request(sampling={"repetition_penalty": penalty}), context_length=10).sampling
    assert sampling["repetition_penalty"] == pytest.approx(penalty)
    assert SamplingParams(**sampling).repetition_penalty


def test_more_tokens_at_least_than_at_most_are_refused_with_both_numbers() -> None:
    with pytest.raises(InvalidRequest, match="min_tokens is 9, expected at most max_tokens, which is 3; change one"):
        parse(request(stops={"min_tokens": 9, "max_tokens": 3}), context_length=10)
    assert parse(request(stops={"min_tokens": 3, "max_tokens": 3}), context_length=10).sampling["min_tokens"] == 3


def test_where_no_length_was_asked_for_the_least_one_ends_with_the_context() -> None:
    sampling = parse(request(stops={"min_tokens": 90}), context_length=10).sampling
    assert (sampling["min_tokens"], sampling["max_tokens"]) == (7, 7)


def test_a_prefill_worker_sees_a_length_that_is_dynamos_and_refuses_nobody_for_it() -> None:
    asked = request(stops={"min_tokens": 9, "max_tokens": 1})
    assert not parse(asked, context_length=10, hands_off=True).contradiction


def test_a_request_whose_kv_waits_with_a_prefill_worker_is_refused_once_the_engine_has_it() -> None:
    waiting = request(
        stops={"min_tokens": 9, "max_tokens": 3}, prefill_result={"disaggregated_params": {"opaque_state": "x"}}
    )
    assert parse(waiting, context_length=10).contradiction.startswith("min_tokens is 9")


@given(
    max_tokens=st.none() | st.integers(1, 10_000),
    min_tokens=st.none() | st.integers(0, 10_000),
    prompt=st.integers(1, 63),
    temperature=st.none() | st.floats(0, 2, width=32),
    top_p=st.none() | st.floats(0, 1, width=32),
    top_k=st.none() | st.integers(-1, 100_000),
)
def test_whatever_is_accepted_is_accepted_by_the_engine_and_fits_the_context(
    max_tokens: int | None,
    min_tokens: int | None,
    prompt: int,
    temperature: float | None,
    top_p: float | None,
    top_k: int | None,
) -> None:
    assume(max_tokens is None or (min_tokens or 0) <= max_tokens)
    wire = request(
        stops={"max_tokens": max_tokens, "min_tokens": min_tokens},
        sampling={"temperature": temperature, "top_p": top_p, "top_k": top_k},
        token_ids=[1] * prompt,
    )
    parsed = parse(wire, context_length=64)
    params = SamplingParams(**parsed.sampling)
    assert 1 <= params.max_tokens <= 64 - prompt


def grammar_of(*, stop: list[str] | None = None, **guided: Any) -> RequestGrammar:
    asked = request(stops={"stop": stop}, sampling={"guided_decoding": {"json": None, "choice": None} | guided})
    grammar = parse(asked, context_length=10).grammar
    assert grammar is not None
    return grammar


def test_a_schema_reaches_the_engine_as_text_with_its_keys_in_the_clients_order() -> None:
    grammar = grammar_of(json={"type": "object", "properties": {"b": {"const": 1.0}, "a": {"const": "ä"}}})
    assert GuidedDecodingParams(**grammar.params).resolved().kind == "json"
    assert list(json.loads(grammar.params["json"])["properties"]) == ["b", "a"]


def test_choices_become_a_regular_expression_that_takes_their_signs_literally() -> None:
    options = ["a.b", "(c|d)*", "e\\f", "g h\n-#&~"]
    grammar = grammar_of(choice=options)
    for option in options:
        assert re.fullmatch(grammar.params["regex"], option)
    assert not re.fullmatch(grammar.params["regex"], "axb")


def test_a_choice_that_holds_a_stop_string_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="stop string 'el' occurs inside the choice 'hello'"):
        grammar_of(choice=["hello"], stop=["x", "el"])


@pytest.mark.parametrize(("guided", "is_document"), [({"json": {}}, True), ({"regex": "a"}, False)])
def test_only_a_document_is_spoiled_by_a_stop_string(guided: dict[str, Any], is_document: bool) -> None:
    cut = grammar_of(**guided).cut_by("x")
    assert (cut is not None and "'x' occurs inside the document" in str(cut)) is is_document


def test_a_schema_may_be_json_text_as_other_servers_take_it() -> None:
    assert grammar_of(json='{"type": "object"}').params == {"json": '{"type": "object"}'}
