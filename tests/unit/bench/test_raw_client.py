"""The client of ``benchmarks/`` is held to the same rule: it raises on what ``trtx bench`` calls a failure."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import Any

import pytest
from hostile_server import ANSWERS, OSL, SSE

BENCHMARKS = Path(__file__).parents[3] / "benchmarks"
BODY: dict[str, Any] = {"stream": True, "max_tokens": OSL, "min_tokens": OSL, "ignore_eos": True}
READ = [
    name
    for name, answer in ANSWERS.items()
    # Those with a body of their own kind; dynamo.frontend, whose client it is, sends no "event: error" of that form.
    if answer.status == 200
    and answer.kind == SSE
    and not answer.is_cut
    and name not in ("half an event", "empty stream")
]
# The last two are whole, but aiperf can't time them.
WHOLE = [name for name in READ if ANSWERS[name].reason is None and name != "no usage"]
WHOLE += ["tokens without text", "text that aiperf does not find"]


@pytest.fixture
def raw_client(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import raw_client

    yield raw_client
    del sys.modules["raw_client"]


async def ask(raw_client: Any, head: bytes, body: bytes) -> Any:
    """What the client makes of an answer in HTTP chunks, as dynamo.frontend sends all of its own."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        events = [event + b"\n\n" for event in body.split(b"\n\n") if event]
        frames = b"".join(f"{len(event):X}\r\n".encode() + event + b"\r\n" for event in events)
        writer.write(b"HTTP/1.1 " + head + b"\r\nTransfer-Encoding: chunked\r\n\r\n" + frames + b"0\r\n\r\n")
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    async with server:
        connection = await raw_client.connect(server.sockets[0].getsockname()[1])
        return await asyncio.wait_for(connection.ask("/v1/completions", BODY), 20)


@pytest.mark.parametrize("name", READ)
async def test_the_raw_client_takes_only_a_whole_and_counted_answer(raw_client: Any, name: str) -> None:
    if name in WHOLE:
        assert (await ask(raw_client, b"200 OK", ANSWERS[name].body)).tokens == OSL
        return
    with pytest.raises(RuntimeError):
        await ask(raw_client, b"200 OK", ANSWERS[name].body)


async def test_the_raw_client_says_the_servers_own_words(raw_client: Any) -> None:
    with pytest.raises(RuntimeError, match="HTTP 404 model not found"):
        await ask(raw_client, b"404 Not Found", ANSWERS["404"].body)


def test_the_clients_that_drive_aiperf_ask_for_the_strict_endpoint() -> None:
    for path in BENCHMARKS.glob("*.py"):
        text = path.read_text(encoding="utf-8")
        if "aiperf" in text and "Aiperf(" in text:
            assert "ENDPOINT_TYPE" in text or "command(" in text, path.name
            assert '"chat"' not in text, path.name
