"""DisaggregatedParams survive the way through JSON, and what was made for another prompt is recognised."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trtx.torch_engine.llmapi import DisaggregatedParams, Logprob
from trtx.worker.requests import handoff
from trtx.worker.requests.invalid_request import InvalidRequest
from trtx.worker.requests.request import parse


def through_the_wire(params: DisaggregatedParams) -> DisaggregatedParams:
    wire = json.loads(json.dumps(handoff.to_json(params, prompt_tokens=3)))
    decoded: DisaggregatedParams = handoff.from_json(wire, DisaggregatedParams, Logprob)
    return decoded


@given(
    state=st.binary(min_size=1, max_size=200),
    first=st.integers(0, 2**31),
    ids=st.integers(0, 2**64 - 1),
    logprob=st.floats(-50, 0),
)
def test_every_field_that_decode_needs_survives(state: bytes, first: int, ids: int, logprob: float) -> None:
    params = DisaggregatedParams(
        request_type="context_only",
        first_gen_tokens=[first],
        first_gen_log_probs=[{first: Logprob(logprob, 1), first + 1: Logprob(logprob - 1, None)}],
        ctx_request_id=ids,
        disagg_request_id=ids,
        opaque_state=state,
    )
    decoded = through_the_wire(params)
    assert decoded.request_type == "generation_only"
    assert decoded.opaque_state == state
    assert decoded.first_gen_tokens == [first]
    assert decoded.first_gen_log_probs == params.first_gen_log_probs
    assert decoded.ctx_request_id == decoded.disagg_request_id == ids


@pytest.mark.parametrize(
    "wire", [{}, {"first_gen_tokens": []}, {"first_gen_tokens": [1], "opaque_state": "no base64!"}]
)
def test_an_answer_that_can_not_be_read_is_refused(wire: dict[str, object]) -> None:
    with pytest.raises(InvalidRequest):
        handoff.from_json(wire, DisaggregatedParams, Logprob)


def test_an_answer_to_a_shorter_prompt_is_not_for_a_migrated_request() -> None:
    wire = handoff.to_json(DisaggregatedParams(first_gen_tokens=[1]), prompt_tokens=3)
    assert handoff.made_for(wire, 3)
    assert not handoff.made_for(wire, 5)


def test_prompt_logprobs_travel_with_what_decode_needs_and_not_beside_it() -> None:
    told = [{"7": {"logprob": -0.5}}]
    chunk: dict[str, Any] = {"finish_reason": "length", "engine_data": {"prompt_logprobs": told}}
    result = SimpleNamespace(outputs=[SimpleNamespace(disaggregated_params=DisaggregatedParams(first_gen_tokens=[1]))])
    handoff.add_to(chunk, result, parse({"token_ids": [5, 6, 7]}, context_length=100), "prefill-1")
    assert "engine_data" not in chunk
    wire = json.loads(json.dumps(chunk["disaggregated_params"]))
    assert handoff.prompt_logprobs_of(wire) == told
    assert handoff.prefill_of(wire) == "prefill-1"
    assert handoff.prefill_of({}) is None and handoff.prefill_of({"prefill": 7}) is None, "of another trtx"
    assert handoff.prompt_logprobs_of(handoff.to_json(DisaggregatedParams(), prompt_tokens=3)) is None
