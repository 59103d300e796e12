"""The HTTP proxy's own answers, in the JSON format of Dynamo's."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import lru_cache

from trtx.frontend.rewriting import RESPONSES

_KINDS = {
    400: "Bad Request",
    413: "Payload Too Large",
    429: "Too Many Requests",
    431: "Request Header Fields Too Large",
    500: "Internal Server Error",
    501: "Not Implemented",
    502: "Bad Gateway",
    503: "Service Unavailable",
    504: "Gateway Timeout",
    505: "HTTP Version Not Supported",
    529: "Overloaded",
}


@lru_cache(maxsize=128)  # hundreds of clients may get the same one at once
def refusal(status: int, sentence: str, *, closes: bool, retry_s: int | None = None) -> bytes:
    """A whole answer. ``closes``: the connection ends after it. ``retry_s``: seconds of its ``Retry-After``."""
    document = {"message": sentence, "type": _KINDS.get(status, "Error"), "code": status}
    lines = {"content-type": "application/json"} | ({} if retry_s is None else {"retry-after": str(retry_s)})
    lines |= {"connection": "close"} if closes else {}
    return whole_answer(status, document["type"], lines, json.dumps(document).encode())


def whole_answer(status: int, reason: object, headers: Mapping[str, str], body: bytes) -> bytes:
    lines = [f"HTTP/1.1 {status} {reason}", *(f"{name}: {value}" for name, value in headers.items())]
    return "\r\n".join([*lines, f"content-length: {len(body)}", "", ""]).encode() + body


def stream_end(path: str, status: int, sentence: str) -> bytes:
    """The end of a chunked stream of events, for a request to ``path`` that fails in the middle of its answer."""
    error = {"message": sentence, "type": _KINDS.get(status, "Error"), "code": status}
    if path == RESPONSES:
        events = b"event: error\ndata: " + json.dumps({**error, "type": "error"}).encode() + b"\n\n"
    else:
        events = b"data: " + json.dumps({"error": error}).encode() + b"\n\ndata: [DONE]\n\n"
    return b"%x\r\n%s\r\n0\r\n\r\n" % (len(events), events)
