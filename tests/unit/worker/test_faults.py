"""Whose fault an error is decides what the client sees: a refused request is its 400, everything else a 500."""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import replace
from typing import Literal

import pytest
from dynamo.llm.exceptions import EngineShutdown, HttpError, InvalidArgument, Unknown

from trtx.engine import load
from trtx.engine.api import Fault
from trtx.media import MediaError
from trtx.worker.multimodal.embedders import NoEncoder
from trtx.worker.multimodal.embedding_cache import NotMade
from trtx.worker.requests.faults import EngineError, as_dynamo_error, fault_of, is_of_closing
from trtx.worker.requests.invalid_request import InvalidRequest


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
    translated = as_dynamo_error(ValueError("top_p is 7"), fault, "agg")
    assert (type(translated), str(translated)) == (kind, text)


@pytest.mark.parametrize("error", [MediaError(429, "try again"), NoEncoder("try again")], ids=["picture", "encoder"])
def test_who_is_to_try_again_is_told_by_the_status(error: MediaError | NoEncoder) -> None:
    assert fault_of(error, load("torch")) == "refused"
    translated = as_dynamo_error(error, "refused", "agg")
    assert isinstance(translated, HttpError) and (translated.code, translated.message) == (error.status, str(error))
    behind_prefill = as_dynamo_error(error, "refused", "prefill")
    assert (type(behind_prefill), str(behind_prefill)) == (InvalidArgument, str(error))


def test_what_kept_an_embedding_from_being_made_decides_for_each_who_waited() -> None:
    failed = NotMade(b"key", NoEncoder("try again"))
    assert fault_of(failed, load("torch")) == "refused"
    translated = as_dynamo_error(failed, "refused", "agg")
    assert isinstance(translated, HttpError) and (translated.code, translated.message) == (429, "try again")
    failed = NotMade(b"key", ZeroDivisionError("of nobody's picture"))
    assert fault_of(failed, load("torch")) == "unexpected"
    assert str(as_dynamo_error(failed, "unexpected", "agg")) == "ZeroDivisionError: of nobody's picture"


@pytest.mark.parametrize("status", [403, 415, 422])
def test_a_refused_picture_is_a_400_with_its_sentence(status: Literal[403, 415, 422]) -> None:
    """Of other statuses Dynamo 1.6.1 shows the name alone."""
    translated = as_dynamo_error(MediaError(status, "cut short"), "refused", "agg")
    assert (type(translated), str(translated)) == (InvalidArgument, "cut short")


def test_what_the_worker_refuses_is_the_requests_own_fault_whatever_the_engine_makes_of_errors() -> None:
    assert fault_of(InvalidRequest("best_of"), load("paced")) == "refused"
    assert fault_of(ZeroDivisionError(), load("paced")) == "unexpected"


def test_what_the_engine_raised_alone_is_fatal() -> None:
    """Of TensorRT-LLM every class but its RequestError is."""
    api = replace(load("paced"), fault=lambda error: "fatal")
    assert fault_of(RuntimeError("no running event loop"), api) == "unexpected"
    assert fault_of(EngineError(RuntimeError("CUDA error")), api) == "fatal"
    assert fault_of(EngineError(InvalidRequest("best_of")), api) == "refused"
    assert (
        str(as_dynamo_error(EngineError(RuntimeError("CUDA error")), "fatal", "agg")) == "the engine died: CUDA error"
    )


def test_an_error_in_place_of_a_closing_is_told_from_others() -> None:
    def waiting() -> Generator[None, None, None]:
        try:
            yield
        finally:
            raise RuntimeError("no running event loop")

    closing = waiting()
    next(closing)
    with pytest.raises(RuntimeError) as told:
        closing.close()
    assert is_of_closing(told.value)
    assert not is_of_closing(RuntimeError("no running event loop"))
