"""The connection to Dynamo that belongs to one client's connection."""

from __future__ import annotations

import asyncio
import sys
from typing import Protocol, cast

from trtx.frontend.answer_framing import AnswerFraming
from trtx.frontend.bypass_events import WithoutBypassEvents
from trtx.frontend.cut_tool_calls import ToolAnswer
from trtx.frontend.refusals import refusal, stream_end

_UNAVAILABLE = b"HTTP/1.1 503 "
_NOT_FOUND = b"HTTP/1.1 404 "
_FAILED = b"HTTP/1.1 500 "
_NOT_FOUND_STATUS = 404
_FAILED_STATUS = 500
NO_WORKER = (
    "no worker of the model is ready now; if one has died, it starts again and serves in some seconds, so try again"
)


class AnswerReader(Protocol):
    """The part of the client's connection that the connection to Dynamo uses."""

    transport: asyncio.Transport

    @property
    def generates(self) -> bool: ...

    def why_unavailable(self) -> str | None: ...

    async def lacks_worker(self) -> bool: ...

    def next_request(self) -> None: ...


class DynamoConnection(asyncio.Protocol):
    """Copies each answer to the client, unless a ToolAnswer reads it or trtx explains why no worker answers.

    Without a worker of a model, Dynamo 1.6.1 has no route for its requests: a 404 without a body, which a client takes
    for a wrong address and never repeats. The client gets a 503 instead.

    For some milliseconds after the last worker has died, its KV router makes a 500 of a request that it has accepted,
    and only its log has the cause. The client gets the same 503 if no worker is left indeed, and otherwise the 500.

    ``drops_bypass_events``: leaves the events of ``bypass_events`` out of the copies.
    """

    transport: asyncio.Transport

    def __init__(self, client: AnswerReader, *, drops_bypass_events: bool = False) -> None:
        self._client = client
        self._copied = WithoutBypassEvents() if drops_bypass_events else None
        self._framing: AnswerFraming | None = None
        self._answer: ToolAnswer | None = None
        self._replaced: AnswerFraming | None = None  # an answer whose text trtx replaces
        self._sentence = ""
        self._original = bytearray()  # its bytes, which may have to be passed on
        self._judging: asyncio.Task[None] | None = None  # a 500 is complete, and discovery is being read
        self._has_sent = False  # the client has got a part of the answer
        self._is_left = False  # the request was ended early, and further bytes are dropped

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)  # uvloop's classes don't derive from asyncio's

    def ask_for_calls(self, request: bytes, *, is_streamed: bool, is_forced: bool) -> None:
        """Sends a POST whose answer may have tool calls, or must be one (``is_forced``)."""
        self._answer, self._has_sent = ToolAnswer(is_streamed=is_streamed, is_forced=is_forced), False
        self.transport.write(request)

    def ask(self, method: bytes, request: bytes) -> None:
        self._framing, self._has_sent = AnswerFraming(method), False
        self.transport.write(request)

    def end_early(self, path: str, status: int, sentence: str) -> bytes | None:
        """Ends the request at Dynamo, which frees its KV.

        Returns the end of the client's answer; None if the client has got nothing yet. The end is empty if a part of a
        chunk was sent already, so that no error message can follow.
        """
        self._is_left = True
        if self._judging is not None:
            self._judging.cancel()
        self.transport.abort()
        if not self._has_sent:
            return None
        may_end = self._answer is not None or (self._framing is not None and self._framing.is_between_chunks)
        return stream_end(path, status, sentence) if may_end else b""

    def data_received(self, data: bytes) -> None:
        if self._is_left:
            return
        if not self._has_sent and self._replaced is None and data.startswith((_UNAVAILABLE, _NOT_FOUND, _FAILED)):
            self._replaced = self._explained(data)
        if self._replaced is not None:
            self._replace(self._replaced, data)
            return
        if self._answer is not None:
            self._read(self._answer, data)
            return
        self._has_sent = True
        ends = self._framing is not None and self._framing.feed(data)
        self._client.transport.write(data if self._copied is None else self._copied.feed(data))
        if ends:
            if self._copied is not None:
                self._client.transport.write(self._copied.end())
            self._framing = None
            self._client.next_request()

    def _explained(self, data: bytes) -> AnswerFraming | None:
        """The framing of an answer that begins with ``data``, if trtx may replace it with a sentence."""
        sentence = self._client.why_unavailable()
        if data.startswith(_UNAVAILABLE):
            self._sentence = sentence or ""
            return AnswerFraming(b"POST") if sentence else None
        self._sentence = sentence or NO_WORKER
        return AnswerFraming(b"POST", keeps=True) if self._client.generates else None

    def _replace(self, framing: AnswerFraming, data: bytes) -> None:
        self._original += data
        if not framing.feed(data):
            return
        sent, self._original = bytes(self._original), bytearray()
        is_kept = framing.status == _NOT_FOUND_STATUS and framing.body
        self._replaced = self._framing = self._answer = None
        if framing.status == _FAILED_STATUS:
            self._judging = asyncio.ensure_future(self._judge(sent))
            return
        self._client.transport.write(sent if is_kept else refusal(503, self._sentence, closes=False))
        self._client.next_request()

    async def _judge(self, failed: bytes) -> None:
        """Passes on ``failed``, a 500, or answers 503 in its place if no worker is left."""
        lacks_worker = await self._client.lacks_worker()
        self._judging = None
        if self._client.transport.is_closing():
            return
        self._client.transport.write(refusal(503, self._sentence, closes=False) if lacks_worker else failed)
        if self.transport.is_closing():
            self._client.transport.close()
        else:
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
        if not self._is_left and self._judging is None:
            self._client.transport.close()

    def pause_writing(self) -> None:
        self._client.transport.pause_reading()

    def resume_writing(self) -> None:
        self._client.transport.resume_reading()
