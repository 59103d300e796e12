"""The HTTP port of a frontend whose prompts transformers makes: rewrites requests and passes answers on unchanged.

Dynamo offers no way to replace its chat template engine or tokenizer in front of its router, but it accepts
prompts as token ids. So the door, in the frontend's process, parses each request and makes its prompt in a thread pool.
Remove it once Dynamo renders templates as transformers does and adds the begin-of-text token (ai-dynamo/dynamo #4610).
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
import ssl
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, cast

import h11

from trtx.frontend.answer_framing import AnswerFraming
from trtx.frontend.tool_answers import CallRequest, ToolAnswer
from trtx.prompts.maker import Unrenderable

Rewrite = Callable[[str, bytes], bytes]
"""Takes the path and body of a POST, returns the body with its prompt as token ids. Raises Unrenderable."""
ReadCalls = Callable[[str, bytes], CallRequest | None]
"""Takes a path and a rewritten body, returns how to ask for an answer with calls, or None to copy the answer."""

_THREADS = 2
_BACKLOG = 1024
_POLL_SECONDS = 0.01
_CONNECT_SECONDS = 5.0
_MOST_HEAD_BYTES = 256 << 10
_MOST_EARLY_BYTES = 256 << 10
"""How much of the next requests is read while an answer is due. A client that disconnects is noticed up to there."""


class Door:
    """Listens on ``address`` in its own thread, and forwards each connection to Dynamo's port on loopback."""

    def __init__(
        self,
        address: tuple[str, int],
        inner_port: int,
        rewrite: Rewrite,
        *,
        paths: frozenset[str],
        body_limit: int,
        tls: ssl.SSLContext | None = None,
        read_calls: ReadCalls | None = None,
    ) -> None:
        """POSTs to ``paths`` are rewritten. A body of more than ``body_limit`` bytes is refused.

        ``read_calls``: None if Dynamo has no parser of tool calls, so that all answers are copied.
        """
        self._address, self._inner_port, self._rewrite, self._tls = address, inner_port, rewrite, tls
        self._read_calls = read_calls
        self.paths, self.body_limit = paths, body_limit
        self._pool = ThreadPoolExecutor(_THREADS, thread_name_prefix="prompt-maker")

    def start(self) -> None:
        """Binds the port, and listens once Dynamo does, so that clients can tell when the frontend is ready.

        Raises OSError if the port can't be bound.
        """
        family, kind, protocol, _, address = socket.getaddrinfo(*self._address, type=socket.SOCK_STREAM)[0]
        bound = socket.socket(family, kind, protocol)
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(address)
        threading.Thread(target=self._run, args=(bound,), name="front-door", daemon=True).start()

    def _run(self, bound: socket.socket) -> None:
        import uvloop

        try:
            uvloop.run(self._serve(bound))
        except (
            Exception
        ) as error:  # for example, another process listened first; without its door a frontend is useless
            sys.stderr.write(f"trtx.frontend: the HTTP port {self._address[1]} can't be served ({error})\n")
            os._exit(1)

    async def _serve(self, bound: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        while not await self._dynamo_listens():
            await asyncio.sleep(_POLL_SECONDS)
        server = await loop.create_server(lambda: _Client(self), sock=bound, ssl=self._tls, backlog=_BACKLOG)
        await server.serve_forever()

    async def _dynamo_listens(self) -> bool:
        try:
            _, writer = await asyncio.open_connection("127.0.0.1", self._inner_port)
        except OSError:
            return False
        writer.close()
        return True

    async def inner(self, client: _Client) -> _Inner:
        """Opens a connection to Dynamo's own port. Raises OSError."""
        loop = asyncio.get_running_loop()
        opening = loop.create_connection(lambda: _Inner(client), "127.0.0.1", self._inner_port)
        _, protocol = await asyncio.wait_for(opening, _CONNECT_SECONDS)
        return protocol

    async def rewritten(self, path: str, body: bytes) -> tuple[bytes, CallRequest | None]:
        """Runs the rewrite in the thread pool. Raises Unrenderable.

        Returns the rewritten body, and what ``read_calls`` makes of it.
        """
        return await asyncio.get_running_loop().run_in_executor(self._pool, self._both, path, body)

    def _both(self, path: str, body: bytes) -> tuple[bytes, CallRequest | None]:
        changed = self._rewrite(path, body)
        return changed, None if self._read_calls is None else self._read_calls(path, changed)


class _Inner(asyncio.Protocol):
    """Dynamo's side of one client's connection: copies each answer to the client, unless a ToolAnswer reads it."""

    transport: asyncio.Transport

    def __init__(self, client: _Client) -> None:
        self._client = client
        self._framing: AnswerFraming | None = None
        self._answer: ToolAnswer | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)  # uvloop's classes don't derive from asyncio's

    def ask_for_calls(self, request: bytes, *, is_streamed: bool) -> None:
        """Sends a POST whose answer may have calls."""
        self._answer = ToolAnswer(is_streamed=is_streamed)
        self.transport.write(request)

    def ask(self, method: bytes, request: bytes) -> None:
        self._framing = AnswerFraming(method)
        self.transport.write(request)

    def data_received(self, data: bytes) -> None:
        if self._answer is not None:
            self._read(self._answer, data)
            return
        self._client.transport.write(data)
        if self._framing is not None and self._framing.feed(data):
            self._framing = None
            self._client.next_request()

    def _read(self, answer: ToolAnswer, data: bytes) -> None:
        try:
            made = answer.feed(data)
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            sys.stderr.write(f"trtx.frontend: an answer of Dynamo can't be read ({error}); its connection is closed\n")
            self.transport.close()
            return
        if made:
            self._client.transport.write(made)
        if answer.is_done:
            self._answer = None
            self._client.next_request()

    def connection_lost(self, exc: Exception | None) -> None:
        self._client.transport.close()

    def pause_writing(self) -> None:
        self._client.transport.pause_reading()

    def resume_writing(self) -> None:
        self._client.transport.resume_reading()


class _Client(asyncio.Protocol):
    """One client's connection. A request is parsed once the answer to the one before is complete."""

    transport: asyncio.Transport

    def __init__(self, door: Door) -> None:
        self._door = door
        self._inner: _Inner | None = None
        self._parser = _new_parser()
        self._request: h11.Request | None = None
        self._body = bytearray()
        self._working: asyncio.Task[None] | None = None
        self._answer_is_due = False
        self._early = b""  # what arrived while an answer was due

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)

    def connection_lost(self, exc: Exception | None) -> None:
        if self._working is not None:
            self._working.cancel()
        if self._inner is not None:
            self._inner.transport.close()  # Dynamo cancels the request of a client that has disconnected

    def pause_writing(self) -> None:
        if self._inner is not None:
            self._inner.transport.pause_reading()

    def resume_writing(self) -> None:
        if self._inner is not None:
            self._inner.transport.resume_reading()

    def eof_received(self) -> bool:
        return False  # closes the connection: Dynamo, too, takes a client that sends no more for gone

    def data_received(self, data: bytes) -> None:
        if self._answer_is_due:
            self._early += data
            if len(self._early) > _MOST_EARLY_BYTES:
                self.transport.pause_reading()
            return
        try:
            self._parser.receive_data(data)
            self._parse()
        except h11.RemoteProtocolError as error:
            self._refuse(error.error_status_hint, f"the request is not valid HTTP/1.1: {error}")

    def next_request(self) -> None:
        """Goes on with what the client sent in the meantime. An answer that ends the connection has none after it."""
        if self._parser.their_state is h11.MUST_CLOSE or self.transport.is_closing():
            return
        self._answer_is_due, self._parser, early = False, _new_parser(), self._early
        self._early = b""
        self.transport.resume_reading()
        if early:
            self.data_received(early)

    def _parse(self) -> None:
        while True:
            event = self._parser.next_event()
            if isinstance(event, h11.Request):
                self._request, self._body = event, bytearray()
                if self._parser.they_are_waiting_for_100_continue:
                    self.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
            elif isinstance(event, h11.Data):
                self._body += event.data
                if len(self._body) > self._door.body_limit:
                    self._refuse(413, f"the body has more than {self._door.body_limit} bytes; send a shorter one")
                    return
            elif isinstance(event, h11.EndOfMessage):
                assert self._request is not None
                self._answer_is_due, self._early = True, self._parser.trailing_data[0]
                self._working = asyncio.ensure_future(self._forward(self._request, bytes(self._body)))
                return
            else:
                return

    async def _forward(self, request: h11.Request, body: bytes) -> None:
        path = request.target.decode("latin-1").partition("?")[0]
        of_calls: CallRequest | None = None
        if request.method == b"POST" and path in self._door.paths and not _is_encoded(request):
            try:
                body, of_calls = await self._door.rewritten(path, body)
            except Unrenderable as error:
                self._refuse(400, str(error), goes_on=self._parser.their_state is not h11.MUST_CLOSE)
                return
            except asyncio.CancelledError:
                raise
            except BaseException as error:  # a panic of the tokenizer's Rust code is no Exception
                self._refuse(500, f"the prompt could not be made: {type(error).__name__}: {error}")
                return
        if self._inner is None:
            try:
                self._inner = await self._door.inner(self)
            except OSError as error:
                self._refuse(502, f"the frontend can't be reached: {error}")
                return
        if of_calls is None:
            self._inner.ask(request.method, _head(request, len(body)) + body)
            return
        asked = _head(request, len(of_calls.body)) + of_calls.body
        self._inner.ask_for_calls(asked, is_streamed=of_calls.is_streamed)

    def _refuse(self, status: int, sentence: str, *, goes_on: bool = False) -> None:
        """Answers in Dynamo's form, and closes the connection unless ``goes_on``."""
        kind = {400: "Bad Request", 413: "Payload Too Large", 500: "Internal Server Error", 502: "Bad Gateway"}.get(
            status, "Error"
        )
        body = json.dumps({"message": sentence, "type": kind, "code": status}).encode()
        head = f"HTTP/1.1 {status} {kind}\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n"
        if self.transport.is_closing():
            return
        self.transport.write(head.encode() + (b"\r\n" if goes_on else b"connection: close\r\n\r\n") + body)
        if goes_on:
            self.next_request()
        else:
            self.transport.close()


def _new_parser() -> h11.Connection:
    return h11.Connection(h11.SERVER, max_incomplete_event_size=_MOST_HEAD_BYTES)


def _is_encoded(request: h11.Request) -> bool:
    """Whether the body is compressed; Dynamo refuses such bodies."""
    return any(name == b"content-encoding" and value != b"identity" for name, value in request.headers)


def _head(request: h11.Request, length: int) -> bytes:
    """The request's head, with the length of the rewritten body."""
    dropped = (b"content-length", b"transfer-encoding", b"expect")
    lines = [b"%s %s HTTP/%s" % (request.method, request.target, request.http_version)]
    lines += [b"%s: %s" % (name, value) for name, value in request.headers.raw_items() if name.lower() not in dropped]
    if length or request.method in (b"POST", b"PUT", b"PATCH"):
        lines.append(b"content-length: %d" % length)
    return b"\r\n".join(lines) + b"\r\n\r\n"


def server_tls(certificate: Any, key: Any) -> ssl.SSLContext:
    """A TLS context with the certificate that Dynamo would present. Raises OSError or ssl.SSLError."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    context.set_alpn_protocols(["http/1.1"])
    return context
