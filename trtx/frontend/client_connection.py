"""One client's connection to the HTTP proxy."""

from __future__ import annotations

import asyncio
import re
from typing import Protocol, cast

import h11

from trtx.frontend.admission import AdmissionQueue, Overloaded, Turn, priority_of
from trtx.frontend.cut_tool_calls import CallRequest
from trtx.frontend.dynamo_connection import AnswerReader, DynamoConnection
from trtx.frontend.plain_post import plain_post
from trtx.frontend.queue_metrics import QUEUE_PATH, queue_text
from trtx.frontend.refusals import refusal, whole_answer
from trtx.frontend.request_head import is_encoded, request_head
from trtx.frontend.rewriting import PATHS
from trtx.prompts.rendering import Unrenderable

_GENERATING = frozenset({*PATHS, "/v1/messages"})
"""The paths whose requests take a slot of a worker and have a deadline."""
_GENERATING_BYTES = frozenset(path.encode() for path in _GENERATING)
_MOST_HEAD_BYTES = 256 << 10
_HEAD_TOO_LARGE = 431
_QUOTED = re.compile(r":? (bytearray\(|b['\"]).*", re.DOTALL)
_HTTP_VERSIONS = frozenset({b"1.0", b"1.1"})
_MOST_LINGERING_S = 30.0
"""How long the rest of a refused request is read and dropped, as in nginx (lingering_time)."""
_MOST_EARLY_BYTES = 256 << 10
"""Maximum number of bytes that are read while an answer is due; beyond it, a disconnect goes unnoticed."""


class Services(Protocol):
    """The part of :class:`~trtx.frontend.http_proxy.HttpProxy` that its connections use."""

    admission: AdmissionQueue
    overload_status: int
    launcher: tuple[bytes, bytes]
    paths: frozenset[str]
    body_limit: int

    def why_unavailable(self) -> str | None: ...

    async def lacks_worker(self) -> bool: ...

    async def inner(self, client: AnswerReader) -> DynamoConnection: ...

    async def rewritten(self, path: str, body: bytes) -> tuple[bytes, CallRequest | None]: ...


class ClientConnection(asyncio.Protocol):
    """One client's connection. A request is parsed once the answer to the one before is complete."""

    transport: asyncio.Transport

    def __init__(self, proxy: Services) -> None:
        self._proxy = proxy
        self._inner: DynamoConnection | None = None
        self._parser: h11.Connection | None = None  # made with the first bytes of a request that needs it
        self._request: h11.Request | None = None
        self._body = bytearray()
        self._working: asyncio.Task[None] | None = None
        self._answer_is_due = False
        self._early = b""  # what arrived while an answer was due
        self._unread_bytes = 0  # of the body of a refused request
        self._closes_after_body = False  # the connection ends once the body of a refused request has come
        self._lingering: asyncio.TimerHandle | None = None  # set: what still comes of a refused request is dropped
        self._turn: Turn | None = None
        self._deadline: asyncio.TimerHandle | None = None
        self._path = ""  # of the request whose answer is due

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)

    def connection_lost(self, exc: Exception | None) -> None:
        self._release()
        if self._lingering is not None:
            self._lingering.cancel()
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
        return False  # closes the connection: like Dynamo, treat a half-closed client as disconnected

    def data_received(self, data: bytes) -> None:
        if self._lingering is not None:
            return
        if self._answer_is_due:
            self._early += data
            if len(self._early) > _MOST_EARLY_BYTES:
                self.transport.pause_reading()
            return
        while data and self._parser is None and not self.transport.is_closing():
            rest = self._skip_body(data) if self._unread_bytes else self._refuse_unread(data)
            if rest is None:
                break
            data = rest
        if not data or self.transport.is_closing():
            return
        if self._parser is None:
            self._parser = h11.Connection(h11.SERVER, max_incomplete_event_size=_MOST_HEAD_BYTES)
        try:
            self._parser.receive_data(data)
            self._parse(self._parser)
        except h11.RemoteProtocolError as error:
            self._refuse(error.error_status_hint, _why_malformed(error), lingers=True)

    def _refuse_unread(self, data: bytes) -> bytes | None:
        """If the queue is full, refuses a request as soon as its head has arrived, without parsing it with h11.

        ``data`` begins with the request. Returns the bytes after the head; None if the request must be parsed.
        """
        admission, (launcher, namespace) = self._proxy.admission, self._proxy.launcher
        if not admission.is_full:
            return None
        post = plain_post(data, but_with={launcher} if namespace else frozenset())
        if post is None or post.path not in _GENERATING_BYTES or post.body_bytes > self._proxy.body_limit:
            return None
        error = admission.refusal()
        status = self._proxy.overload_status
        self.transport.write(refusal(status, str(error), closes=post.closes, retry_s=error.retry_s))
        self._unread_bytes, self._closes_after_body = post.body_bytes, post.closes
        rest = data[post.head_bytes :]
        if not self._unread_bytes:
            self._end_body()
        return rest

    def _skip_body(self, data: bytes) -> bytes:
        """Drops the body of a refused request: closing the connection before it has arrived would lose the answer."""
        rest = data[self._unread_bytes :]
        self._unread_bytes = max(0, self._unread_bytes - len(data))
        if not self._unread_bytes:
            self._end_body()
        return rest

    def _end_body(self) -> None:
        if self._closes_after_body:
            self.transport.close()

    @property
    def generates(self) -> bool:
        """Whether the request whose answer is due asks a model for text."""
        return self._path in _GENERATING

    def why_unavailable(self) -> str | None:
        """Returns why no worker takes the request whose answer is due; None if unknown."""
        return self._proxy.why_unavailable() if self.generates else None

    async def lacks_worker(self) -> bool:
        """Whether no worker that generates text is left; False if unknown."""
        return await self._proxy.lacks_worker()

    def next_request(self) -> None:
        """Handles the bytes that the client sent while its last answer was due, unless the connection ends."""
        self._release()
        if not self._may_go_on or self.transport.is_closing():
            return
        self._answer_is_due, self._parser, early = False, None, self._early
        self._early = b""
        self.transport.resume_reading()
        if early:
            self.data_received(early)

    def _parse(self, parser: h11.Connection) -> None:
        while True:
            event = parser.next_event()
            if isinstance(event, h11.Request):
                self._request, self._body = event, bytearray()
                if event.http_version not in _HTTP_VERSIONS:
                    version = event.http_version.decode("latin-1")
                    self._refuse(505, f"HTTP/{version} is not served here; use HTTP/1.1", lingers=True)
                    return
                if _announced_bytes(event) > self._proxy.body_limit:
                    self._refuse_body()
                    return
                if parser.they_are_waiting_for_100_continue:
                    self.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
            elif isinstance(event, h11.Data):
                self._body += event.data
                if len(self._body) > self._proxy.body_limit:
                    self._refuse_body()
                    return
            elif isinstance(event, h11.EndOfMessage):
                assert self._request is not None
                self._answer_is_due, self._early = True, parser.trailing_data[0]
                self._path = self._request.target.decode("latin-1").partition("?")[0]
                body = bytes(self._body)
                if self._request.method == b"POST" and self._path in _GENERATING:
                    self._admit(self._request, body)
                self._working = asyncio.ensure_future(self._forward(self._request, body))
                return
            else:
                return

    def _admit(self, request: h11.Request, body: bytes) -> None:
        """Takes a slot or a place in the queue; the request's deadline begins here.

        This happens before another connection's bytes are read, so that the other connections see a full queue.
        """
        admission, launcher = self._proxy.admission, self._proxy.launcher
        if launcher[1] and launcher in request.headers:
            return
        if admission.bounds.has_queue:
            self._turn = admission.enter(priority_of(request.headers, body))
        if (seconds := admission.bounds.max_request_s) is not None:
            self._deadline = asyncio.get_running_loop().call_later(seconds, self._end_late, seconds)

    async def _forward(self, request: h11.Request, body: bytes) -> None:
        path = self._path
        if path == QUEUE_PATH and request.method == b"GET" and self._proxy.admission.bounds.has_any:
            kind = {"content-type": "text/plain; version=0.0.4"}
            self.transport.write(whole_answer(200, "OK", kind, queue_text(self._proxy.admission)))
            self.next_request()
            return
        if self._turn is not None:
            try:
                await self._turn.comes
            except Overloaded as error:
                status, goes_on = self._proxy.overload_status, self._may_go_on
                self._refuse(status, str(error), goes_on=goes_on, retry_s=error.retry_s)
                return
        of_calls: CallRequest | None = None
        if request.method == b"POST" and path in self._proxy.paths and not is_encoded(request):
            try:
                body, of_calls = await self._proxy.rewritten(path, body)
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
                self._inner = await self._proxy.inner(self)
            except OSError as error:
                self._refuse(502, f"the frontend can't be reached: {error}")
                return
        if self.transport.is_closing():
            return  # Dynamo has closed its side
        if of_calls is None:
            self._inner.ask(request.method, request_head(request, len(body)) + body)
            return
        asked = request_head(request, len(of_calls.body)) + of_calls.body
        self._inner.ask_for_calls(asked, is_streamed=of_calls.is_streamed, is_forced=of_calls.is_forced)

    def _end_late(self, seconds: float) -> None:
        """Ends the request whose answer is due, because it has passed its deadline."""
        self._proxy.admission.counts.ended_late += 1
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
        """Frees the slot and the deadline of the request whose answer was due."""
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None
        if self._turn is not None:
            self._proxy.admission.leave(self._turn)
            self._turn = None

    @property
    def _may_go_on(self) -> bool:
        """Whether another request may follow on this connection."""
        return self._parser is None or self._parser.their_state is not h11.MUST_CLOSE

    def _refuse_body(self) -> None:
        self._refuse(413, f"the body has more than {self._proxy.body_limit} bytes; send a shorter one", lingers=True)

    def _refuse(
        self,
        status: int,
        sentence: str,
        *,
        goes_on: bool = False,
        lingers: bool = False,
        retry_s: int | None = None,
    ) -> None:
        """Answers in Dynamo's form, and closes the connection unless ``goes_on``.

        ``lingers``: more of the request may arrive, so the connection closes later: closing it before the rest has
        arrived could lose the answer.
        """
        if self.transport.is_closing():
            return
        self.transport.write(refusal(status, sentence, closes=not goes_on, retry_s=retry_s))
        if goes_on:
            self.next_request()
        elif lingers:
            self._lingering = asyncio.get_running_loop().call_later(_MOST_LINGERING_S, self.transport.close)
            if self.transport.can_write_eof():  # not with TLS
                self.transport.write_eof()
        else:
            self.transport.close()


def _why_malformed(error: h11.RemoteProtocolError) -> str:
    """A sentence about a request that h11 can't parse, without the bytes of the request that h11 quotes."""
    if error.error_status_hint == _HEAD_TOO_LARGE:
        return f"the head of the request has more than {_MOST_HEAD_BYTES} bytes; send fewer or shorter headers"
    words = _QUOTED.sub("", str(error))
    return f"the request is not valid HTTP/1.1: {words[0].lower()}{words[1:]}"


def _announced_bytes(request: h11.Request) -> int:
    """The length of the body that the request's head states, or 0. h11 has checked that it is a number."""
    return next((int(value) for name, value in request.headers if name == b"content-length"), 0)
