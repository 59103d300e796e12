"""The HTTP port of a frontend with bounds, or whose prompts transformers makes; passes answers on unchanged.

Dynamo offers no way to replace its chat template engine or tokenizer in front of its router, but it accepts
prompts as token ids. So the door, in the frontend's process, parses each request and makes its prompt in a thread pool.
Remove it once Dynamo renders templates as transformers does and adds the begin-of-text token (ai-dynamo/dynamo #4610),
and bounds its queue (``admission``).
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import ssl
import sys
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from types import MappingProxyType
from typing import Any, cast

import h11

from trtx.frontend.admission import LAUNCHER_HEADER, METRICS_PATH, AdmissionQueue, Bounds, Overloaded, priority_of
from trtx.frontend.answer_framing import AnswerFraming
from trtx.frontend.refusals import refusal, stream_end, whole_answer
from trtx.frontend.request_head import is_encoded, request_head
from trtx.frontend.rewriting import PATHS
from trtx.frontend.tool_answers import CallRequest, ToolAnswer
from trtx.prompts.maker import Unrenderable

Rewrite = Callable[[str, bytes], bytes]
"""Takes the path and body of a POST, returns the body with its prompt as token ids. Raises Unrenderable."""
ReadSlots = Callable[[], int]
"""Returns how many requests the workers compute at once, 0 if that is unknown. Raises OSError."""
ReadCalls = Callable[[str, bytes], CallRequest | None]
"""Takes a path and a rewritten body, returns how to ask for an answer with calls, or None to copy the answer."""

_THREADS = 2
_GENERATING = frozenset({*PATHS, "/v1/messages"})
"""The paths whose requests take a slot of a worker and have a deadline."""
_SLOTS_SECONDS = 0.5
_OVERLOADED = 529
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
        rewrite: Rewrite | None,
        *,
        paths: frozenset[str] = frozenset(),
        body_limit: int,
        tls: ssl.SSLContext | None = None,
        read_calls: ReadCalls | None = None,
        bounds: Bounds | None = None,
        read_slots: ReadSlots = lambda: 0,
        overload_status: int = _OVERLOADED,
        namespace: str = "",
    ) -> None:
        """POSTs to ``paths`` are rewritten. A body of more than ``body_limit`` bytes is refused.

        ``bounds``: how many requests wait and how long they take; ``overload_status`` answers those that may not.
        Requests of the launcher of ``namespace`` pass them.
        ``read_calls``: None if Dynamo has no parser of tool calls, so that all answers are copied.
        """
        self._address, self._inner_port, self._rewrite, self._tls = address, inner_port, rewrite, tls
        self._read_calls, self._read_slots = read_calls, read_slots
        self.admission, self.overload_status = AdmissionQueue(bounds or Bounds()), overload_status
        self.launcher = (LAUNCHER_HEADER, namespace.encode())
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
        slots = loop.create_task(self._follow_slots()) if self.admission.bounds.has_queue else None
        server = await loop.create_server(lambda: _Client(self), sock=bound, ssl=self._tls, backlog=_BACKLOG)
        await (server.serve_forever() if slots is None else asyncio.gather(server.serve_forever(), slots))

    async def _follow_slots(self) -> None:
        while True:
            with contextlib.suppress(OSError):  # discovery can't be read now, so the last number stands
                self.admission.set_slots(await asyncio.to_thread(self._read_slots))
            await asyncio.sleep(_SLOTS_SECONDS)

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
        changed = body if self._rewrite is None else self._rewrite(path, body)
        return changed, None if self._read_calls is None else self._read_calls(path, changed)


class _Inner(asyncio.Protocol):
    """Dynamo's side of one client's connection: copies each answer to the client, unless a ToolAnswer reads it."""

    transport: asyncio.Transport

    def __init__(self, client: _Client) -> None:
        self._client = client
        self._framing: AnswerFraming | None = None
        self._answer: ToolAnswer | None = None
        self._has_sent = False  # the client has got a part of the answer
        self._is_left = False  # the client no longer wants what comes

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)  # uvloop's classes don't derive from asyncio's

    def ask_for_calls(self, request: bytes, *, is_streamed: bool) -> None:
        """Sends a POST whose answer may have calls."""
        self._answer, self._has_sent = ToolAnswer(is_streamed=is_streamed), False
        self.transport.write(request)

    def ask(self, method: bytes, request: bytes) -> None:
        self._framing, self._has_sent = AnswerFraming(method), False
        self.transport.write(request)

    def end_early(self, path: str, status: int, sentence: str) -> bytes | None:
        """Ends the request at Dynamo, which frees its KV.

        Returns the end of the client's answer; None if the client has got nothing yet. The end is empty if the answer
        can't be ended with a sentence, because a part of a chunk was sent.
        """
        self._is_left = True
        self.transport.abort()
        if not self._has_sent:
            return None
        may_end = self._answer is not None or (self._framing is not None and self._framing.is_between_chunks)
        return stream_end(path, status, sentence) if may_end else b""

    def data_received(self, data: bytes) -> None:
        if self._is_left:
            return
        if self._answer is not None:
            self._read(self._answer, data)
            return
        self._has_sent = True
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
            self._has_sent = True
            self._client.transport.write(made)
        if answer.is_done:
            self._answer = None
            self._client.next_request()

    def connection_lost(self, exc: Exception | None) -> None:
        if not self._is_left:
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
        self._since: float | None = None  # when the request took a slot; None: it has none
        self._deadline: asyncio.TimerHandle | None = None
        self._path = ""  # of the request whose answer is due

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)

    def connection_lost(self, exc: Exception | None) -> None:
        self._release()
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
        self._release()
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
        self._path = path = request.target.decode("latin-1").partition("?")[0]
        if path == METRICS_PATH and request.method == b"GET" and self._door.admission.bounds.has_any:
            kind = {"content-type": "text/plain; version=0.0.4"}
            self.transport.write(whole_answer(200, "OK", kind, self._door.admission.metrics().encode()))
            self.next_request()
            return
        if request.method == b"POST" and path in _GENERATING and not await self._admitted(request, body):
            return
        of_calls: CallRequest | None = None
        if request.method == b"POST" and path in self._door.paths and not is_encoded(request):
            try:
                body, of_calls = await self._door.rewritten(path, body)
            except Unrenderable as error:
                self._refuse(400, str(error), goes_on=self._may_go_on)
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
            self._inner.ask(request.method, request_head(request, len(body)) + body)
            return
        asked = request_head(request, len(of_calls.body)) + of_calls.body
        self._inner.ask_for_calls(asked, is_streamed=of_calls.is_streamed)

    async def _admitted(self, request: h11.Request, body: bytes) -> bool:
        """Waits until the request may go on; False if it was refused. Its deadline begins here."""
        admission = self._door.admission
        if self._door.launcher[1] and self._door.launcher in request.headers:
            return True
        if (seconds := admission.bounds.max_request_s) is not None:
            self._deadline = asyncio.get_running_loop().call_later(seconds, self._end_late, seconds)
        if not admission.bounds.has_queue:
            return True
        try:
            self._since = await admission.enter(priority_of(request.headers, body))
        except Overloaded as error:
            retry = {"retry-after": str(error.retry_s)}
            self._refuse(self._door.overload_status, str(error), goes_on=self._may_go_on, headers=retry)
            return False
        return True

    def _end_late(self, seconds: float) -> None:
        """Ends the request whose answer is due, because it has passed its deadline."""
        self._door.admission.counts.ended_late += 1
        sentence = f"the request took longer than {seconds:g} s, the limit of this server; ask for fewer tokens"
        if self._working is not None and not self._working.done():
            self._working.cancel()  # it waits, or its prompt is being made
            end = None
        else:
            assert self._inner is not None
            end, self._inner = self._inner.end_early(self._path, 504, sentence), None
        if end is None:
            self._refuse(504, sentence, goes_on=self._may_go_on)
            return
        self.transport.write(end)
        self.transport.close()

    def _release(self) -> None:
        """The request whose answer was due has ended."""
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None
        if self._since is not None:
            since, self._since = self._since, None
            self._door.admission.leave(since)

    @property
    def _may_go_on(self) -> bool:
        return self._parser.their_state is not h11.MUST_CLOSE

    def _refuse(
        self,
        status: int,
        sentence: str,
        *,
        goes_on: bool = False,
        headers: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        """Answers in Dynamo's form, and closes the connection unless ``goes_on``."""
        if self.transport.is_closing():
            return
        self.transport.write(refusal(status, sentence, closes=not goes_on, headers=headers))
        if goes_on:
            self.next_request()
        else:
            self.transport.close()


def _new_parser() -> h11.Connection:
    return h11.Connection(h11.SERVER, max_incomplete_event_size=_MOST_HEAD_BYTES)


def server_tls(certificate: Any, key: Any) -> ssl.SSLContext:
    """A TLS context with the certificate that Dynamo would present. Raises OSError or ssl.SSLError."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    context.set_alpn_protocols(["http/1.1"])
    return context
