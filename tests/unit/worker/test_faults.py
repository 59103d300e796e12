"""Whose fault an error is decides what the client sees: a refused request is its 400, everything else a 500."""

from __future__ import annotations

import pytest
from dynamo.llm.exceptions import EngineShutdown, InvalidArgument, Unknown

from trtx.engine import load
from trtx.engine.api import Fault
from trtx.worker.faults import as_dynamo_error, fault_of
from trtx.worker.request import InvalidRequest


@pytest.mark.parametrize(
    ("fault", "kind", "text"),
    [
        ("refused", InvalidArgument, "top_p is 7"),
        ("failed", Unknown, "top_p is 7"),
        ("unexpected", Unknown, "ValueError: top_p is 7"),
        ("fatal", EngineShutdown, "the engine died: top_p is 7"),
    ],
)
def test_the_client_sees_whose_fault_it_is(fault: Fault, kind: type[Exception], text: str) -> None:
    translated = as_dynamo_error(ValueError("top_p is 7"), fault)
    assert (type(translated), str(translated)) == (kind, text)


def test_what_the_worker_refuses_is_the_requests_own_fault_whatever_the_engine_makes_of_errors() -> None:
    assert fault_of(InvalidRequest("best_of"), load("paced")) == "refused"
    assert fault_of(ZeroDivisionError(), load("paced")) == "unexpected"
