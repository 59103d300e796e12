"""The HTTP port of a frontend whose prompts transformers makes: it rewrites requests and hands bytes of answers on.

Dynamo 1.4.2 has no place for a chat template engine or a tokenizer of one's own in front of its router, and takes
prompts as token ids. So requests go through this door, in the frontend's process: it parses each, and its thread pool
makes the prompt. Answers are copied as they come and never parsed. Drop it once Dynamo renders templates as
transformers does and adds the begin-of-text token (ai-dynamo/dynamo #4610).
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

from trtx.prompts.maker import Unrenderable

Rewrite = Callable[[str, bytes], bytes]
"""The body of a POST to a path, with its prompt as token ids. Raises Unrenderable."""

_THREADS = 2
_BACKLOG = 1024
_POLL_SECONDS = 0.01
_CONNECT_SECONDS = 5.0
_MOST_HEAD_BYTES = 256 << 10


class Door:
    """Listens on ``address`` in a thread of its own, and hands connections on to Dynamo's port on loopback."""

    def __init__(
        self,
        address: tuple[str, int],
        inner_port: int,
        rewrite: Rewrite,
        *,
        paths: frozenset[str],
        body_limit: int,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        """``paths``: whose POSTs are rewritten. ``body_limit``: bytes of a body, beyond which it is refused."""
        self._address, self._inner_port, self._rewrite, self._tls = address, inner_port, rewrite, tls
        self.paths, self.body_limit = paths, body_limit
        self._pool = ThreadPoolExecutor(_THREADS, thread_name_prefix="prompt-maker")

    def start(self) -> None:
        """Takes the port, and listens once Dynamo does: a client sees when a frontend is there. Raises OSError for a
        port that can't be had."""
        family, kind, protocol, _, address = socket.getaddrinfo(*self._address, type=socket.SOCK_STREAM)[0]
        bound = socket.socket(family, kind, protocol)
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(address)
        threading.Thread(target=self._run, args=(bound,), name="front-door", daemon=True).start()

    def _run(self, bound: socket.socket) -> None:
        import uvloop

        try:
            uvloop.run(self._serve(bound))
        except Exception as error:  # another process listened first, say: without its door a frontend answers nothing
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
        """A connection to Dynamo's own port. Raises OSError."""
        loop = asyncio.get_running_loop()
        opening = loop.create_connection(lambda: _Inner(client), "127.0.0.1", self._inner_port)
        _, protocol = await asyncio.wait_for(opening, _CONNECT_SECONDS)
        return protocol

    async def rewritten(self, path: str, body: bytes) -> bytes:
        return await asyncio.get_running_loop().run_in_executor(self._pool, self._rewrite, path, body)


class _Inner(asyncio.Protocol):
    """Dynamo's side of one client's connection: what comes goes to the client."""

    def __init__(self, client: _Client) -> None:
        self._client = client
        self.transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)  # uvloop's are of no class of asyncio's

    def data_received(self, data: bytes) -> None:
        self._client.transport.write(data)

    def connection_lost(self, exc: Exception | None) -> None:
        self._client.transport.close()

    def pause_writing(self) -> None:
        self._client.transport.pause_reading()

    def resume_writing(self) -> None:
        self._client.transport.resume_reading()


class _Client(asyncio.Protocol):
    """One client's connection. Requests are taken one after another, in the order in which they come."""

    transport: asyncio.Transport

    def __init__(self, door: Door) -> None:
        self._door = door
        self._inner: _Inner | None = None
        self._parser = _parser()
        self._request: h11.Request | None = None
        self._body = bytearray()
        self._working: asyncio.Task[None] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)

    def connection_lost(self, exc: Exception | None) -> None:
        if self._working is not None:
            self._working.cancel()
        if self._inner is not None and self._inner.transport is not None:
            self._inner.transport.close()  # Dynamo ends the request of a client that has gone

    def pause_writing(self) -> None:
        if self._inner is not None and self._inner.transport is not None:
            self._inner.transport.pause_reading()

    def resume_writing(self) -> None:
        if self._inner is not None and self._inner.transport is not None:
            self._inner.transport.resume_reading()

    def data_received(self, data: bytes) -> None:
        self._take(lambda: self._parser.receive_data(data))

    def eof_received(self) -> bool:
        return False  # closes: a client that sends no more has gone, for Dynamo as well

    def _take(self, receive: Callable[[], None]) -> None:
        try:
            receive()
            self._parse()
        except h11.RemoteProtocolError as error:
            self._refuse(error.error_status_hint, f"the request is no HTTP/1.1: {error}")

    def _parse(self) -> None:
        if self._working is not None:
            return  # what had come already waits in the parser
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
                self.transport.pause_reading()  # a request that comes early waits in the socket
                self._working = asyncio.ensure_future(self._hand_on(self._request, bytes(self._body)))
                self._working.add_done_callback(self._handed_on)
                return
            else:
                return

    def _handed_on(self, done: asyncio.Task[None]) -> None:
        self._working = None
        if done.cancelled() or self.transport.is_closing():
            return
        if (error := done.exception()) is not None:
            self._refuse(502, f"the frontend can't be reached: {error}")
            return
        rest, _ = self._parser.trailing_data
        self._parser = _parser()
        self.transport.resume_reading()
        if rest:
            self._take(lambda: self._parser.receive_data(rest))

    async def _hand_on(self, request: h11.Request, body: bytes) -> None:
        path = request.target.decode("latin-1").partition("?")[0]
        if request.method == b"POST" and path in self._door.paths and not _is_encoded(request):
            try:
                body = await self._door.rewritten(path, body)
            except Unrenderable as error:
                self._refuse(400, str(error))
                return
        if self._inner is None:
            self._inner = await self._door.inner(self)
        assert self._inner.transport is not None
        self._inner.transport.write(_head(request, len(body)))
        if body:
            self._inner.transport.write(body)

    def _refuse(self, status: int, sentence: str) -> None:
        """In Dynamo's form. The connection ends with it: an answer of Dynamo may still be due on it otherwise."""
        kind = {400: "Bad Request", 413: "Payload Too Large", 502: "Bad Gateway"}.get(status, "Error")
        body = json.dumps({"message": sentence, "type": kind, "code": status}).encode()
        head = f"HTTP/1.1 {status} {kind}\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n"
        if not self.transport.is_closing():
            self.transport.write(head.encode() + b"connection: close\r\n\r\n" + body)
            self.transport.close()


def _parser() -> h11.Connection:
    return h11.Connection(h11.SERVER, max_incomplete_event_size=_MOST_HEAD_BYTES)


def _is_encoded(request: h11.Request) -> bool:
    """Whether the body is compressed; Dynamo refuses those."""
    return any(name == b"content-encoding" and value != b"identity" for name, value in request.headers)


def _head(request: h11.Request, length: int) -> bytes:
    """The request's own head, with the length of the body that goes on."""
    dropped = (b"content-length", b"transfer-encoding", b"expect")
    lines = [b"%s %s HTTP/%s" % (request.method, request.target, request.http_version)]
    lines += [b"%s: %s" % (name, value) for name, value in request.headers.raw_items() if name.lower() not in dropped]
    if length or request.method in (b"POST", b"PUT", b"PATCH"):
        lines.append(b"content-length: %d" % length)
    return b"\r\n".join(lines) + b"\r\n\r\n"


def server_tls(certificate: Any, key: Any) -> ssl.SSLContext:
    """Of the certificate that Dynamo would have shown. Raises OSError or ssl.SSLError."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    context.set_alpn_protocols(["http/1.1"])
    return context
