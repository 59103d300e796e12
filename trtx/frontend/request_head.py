"""The head of a request on its way from a client to Dynamo."""

from __future__ import annotations

import h11


def is_encoded(request: h11.Request) -> bool:
    """Whether the body is compressed; Dynamo refuses such bodies."""
    return any(name == b"content-encoding" and value != b"identity" for name, value in request.headers)


def request_head(request: h11.Request, length: int) -> bytes:
    """Returns the request's head, with the length of the rewritten body."""
    dropped = (b"content-length", b"transfer-encoding", b"expect")
    lines = [b"%s %s HTTP/%s" % (request.method, request.target, request.http_version)]
    lines += [b"%s: %s" % (name, value) for name, value in request.headers.raw_items() if name.lower() not in dropped]
    if length or request.method in (b"POST", b"PUT", b"PATCH"):
        lines.append(b"content-length: %d" % length)
    return b"\r\n".join(lines) + b"\r\n\r\n"
