"""How a worker asks an encode worker, and how one that is busy is told from one that is stopped."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from trtx.worker.multimodal.encode_endpoint import ASKED, EncodeEndpoint


class Chunk:
    def __init__(self, data: dict[str, Any] | None) -> None:
        self._data = data

    def data(self) -> dict[str, Any] | None:
        return self._data


class Client:
    """Dynamo's, of one encode worker that says ``chunks`` and then nothing, or ends."""

    def __init__(self, *chunks: dict[str, Any] | None, goes_on: bool) -> None:
        self._chunks, self._goes_on = chunks, goes_on
        self.context: Any = None

    async def direct(self, request: dict[str, Any], worker_id: int, *, context: Any) -> AsyncIterator[Chunk]:
        assert request["extra_args"][ASKED] == {"key": "00"}
        self.context = context
        return self._answers()

    async def _answers(self) -> AsyncIterator[Chunk]:
        for data in self._chunks:
            yield Chunk(data)
        if self._goes_on:
            await asyncio.Event().wait()


async def ask(client: Client) -> Any:
    runtime: Any = None
    asking = asyncio.ensure_future(EncodeEndpoint(runtime, client, "model", silence_s=0.2).ask(1, {"key": "00"}))
    ended, _ = await asyncio.wait((asking,), timeout=30)
    assert ended, "it waits for a worker that says nothing"
    return asking.result()


BUSY: dict[str, Any] = {"token_ids": [], "index": 0}


async def test_an_answer_behind_signs_of_life_is_the_answer() -> None:
    assert await ask(Client(BUSY, None, BUSY, {"encoder_result": {"a": 1}}, goes_on=True)) == {"a": 1}


@pytest.mark.parametrize("chunks", [(), (BUSY, BUSY)], ids=["at once", "in the middle"])
async def test_one_that_falls_silent_is_given_up_and_told_so(chunks: tuple[dict[str, Any], ...]) -> None:
    client = Client(*chunks, goes_on=True)
    with pytest.raises(TimeoutError, match="it sent nothing for 0.2 s"):
        await ask(client)
    assert client.context.is_stopped()


async def test_one_that_ends_without_an_answer_has_not_answered() -> None:
    with pytest.raises(ConnectionError, match="without an answer"):
        await ask(Client(BUSY, goes_on=False))
