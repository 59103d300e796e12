"""What agg, prefill and decode ask of the engine for the same request."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from trtx.config.topology import Role
from trtx.engine import EngineApi, load
from trtx.torch_engine.llmapi import DisaggregatedParams
from trtx.worker.requests import handoff, roles
from trtx.worker.requests.request import parse
from trtx.worker.requests.roles import Submission

WIRE: dict[str, Any] = {"token_ids": [5, 6, 7], "stop_conditions": {"max_tokens": 9, "stop": "END"}}
PREFILL = DisaggregatedParams(
    request_type="context_only", first_gen_tokens=[8], opaque_state=b"kv", disagg_request_id=77
)


@pytest.fixture(scope="module")
def api() -> EngineApi:
    return load("paced")


def planned(role: Role, api: EngineApi, *, new_id: int | None = 77, **wire: Any) -> Submission:
    request = WIRE | wire
    return roles.plan(role, parse(request, context_length=100), request, api, lambda: new_id)


def handed_over(prompt_tokens: int = 3, **more: Any) -> dict[str, Any]:
    return {"disaggregated_params": handoff.to_json(PREFILL, prompt_tokens=prompt_tokens)} | more


def is_whole(submission: Submission) -> bool:
    return (
        submission.disaggregated_params.request_type == "context_and_generation"
        and not submission.hands_off
        and not submission.resumes
        and submission.request.sampling["max_tokens"] == 9
    )


def test_agg_asks_for_all_of_it_without_a_word_of_disaggregation(api: EngineApi) -> None:
    asked = planned("agg", api, prefill_result=handed_over())
    assert (asked.disaggregated_params, asked.hands_off, asked.resumes) == (None, False, False)
    assert (asked.request.sampling["max_tokens"], asked.request.stop_strings) == (9, ("END",))


def test_prefill_asks_for_one_token_under_an_id_of_its_own_and_leaves_stop_strings_to_decode(api: EngineApi) -> None:
    asked = planned("prefill", api)
    assert asked.disaggregated_params == DisaggregatedParams(request_type="context_only", disagg_request_id=77)
    assert (asked.hands_off, asked.resumes) == (True, False)
    assert (asked.request.sampling["max_tokens"], asked.request.stop_strings) == (1, ())
    assert "min_tokens" not in asked.request.sampling, "it would keep an end of sequence from being the first token"


def test_a_first_token_that_must_not_end_the_request_does_not(api: EngineApi) -> None:
    asked = planned("prefill", api, stop_conditions={"max_tokens": 9, "min_tokens": 5})
    assert asked.request.sampling["min_tokens"] == 1


def test_prefill_knows_how_long_a_grammars_text_must_be(api: EngineApi) -> None:
    """A text of one token is complete there. The LLM API generates one token, whatever max_tokens is."""
    stops, grammar = {"max_tokens": 1, "min_tokens": 5}, {"guided_decoding": {"regex": "a"}}
    request = WIRE | {"stop_conditions": stops, "sampling_options": grammar}
    asked = roles.plan("prefill", parse(request, context_length=100, hands_off=True), request, api, lambda: 77)
    assert (asked.request.sampling["min_tokens"], asked.request.sampling["max_tokens"]) == (5, 5)


def test_an_engine_without_global_ids_is_given_none(api: EngineApi) -> None:
    made: list[dict[str, Any]] = []
    older = replace(api, DisaggregatedParams=lambda **given: made.append(given))  # 1.2.1 knows no disagg_request_id
    planned("prefill", older, new_id=None)
    assert made[-1] == {"request_type": "context_only"}


def test_decode_goes_on_from_what_prefill_left(api: EngineApi) -> None:
    asked = planned("decode", api, prefill_result=handed_over(prompt_tokens_details={"cached_tokens": 2}))
    assert asked.disaggregated_params == replace(PREFILL, request_type="generation_only")
    assert (asked.resumes, asked.hands_off, asked.cached_at_prefill) == (True, False, 2)
    assert (asked.request.sampling["max_tokens"], asked.request.stop_strings) == (9, ("END",))


@pytest.mark.parametrize("prefill_result", [None, {}, {"disaggregated_params": None}, handed_over(prompt_tokens=2)])
def test_a_request_whose_kv_is_gone_or_another_prompts_is_computed_on_decode(
    api: EngineApi, prefill_result: dict[str, Any] | None
) -> None:
    assert is_whole(planned("decode", api, prefill_result=prefill_result))


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_a_canary_has_no_peer(api: EngineApi, role: Role) -> None:
    assert is_whole(planned(role, api, _HEALTH_CHECK=True, prefill_result=handed_over()))


PROMPT_LOGPROBS: dict[str, Any] = {
    "output_options": {"prompt_logprobs": 2},
    "extra_args": {"nvext": {"extra_fields": ["engine_data"]}},
}


@pytest.mark.parametrize("role", ["agg", "prefill"])
def test_prompt_logprobs_are_computed_where_the_prompt_is(api: EngineApi, role: Role) -> None:
    asked = planned(role, api, **PROMPT_LOGPROBS)
    assert asked.request.sampling["prompt_logprobs"] == 2 and asked.prompt_logprobs is None


def test_decode_asks_its_engine_for_none_and_shows_those_of_prefill(api: EngineApi) -> None:
    told = handed_over()
    told["disaggregated_params"]["prompt_logprobs"] = [{"7": {"logprob": -0.5}}]
    asked = planned("decode", api, prefill_result=told, **PROMPT_LOGPROBS)
    assert "prompt_logprobs" not in asked.request.sampling
    assert asked.prompt_logprobs == [{"7": {"logprob": -0.5}}]


def test_a_prompt_that_moved_to_decode_has_its_logprobs_computed_there(api: EngineApi) -> None:
    asked = planned("decode", api, prefill_result=handed_over(prompt_tokens=2), **PROMPT_LOGPROBS)
    assert is_whole(asked) and asked.request.sampling["prompt_logprobs"] == 2


def test_a_prompt_that_the_router_left_to_decode_is_told_from_one_whose_prefill_is_lost(api: EngineApi) -> None:
    left = planned("decode", api, annotations=["token_ids", "x-bypass-remote-prefill"])
    assert is_whole(left) and left.is_local
    assert not planned("decode", api, annotations=["token_ids"]).is_local
    assert not planned("decode", api, annotations=None).is_local
    assert not planned("agg", api, annotations=["x-bypass-remote-prefill"]).is_local
