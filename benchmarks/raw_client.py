"""A load client that costs next to nothing: HTTP/1.1 over asyncio sockets, kept alive, in as many processes as asked.

It parses no JSON and no event while a stream runs: it stamps the first event, looks for the end, and reads the token
count from the usage of the last event. A client that decodes every event (aiohttp, httpx) would be what is measured:
at 50,000 tokens/s on shared cores it takes more CPU than the server.
"""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import re
import time
from dataclasses import dataclass
from typing import Any

_COMPLETION_TOKENS = re.compile(rb'"completion_tokens":(\d+)')
_END = b"\r\n0\r\n\r\n"  # dynamo.frontend sends every answer in HTTP chunks, also one that is not a stream
_TAIL_BYTES = 2048  # the last events of a stream, with the usage, lie within


@dataclass(frozen=True, slots=True)
class Answer:
    """One request, in seconds of ``time.perf_counter``."""

    sent: float
    first_event: float
    done: float
    tokens: int
    events: int


class Connection(asyncio.Protocol):
    """One kept-alive connection that carries one request at a time."""

    def __init__(self) -> None:
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def connection_lost(self, exc: Exception | None) -> None:
        if not self._finished.done():
            self._finished.set_exception(ConnectionError("the server closed the connection"))

    async def ask(self, path: str, body: dict[str, Any]) -> Answer:
        payload = json.dumps(body).encode()
        head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        self._finished: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._tail = b""
        self._events = 0
        self._first = 0.0
        self._mark = b"data: {" if body.get("stream") else b"HTTP/1.1"
        assert self._transport is not None
        sent = time.perf_counter()
        self._transport.write(f"{head}Content-Length: {len(payload)}\r\n\r\n".encode() + payload)
        await self._finished
        done = time.perf_counter()
        counted = _COMPLETION_TOKENS.findall(self._tail)
        if not counted:
            raise RuntimeError(f"no usage in the answer: {self._tail[-300:]!r}")
        return Answer(sent, self._first, done, int(counted[-1]), self._events)

    def data_received(self, data: bytes) -> None:
        found = data.count(self._mark)
        if found and not self._first:
            self._first = time.perf_counter()
        self._events += found
        self._tail = (self._tail + data)[-_TAIL_BYTES:]
        if self._tail.endswith(_END) and not self._finished.done():
            self._finished.set_result(None)


async def connect(port: int) -> Connection:
    _, protocol = await asyncio.get_running_loop().create_connection(Connection, "127.0.0.1", port)
    return protocol


def one_after_another(port: int, body: dict[str, Any], count: int) -> list[Answer]:
    """``count`` requests on one kept-alive connection."""

    async def run() -> list[Answer]:
        connection = await connect(port)
        return [await connection.ask("/v1/completions", body) for _ in range(count)]

    return asyncio.run(run())


def all_at_once(port: int, body: dict[str, Any], streams: int, processes: int) -> list[Answer]:
    """``streams`` requests at the same time, spread over ``processes``."""
    context = multiprocessing.get_context("spawn")
    share = [streams // processes + (i < streams % processes) for i in range(processes)]
    with context.Pool(processes) as pool:
        return [answer for part in pool.starmap(_together, [(port, body, n) for n in share]) for answer in part]


def _together(port: int, body: dict[str, Any], streams: int) -> list[Answer]:
    async def run() -> list[Answer]:
        connections = [await connect(port) for _ in range(streams)]
        return list(await asyncio.gather(*(c.ask("/v1/completions", body) for c in connections)))

    return asyncio.run(run())
