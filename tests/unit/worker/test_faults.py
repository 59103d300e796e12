"""Whose fault an error is decides what the client sees: a refused request is its 400, everything else a 500."""

from __future__ import annotations

import pytest
from dynamo.llm.exceptions import EngineShutdown, InvalidArgument, Unknown

from trtx.engine import EngineApi, load
from trtx.engine.paced import LLM
from trtx.worker.faults import as_dynamo_error, is_fatal
from trtx.worker.request import InvalidRequest


@pytest.fixture(scope="module")
def api() -> EngineApi:
    return load("paced")


def test_a_refused_request_is_the_clients_fault_and_a_failed_one_is_not(api: EngineApi) -> None:
    assert api.RequestFailed is not None and issubclass(api.RequestFailed, api.RequestError)
    for refused in (InvalidRequest("best_of"), api.RequestError("too long")):
        translated = as_dynamo_error(refused, api, engine_is_dead=False)
        assert type(translated) is InvalidArgument and str(translated) == str(refused)
    failed = as_dynamo_error(api.RequestFailed("the logits are not numbers"), api, engine_is_dead=False)
    assert type(failed) is Unknown and str(failed) == "the logits are not numbers"
    assert type(as_dynamo_error(api.RequestFailed("x"), api, engine_is_dead=True)) is EngineShutdown
    assert not is_fatal(api.RequestFailed("x"), api)


def test_an_engine_that_does_not_tell_them_apart_refuses(api: EngineApi) -> None:
    class Refused(Exception):
        pass

    other = EngineApi("tensorrt-llm", LLM, None, None, None, RequestError=Refused, survives_errors=False)
    assert type(as_dynamo_error(Refused("bad"), other, engine_is_dead=False)) is InvalidArgument
    assert not is_fatal(Refused("bad"), other)
    assert is_fatal(RuntimeError("CUDA"), other)
