"""Removes tool calls that ``max_tokens`` cut from Dynamo's answers to chat requests.

Dynamo 1.6.1 completes a cut call, so a client would get half a name or half of the arguments as a whole call. In a
stream, each call has a chunk of its own, and a cut call is in the chunk with the finish reason ``length``. So the HTTP
proxy always asks Dynamo for a stream, drops the call in that chunk, and joins the chunks if the client wants no stream.
Remove this module once Dynamo drops calls that are not closed.

With a forced call, Dynamo streams the arguments piece by piece. If the answer is cut before they begin, the last chunk
of a stream has the JSON so far as ``content``. The proxy drops it, as Dynamo does in an answer that is not a stream.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any

from trtx.frontend.answer_framing import AnswerFraming
from trtx.frontend.bypass_events import EVENT
from trtx.frontend.rewriting import CHAT, each_once
from trtx.prompts.rendering import Unrenderable

_READ_BY_THE_PARSER = (None, "auto")
"""Values of ``tool_choice`` with which Dynamo parses the text; with others it expects JSON, or no calls."""
_FRAMING = (b"content-length", b"transfer-encoding")


@dataclass(frozen=True, slots=True)
class CallRequest:
    """A chat request whose answer may have tool calls. ``body`` is the client's, changed to ask for a stream."""

    body: bytes
    is_streamed: bool  # the client asked for a stream
    is_forced: bool = False  # the answer is a call, whatever the model would say


def with_calls(path: str, body: bytes) -> CallRequest | None:
    """The request for a streamed answer with tool calls; None if the proxy only copies the answer."""
    if path != CHAT:
        return None
    try:
        request = json.loads(body, object_pairs_hook=each_once)
    except (ValueError, RecursionError, Unrenderable):
        return None  # Dynamo refuses it
    if not isinstance(request, dict) or request.get("n") not in (None, 1) or not request.get("tools"):
        return None
    choice, is_streamed = request.get("tool_choice"), request.get("stream")
    if isinstance(choice, dict) or choice == "required":
        return CallRequest(body, is_streamed=True, is_forced=True) if is_streamed is True else None
    if choice not in _READ_BY_THE_PARSER or is_streamed not in (None, True, False):
        return None
    if is_streamed:
        return CallRequest(body, is_streamed=True)
    if request.get("stream_options") is not None:
        return None  # Dynamo refuses it
    changed = {**request, "stream": True, "stream_options": {"include_usage": True}}
    return CallRequest(_encoded(changed), is_streamed=False)


class ToolAnswer:
    """Converts Dynamo's streamed answer to the client's answer. ``is_done``: the answer has ended."""

    def __init__(self, *, is_streamed: bool, is_forced: bool = False) -> None:
        """``is_streamed``: the client asked for a stream. ``is_forced``: the answer has no text beside its calls."""
        self._is_streamed, self._is_forced = is_streamed, is_forced
        self._framing = AnswerFraming(b"POST", keeps=True)
        self._is_events: bool | None = None  # None: the head has not arrived
        self._message = _Message()
        self._has_begun = False  # the client has the head of a stream
        self.is_done = False

    def feed(self, data: bytes) -> bytes:
        """Takes Dynamo's next bytes and returns the client's. Raises ValueError if they are not a valid answer."""
        self.is_done = self._framing.feed(data)
        if self._is_events is None and (status := self._framing.status) is not None:
            kinds = [line.partition(b":")[2] for line in self._framing.head if line[:13].lower() == b"content-type:"]
            self._is_events = status == 200 and any(kind.strip().startswith(b"text/event-stream") for kind in kinds)
        made = b"".join(self._events()) if self._is_events else b""
        return made + self._end() if self.is_done else made

    def _events(self) -> Iterator[bytes]:
        if self._is_streamed and not self._has_begun:
            self._has_begun = True
            yield self._head(b"transfer-encoding: chunked")
        *whole, rest = bytes(self._framing.body).split(b"\n\n")
        self._framing.body[:] = rest
        for text in whole:
            if text + b"\n\n" == EVENT:
                continue
            event = _without_cut_call(text, is_forced=self._is_forced)
            if self._is_streamed:
                yield _chunk(event + b"\n\n")
            else:
                self._message.add(event)

    def _head(self, framing: bytes) -> bytes:
        return b"\r\n".join([self._framing.head[0], *self._headers(_FRAMING), framing]) + b"\r\n\r\n"

    def _headers(self, dropped: tuple[bytes, ...]) -> list[bytes]:
        return [line for line in self._framing.head[1:] if line.partition(b":")[0].lower() not in dropped]

    def _end(self) -> bytes:
        rest = bytes(self._framing.body)
        if not self._is_events:
            return self._head(b"content-length: %d" % len(rest)) + rest
        if self._is_streamed:
            return (_chunk(rest) if rest else b"") + b"0\r\n\r\n"
        return _whole(*self._message.answer(), self._headers((b"content-type", *_FRAMING)))


class _Message:
    """Joins the chunks of a streamed answer into one document."""

    def __init__(self) -> None:
        self._first: dict[str, Any] = {}
        self._content: list[str] = []
        self._reasoning: list[str] = []
        self._calls: dict[int, dict[str, Any]] = {}
        self._logprobs: list[Any] | None = None
        self._finish: str | None = None
        self._further: dict[str, Any] = {}  # usage and nvext, of the chunks that have them
        self._error: dict[str, Any] | None = None

    def add(self, event: bytes) -> None:
        """Adds an event. Raises ValueError for one that is not JSON."""
        for payload in _payloads(event):
            if "error" in payload or "choices" not in payload:
                self._error = payload.get("error") or payload
                continue
            self._first = self._first or payload
            self._further |= {name: payload[name] for name in ("usage", "nvext") if payload.get(name) is not None}
            for choice in payload["choices"]:
                self._add_choice(choice)

    def _add_choice(self, choice: Mapping[str, Any]) -> None:
        delta = choice.get("delta") or {}
        if delta.get("content"):
            self._content.append(delta["content"])
        if delta.get("reasoning_content"):
            self._reasoning.append(delta["reasoning_content"])
        for call in delta.get("tool_calls") or ():
            known = self._calls.setdefault(call["index"], {"id": None, "type": "function", "function": {}})
            known["id"] = call.get("id") or known["id"]
            for name, text in (call.get("function") or {}).items():
                known["function"][name] = known["function"].get(name, "") + (text or "")
        if (logprobs := choice.get("logprobs")) is not None:
            self._logprobs = (self._logprobs or []) + list(logprobs.get("content") or ())
        self._finish = choice.get("finish_reason") or self._finish

    def answer(self) -> tuple[int, dict[str, Any]]:
        """Status and body of the answer."""
        if self._error is not None:
            code = self._error.get("code")
            return (code, self._error) if code in _ERRORS else (500, {**_UNKNOWN, **self._error, "code": 500})
        message: dict[str, Any] = {"role": "assistant", "content": "".join(self._content) or None}
        if self._calls:
            message["tool_calls"] = [self._calls[index] for index in sorted(self._calls)]
        message["reasoning_content"] = "".join(self._reasoning) or None
        logprobs = None if self._logprobs is None else {"content": self._logprobs, "refusal": None}
        choice = {"index": 0, "message": message, "finish_reason": self._finish, "logprobs": logprobs}
        return 200, {**self._first, "object": "chat.completion", "choices": [choice], **self._further}


def _payloads(event: bytes) -> Iterator[dict[str, Any]]:
    for line in event.split(b"\n"):
        name, _, text = line.partition(b":")
        if name == b"data" and text.strip() != b"[DONE]":
            payload = json.loads(text)
            yield payload if isinstance(payload, dict) else {"error": {"message": str(payload)}}


def _without_cut_call(event: bytes, *, is_forced: bool) -> bytes:
    """``event`` without its tool call if its finish reason is ``length``, because the call may be cut.

    ``is_forced``: its text is the beginning of a call, and is dropped too.
    """
    if b'"length"' not in event or not (is_forced or b'"tool_calls"' in event):
        return event
    lines = []
    for line in event.split(b"\n"):
        name, _, text = line.partition(b":")
        if name == b"data":
            payload = json.loads(text)
            for choice in payload.get("choices") or ():
                if choice.get("finish_reason") == "length":
                    choice["delta"].pop("tool_calls", None)
                    if is_forced:
                        choice["delta"].pop("content", None)
            line = b"data: " + _encoded(payload)
        lines.append(line)
    return b"\n".join(lines)


_UNKNOWN = {"message": "Internal server error", "type": "Internal Server Error", "code": 500}
_ERRORS = frozenset(status for status in HTTPStatus if status >= HTTPStatus.BAD_REQUEST)


def _whole(status: int, document: Mapping[str, Any], headers: Iterable[bytes]) -> bytes:
    """An answer with a document as its body."""
    body = _encoded(document)
    lines = [b"HTTP/1.1 %d %s" % (status, HTTPStatus(status).phrase.encode())]
    lines += [*headers, b"content-type: application/json", b"content-length: %d" % len(body)]
    return b"\r\n".join(lines) + b"\r\n\r\n" + body


def _encoded(document: Any) -> bytes:
    return json.dumps(document, ensure_ascii=False).encode("utf-8", "surrogatepass")


def _chunk(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)
