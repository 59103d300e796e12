"""The connection to Dynamo that belongs to one client's connection."""

from __future__ import annotations

import asyncio
import sys
from typing import Protocol, cast

from trtx.frontend.answer_framing import AnswerFraming
from trtx.frontend.bypass_events import WithoutBypassEvents
from trtx.frontend.refusals import refusal, stream_end
from trtx.frontend.tool_answers import ToolAnswer

_UNAVAILABLE = b"HTTP/1.1 503 "


class AnswerReader(Protocol):
    """The part of the client's connection that the connection to Dynamo uses."""

    transport: asyncio.Transport

    def why_unavailable(self) -> str | None: ...

    def next_request(self) -> None: ...


class DynamoConnection(asyncio.Protocol):
    """Copies each answer to the client, unless a ToolAnswer reads it or trtx explains a 503.

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
        self._has_sent = False  # the client has got a part of the answer
        self._is_left = False  # the request was ended early, and further bytes are dropped

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)  # uvloop's classes don't derive from asyncio's

    def ask_for_calls(self, request: bytes, *, is_streamed: bool) -> None:
        """Sends a POST whose answer may have tool calls."""
        self._answer, self._has_sent = ToolAnswer(is_streamed=is_streamed), False
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
        self.transport.abort()
        if not self._has_sent:
            return None
        may_end = self._answer is not None or (self._framing is not None and self._framing.is_between_chunks)
        return stream_end(path, status, sentence) if may_end else b""

    def data_received(self, data: bytes) -> None:
        if self._is_left:
            return
        if not self._has_sent and self._replaced is None and data.startswith(_UNAVAILABLE):
            self._sentence = self._client.why_unavailable() or ""
            self._replaced = AnswerFraming(b"POST") if self._sentence else None
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

    def _replace(self, framing: AnswerFraming, data: bytes) -> None:
        if framing.feed(data):
            self._replaced = self._framing = self._answer = None
            self._client.transport.write(refusal(503, self._sentence, closes=False))
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
