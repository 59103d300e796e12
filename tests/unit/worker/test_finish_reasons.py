"""What ends a request in the LLM API, and what the worker makes of it for Dynamo."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from trtx.worker.chunks import ChunkWriter


def result(finish_reason: str | None, *, finished: bool = True) -> Any:
    output = SimpleNamespace(
        token_ids=[7], finish_reason=finish_reason, prompt_logprobs=None, request_perf_metrics=None
    )
    return SimpleNamespace(finished=finished, outputs=[output])


def writer() -> ChunkWriter:
    request: Any = SimpleNamespace(token_ids=[1, 2], wants_logprobs=False)
    return ChunkWriter(request, block_size=32)


@pytest.mark.parametrize(
    ("given", "sent"),
    [("length", "length"), ("not_finished", "length"), ("stop", "stop"), ("cancelled", "cancelled")],
)
def test_each_reason_in_dynamos_words(given: str, sent: str) -> None:
    chunk = writer().next(result(given))
    assert chunk is not None
    assert (chunk["token_ids"], chunk["finish_reason"]) == ([7], sent)


def test_a_result_that_ends_without_a_reason_is_not_said_to_be_complete() -> None:
    ending = writer()
    chunk = ending.next(result(None))
    assert chunk is not None
    assert "finish_reason" not in chunk
    assert ending.cancelled()["finish_reason"] == "cancelled"
