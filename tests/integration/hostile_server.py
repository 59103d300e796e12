"""A server of OpenAI's chat API that answers wrong in every way seen or thought of, and what must be said of each.

``ANSWERS`` is the table; :func:`hostile_server` serves it on loopback, one answer after the other, or one alone.
"""

from __future__ import annotations

import contextlib
import itertools
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from loopback import Handler, serving

OSL = 8
SSE, JSON, HTML = "text/event-stream", "application/json", "text/html"
Event = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Hostile:
    """One way to answer, and the reason that a request that gets it fails with; None: it succeeds."""

    body: bytes
    reason: str | None
    status: int = 200
    kind: str = SSE
    is_cut: bool = False  # the connection is closed after the body, before the answer is whole


def chunk(delta: Event, finish_reason: str | None = None) -> Event:
    choice = {"index": 0, "delta": delta, "finish_reason": finish_reason}
    return {"id": "a", "object": "chat.completion.chunk", "choices": [choice]}


def words(count: int) -> list[Event]:
    return [chunk({"role": "assistant", "content": ""}), *(chunk({"content": f"w{n} "}) for n in range(count))]


def usage(tokens: object, prompt: object = 64) -> Event:
    total = 64 + (tokens if isinstance(tokens, int) else 0)
    counted = {"prompt_tokens": prompt, "completion_tokens": tokens, "total_tokens": total}
    return {"id": "a", "object": "chat.completion.chunk", "choices": [], "usage": counted}


def stream(events: Iterable[Event], *, end: bytes = b"data: [DONE]\n\n") -> bytes:
    return b"".join(b"data: " + json.dumps(event).encode() + b"\n\n" for event in events) + end


END = chunk({}, "length")
WHOLE = [*words(OSL), END, usage(OSL)]
BODY = {
    "object": "chat.completion",
    "choices": [{"index": 0, "message": {"role": "assistant", "content": "w0 w1"}, "finish_reason": "length"}],
    "usage": {"prompt_tokens": 64, "completion_tokens": OSL},
}
ERROR = {"error": {"message": "the engine died", "type": "internal_server_error", "code": 500}}
ERROR_EVENT = b'event: error\ndata: {"message": "out of blocks", "code": 500}\n\n'
PAGE = b"<html><head><title>502 Bad Gateway</title></head><body><h1>502 Bad Gateway</h1><hr>nginx</body></html>"

ANSWERS = {
    "whole": Hostile(stream(WHOLE), None),
    "404": Hostile(
        b'{"error": {"message": "model not found", "type": "not_found", "code": 404}}',
        "HTTP 404 model not found", status=404, kind=JSON,
    ),
    "no usage": Hostile(stream([*words(OSL), END]), None),
    "half of the tokens": Hostile(
        stream([*words(4), chunk({}, "stop"), usage(4)]), "stopped after 4 tokens, although min_tokens 8 was requested"
    ),
    "half of the tokens, at length": Hostile(
        stream([*words(4), END, usage(4)]), "4 of 8 tokens, with finish_reason 'length'"
    ),
    "three times the tokens": Hostile(
        stream([*words(OSL), END, usage(3 * OSL)]), "usage counts 24 tokens, but 8 were requested"
    ),
    "fewer tokens than came": Hostile(
        stream([*words(OSL), chunk({}, "stop"), usage(3)]), "usage counts 3 tokens, but text came in 8 pieces"
    ),
    "usage without a count": Hostile(
        stream([*words(OSL), END, usage(None)]),
        "usage without a count of completion tokens: "
        '{"prompt_tokens": 64, "completion_tokens": null, "total_tokens": 64}',
    ),
    "a count in quotes": Hostile(
        stream([*words(OSL), END, usage(str(OSL))]),
        "usage without a count of completion tokens: "
        '{"prompt_tokens": 64, "completion_tokens": "8", "total_tokens": 64}',
    ),
    "a count with a point": Hostile(
        stream([*words(OSL), END, usage(float(OSL))]),
        "usage without a count of completion tokens: "
        '{"prompt_tokens": 64, "completion_tokens": 8.0, "total_tokens": 64}',
    ),
    "a prompt's count in quotes": Hostile(
        stream([*words(OSL), END, usage(OSL, "64")]),
        "usage with prompt_tokens that is not a count: "
        '{"prompt_tokens": "64", "completion_tokens": 8, "total_tokens": 72}',
    ),
    "usage that is a number": Hostile(
        stream([*words(OSL), END, {**usage(OSL), "usage": OSL}]), "usage without a count of completion tokens: 8"
    ),
    "tokens without text": Hostile(stream([chunk({"content": ""}), END, usage(OSL)]), "8 tokens without text"),
    "text that aiperf does not find": Hostile(
        stream([{**event, "object": "chunk"} for event in words(OSL)] + [END, usage(OSL)]),
        "aiperf finds text in only 0 of 8 events with text, so its times are wrong",
    ),
    "a delta that is no object": Hostile(
        stream([*words(OSL), {**END, "choices": [{"index": 0, "delta": "x", "finish_reason": "abort"}]}]),
        "ended early with finish_reason 'abort'",
    ),
    "more pieces than tokens": Hostile(stream([*words(OSL + 4), END, usage(OSL)]), None),
    "a filter's chunk first": Hostile(
        stream([{"object": "", "choices": [], "prompt_filter_results": [{}]}, *WHOLE]), None
    ),
    "error as an object": Hostile(
        stream([*words(3), {"object": "error", "message": "boom", "type": "X", "code": 500}]),
        "error in the answer: boom",
    ),
    "error on the stream": Hostile(stream([*words(3), ERROR]), "error in the answer: the engine died"),
    "error as an event": Hostile(stream(words(3), end=ERROR_EVENT), "error in the answer: out of blocks"),
    "aborted": Hostile(stream([*words(3), chunk({}, "abort"), usage(3)]), "ended early with finish_reason 'abort'"),
    "no finish reason": Hostile(stream([*words(OSL), usage(OSL)]), "cut off: no finish_reason"),
    "no [DONE]": Hostile(stream(WHOLE, end=b""), "cut off: no [DONE]"),
    "half an event": Hostile(
        stream(words(OSL), end=b'data: {"object": "chat.comp'), 'the answer is not JSON: {"object": "chat.comp'
    ),
    "no text": Hostile(stream([]), "empty answer"),
    "empty stream": Hostile(b"", "empty answer"),
    "empty body": Hostile(b"", "empty answer", kind=JSON),
    "one body": Hostile(json.dumps(BODY).encode(), "one whole body, but a stream was requested", kind=JSON),
    "another document": Hostile(b'{"a": 1}', 'no completion in the answer: {"a": 1}', kind=JSON),
    "error in a body": Hostile(json.dumps(ERROR).encode(), "error in the answer: the engine died", kind=JSON),
    "a login page": Hostile(
        b"<html><title>Log in</title><body>Who are you?</body></html>", "the answer is not JSON: Log in", kind=HTML
    ),
    "502": Hostile(PAGE, "HTTP 502 Bad Gateway", status=502, kind=HTML),
    "503 without a word": Hostile(b"", "HTTP 503 Service Unavailable", status=503, kind=JSON),
    "closed at once": Hostile(b"", "ServerDisconnectedError: Server disconnected", status=0),
    "closed in the middle": Hostile(
        stream(words(3), end=b""), "ClientPayloadError: Response payload is not completed", is_cut=True
    ),
}  # fmt: skip


class _Handler(Handler):
    protocol_version = "HTTP/1.1"
    answers: Iterator[Hostile]

    def do_GET(self) -> None:
        self.answer(200, {"object": "list", "data": [{"id": "hostile", "object": "model"}]})

    def do_POST(self) -> None:
        if "messages" not in self.asked():
            self.answer(400, {"error": {"message": "messages is missing"}})  # a probe takes no answer's turn
            return
        one = next(self.answers)
        if one.status:
            missing = {"Content-Length": str(len(one.body) + 100)} if one.is_cut else {}
            self.answer(one.status, one.body, {"Content-Type": one.kind, **missing})
        self.close_connection = one.is_cut or not one.status


@contextlib.contextmanager
def hostile_server(*names: str) -> Iterator[str]:
    """The URL of a server that gives the named answers in turn, all of ``ANSWERS`` without a name."""
    answers = itertools.cycle([ANSWERS[name] for name in names or ANSWERS])
    with serving(_Handler, answers=answers) as url:
        yield url
