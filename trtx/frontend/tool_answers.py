"""Answers to chat requests whose tool calls Dynamo parses: always read as a stream, and without calls that were cut.

Dynamo 1.4.2 completes a call that ``max_tokens`` cuts, so a client would get half a name or half of the arguments as a
whole call. An answer that is no stream is worse: its finish reason hides the cut, and it is parsed for calls even where
``tool_choice`` is none. So the door asks for a stream, drops a call in the chunk that says ``length``, and joins the
chunks if the client wants no stream. Remove this module once Dynamo returns no call that is not closed.

Dynamo also hides why a worker refuses a request: in a stream, and with tools in every answer. So the door asks again,
without either, for the reason alone.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from trtx.frontend.answer_framing import AnswerFraming
from trtx.frontend.rewriting import CHAT

_READ_BY_THE_PARSER = (None, "auto", "none")
"""Values of ``tool_choice`` with which a parser reads the text; Dynamo reads other answers as JSON."""
_HIDES_REASONS = ("stream", "stream_options", "tools", "tool_choice", "parallel_tool_calls")
_FRAMING = (b"content-length", b"transfer-encoding")


@dataclass(frozen=True, slots=True)
class CallRequest:
    """A chat request whose calls a parser reads.

    ``body`` asks Dynamo for a stream, ``of_reason`` for the reason of a refusal.
    """

    body: bytes
    of_reason: bytes
    is_streamed: bool  # the client asked for a stream


def with_calls(path: str, body: bytes) -> CallRequest | None:
    """How to ask Dynamo for the answer to a request; None if its answer is copied."""
    if path != CHAT:
        return None
    try:
        request = json.loads(body)
    except (ValueError, RecursionError):
        return None  # Dynamo refuses it
    if not isinstance(request, dict) or request.get("n") not in (None, 1):
        return None
    choice, is_streamed = request.get("tool_choice"), request.get("stream")
    if isinstance(choice, dict) or choice not in _READ_BY_THE_PARSER or is_streamed not in (None, True, False):
        return None
    if is_streamed and (choice == "none" or not request.get("tools")):
        return None  # Dynamo looks for no calls in it
    of_reason = _encoded({name: value for name, value in request.items() if name not in _HIDES_REASONS})
    if is_streamed:
        return CallRequest(body, of_reason, is_streamed=True)
    if request.get("stream_options") is not None:
        return None  # Dynamo refuses it
    changed = {**request, "stream": True, "stream_options": {"include_usage": True}}
    return CallRequest(_encoded(changed), of_reason, is_streamed=False)


class ToolAnswer:
    """Reads Dynamo's answer to one request and makes the client's from it.

    ``is_done``: the answer has ended. ``is_refused``: it ended with an error before any text, and the client has got
    nothing yet.
    """

    def __init__(self, *, is_streamed: bool, is_of_reason: bool = False) -> None:
        """``is_streamed``: the client asked for a stream. ``is_of_reason``: only a refusal is passed on."""
        self._is_streamed, self._is_of_reason = is_streamed, is_of_reason
        self._framing = AnswerFraming(b"POST", keeps=True)
        self._is_events: bool | None = None  # None: the head has not arrived
        self._message = _Message()
        self._has_begun = False  # the client has the head of a stream
        self.is_done = self.is_refused = False

    def feed(self, data: bytes) -> bytes:
        """Takes Dynamo's next bytes and returns the client's. Raises ValueError for bytes that are no such answer."""
        self.is_done = self._framing.feed(data)
        if self._is_events is None and (status := self._framing.status) is not None:
            kinds = [line.partition(b":")[2] for line in self._framing.head if line[:13].lower() == b"content-type:"]
            self._is_events = status == 200 and any(kind.strip().startswith(b"text/event-stream") for kind in kinds)
        made = b"".join(self._events()) if self._is_events else b""
        return made + self._end() if self.is_done else made

    def _events(self) -> Iterator[bytes]:
        *whole, rest = bytes(self._framing.body).split(b"\n\n")
        self._framing.body[:] = rest
        for text in whole:
            event = _without_cut_call(text)
            if not self._is_streamed:
                self._message.add(event)
            elif self._has_begun:
                yield _chunk(event + b"\n\n")
            elif self.is_refused or b'"error"' in event:
                self.is_refused = True
            else:
                self._has_begun = True
                yield self._head(b"transfer-encoding: chunked") + _chunk(event + b"\n\n")

    def _head(self, framing: bytes) -> bytes:
        return b"\r\n".join([self._framing.head[0], *self._headers(_FRAMING), framing]) + b"\r\n\r\n"

    def _headers(self, dropped: tuple[bytes, ...]) -> list[bytes]:
        return [line for line in self._framing.head[1:] if line.partition(b":")[0].lower() not in dropped]

    def _end(self) -> bytes:
        rest = bytes(self._framing.body)
        if self._is_of_reason and self._framing.status == 200:  # it failed before, but not now
            return _whole(500, _UNKNOWN)
        if not self._is_events:
            return self._head(b"content-length: %d" % len(rest)) + rest
        if self._is_streamed and not self.is_refused:
            begin = b"" if self._has_begun else self._head(b"transfer-encoding: chunked")
            return begin + (_chunk(rest) if rest else b"") + b"0\r\n\r\n"
        if self._message.error is not None and not self._message.has_text:
            self.is_refused = True
        if self.is_refused:
            return b""
        return _whole(*self._message.answer(), self._headers((b"content-type", *_FRAMING)))


class _Message:
    """Joins the chunks of a streamed answer to the answer that is no stream."""

    def __init__(self) -> None:
        self._first: dict[str, Any] = {}
        self._content: list[str] = []
        self._reasoning: list[str] = []
        self._calls: dict[int, dict[str, Any]] = {}
        self._logprobs: list[Any] | None = None
        self._finish: str | None = None
        self._further: dict[str, Any] = {}  # usage and nvext, of the chunks that have them
        self.error: dict[str, Any] | None = None

    @property
    def has_text(self) -> bool:
        return bool(self._content or self._reasoning or self._calls or self._finish)

    def add(self, event: bytes) -> None:
        """Adds an event. Raises ValueError for one that is no JSON."""
        for payload in _payloads(event):
            if "error" in payload or "choices" not in payload:
                self.error = payload.get("error") or payload
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
        if self.error is not None:
            return 500, {**_UNKNOWN, "message": self.error.get("message", _UNKNOWN["message"])}
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


def _without_cut_call(event: bytes) -> bytes:
    """``event`` without the call of a chunk that ends the answer for its length: it may lack its end."""
    if b'"tool_calls"' not in event or b'"length"' not in event:
        return event
    lines = []
    for line in event.split(b"\n"):
        name, _, text = line.partition(b":")
        if name == b"data":
            payload = json.loads(text)
            for choice in payload.get("choices") or ():
                if choice.get("finish_reason") == "length":
                    choice["delta"].pop("tool_calls", None)
            line = b"data: " + _encoded(payload)
        lines.append(line)
    return b"\n".join(lines)


_UNKNOWN = {"message": "Internal server error", "type": "Internal Server Error", "code": 500}


def _whole(status: int, document: Mapping[str, Any], headers: Iterable[bytes] = ()) -> bytes:
    """An answer with a document as its body."""
    body = _encoded(document)
    lines = [b"HTTP/1.1 %d %s" % (status, b"OK" if status == 200 else b"Internal Server Error")]
    lines += [*headers, b"content-type: application/json", b"content-length: %d" % len(body)]
    return b"\r\n".join(lines) + b"\r\n\r\n" + body


def _encoded(document: Any) -> bytes:
    return json.dumps(document, ensure_ascii=False).encode("utf-8", "surrogatepass")


def _chunk(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)
