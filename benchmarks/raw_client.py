"""A load client with minimal CPU usage: HTTP/1.1 over keep-alive asyncio sockets, in any number of processes.

During a stream it parses neither JSON nor events: it takes a timestamp at the first event and searches for the end. At
the end it parses the last events, with the finish reason and the usage, and raises unless the answer is complete by
trtx bench's rule. A client that decodes every event (aiohttp, httpx) would dominate the measurement: at 50,000 tokens/s
on shared cores it takes more CPU than the server.
"""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import re
import time
from dataclasses import dataclass
from typing import Any

from trtx.bench import answers

_FRAME = re.compile(rb"\r\n[0-9a-fA-F]+\r\n")  # the separator of two HTTP chunks; hyper writes capitals
_LENGTH = re.compile(rb"\r\ncontent-length: *(\d+)", re.IGNORECASE)
_OK = b" 200"
_EVENT = b"data: {"
_END = b"\r\n0\r\n\r\n"  # dynamo.frontend sends every answer in HTTP chunks, even if it is not a stream
_TAIL_BYTES = 2048  # enough for the last events of a stream, with the usage


@dataclass(frozen=True, slots=True)
class Answer:
    """The times of one request, in seconds of ``time.perf_counter``, and its tokens and events."""

    sent: float
    first_event: float
    done: float
    tokens: int
    events: int


class Connection(asyncio.Protocol):
    """One keep-alive connection that carries one request at a time."""

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
        self._head = self._tail = b""
        self._events = 0
        self._first = 0.0
        self._mark = _EVENT if body.get("stream") else b"HTTP/1.1"
        assert self._transport is not None
        sent = time.perf_counter()
        self._transport.write(f"{head}Content-Length: {len(payload)}\r\n\r\n".encode() + payload)
        await self._finished
        done = time.perf_counter()
        return Answer(sent, self._first, done, self._tokens(body), self._events)

    def _tokens(self, body: dict[str, Any]) -> int:
        """Returns the tokens of an answer. Raises RuntimeError if it is incomplete or has no usage."""
        raw = self._tail.removesuffix(_END)
        if body.get("stream") and self._head.endswith(_OK):
            # The text before the first mark is the rest of an event, or the HTTP head.
            events = _FRAME.sub(b"", raw).decode(errors="replace").split("data: ")[1:]
        else:
            events = [_FRAME.sub(b"", b"\r\n" + raw.partition(b"\r\n\r\n")[2]).decode(errors="replace").strip()]
        if not self._head.endswith(_OK):
            raise RuntimeError(f"HTTP {self._head[9:].decode()} {answers.words(events[0])}")
        answer = answers.Answer()
        for event in events:
            answer.add_text(event.partition("\n\n")[0])
        if fault := answer.fault(answers.RequestedOutput.of(body)):
            raise RuntimeError(fault)
        if answer.tokens is None:
            raise RuntimeError("no usage in the answer")
        return answer.tokens

    def data_received(self, data: bytes) -> None:
        self._head = self._head or data[:12]
        found = data.count(self._mark)
        if found and not self._first:
            self._first = time.perf_counter()
        self._events += found
        self._tail += data
        if self._mark == _EVENT:  # for a stream, keep only the end
            self._tail = self._tail[-_TAIL_BYTES:]
        if (self._tail.endswith(_END) or self._is_refused()) and not self._finished.done():
            self._finished.set_result(None)

    def _is_refused(self) -> bool:
        """Returns whether a complete error response was received; errors have a content length."""
        length = None if self._head.endswith(_OK) else _LENGTH.search(self._tail)
        return length is not None and len(self._tail.partition(b"\r\n\r\n")[2]) >= int(length.group(1))


async def connect(port: int) -> Connection:
    _, protocol = await asyncio.get_running_loop().create_connection(Connection, "127.0.0.1", port)
    return protocol


def one_after_another(port: int, body: dict[str, Any], count: int) -> list[Answer]:
    """Sends ``count`` requests one after another on one keep-alive connection."""

    async def run() -> list[Answer]:
        connection = await connect(port)
        return [await connection.ask("/v1/completions", body) for _ in range(count)]

    return asyncio.run(run())


def all_at_once(port: int, body: dict[str, Any], streams: int, processes: int) -> list[Answer]:
    """Sends ``streams`` requests at the same time, distributed over ``processes``."""
    context = multiprocessing.get_context("spawn")
    share = [streams // processes + (i < streams % processes) for i in range(processes)]
    with context.Pool(processes) as pool:
        return [answer for part in pool.starmap(together, [(port, body, n) for n in share]) for answer in part]


def together(port: int, body: dict[str, Any], streams: int) -> list[Answer]:
    async def run() -> list[Answer]:
        connections = [await connect(port) for _ in range(streams)]
        return list(await asyncio.gather(*(c.ask("/v1/completions", body) for c in connections)))

    return asyncio.run(run())
