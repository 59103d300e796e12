"""HTTP servers that a test plays: on loopback, in threads of its own process."""

from __future__ import annotations

import contextlib
import json
import socket
from collections.abc import Iterator, Mapping
from http.server import BaseHTTPRequestHandler, HTTPServer, ThreadingHTTPServer
from threading import Thread
from typing import Any


class Handler(BaseHTTPRequestHandler):
    """Logs nothing. HTTP/1.0 unless a subclass sets ``protocol_version``: one request on each connection."""

    def log_message(self, *arguments: object) -> None: ...

    def body(self) -> bytes:
        """The body of the request, which is read once."""
        return self.rfile.read(int(self.headers.get("Content-Length", 0)))

    def asked(self) -> Any:
        """The body of the request, as JSON."""
        return json.loads(self.body())

    def answer(self, status: int, content: Any = b"", headers: Mapping[str, str] | None = None) -> None:
        """Sends a whole answer: bytes as they are, anything else as JSON."""
        body = content if isinstance(content, bytes) else json.dumps(content).encode()
        kind = {} if isinstance(content, bytes) else {"Content-Type": "application/json"}
        self.send_response(status)
        for name, value in {**kind, "Content-Length": str(len(body)), **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def chunk(self, data: bytes) -> None:
        """Sends one chunk of an answer with ``Transfer-Encoding: chunked``; the empty one ends it."""
        self.wfile.write(b"%x\r\n%s\r\n" % (len(data), data))
        self.wfile.flush()


@contextlib.contextmanager
def running(server: HTTPServer) -> Iterator[str]:
    """Serves while inside; yields the server's URL."""
    thread = Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@contextlib.contextmanager
def serving(handler: type[BaseHTTPRequestHandler], port: int = 0, **state: Any) -> Iterator[str]:
    """Serves with ``handler`` while inside; yields the URL. ``state``: attributes that the handler gets."""
    with running(ThreadingHTTPServer(("127.0.0.1", port), type(handler.__name__, (handler,), state))) as url:
        yield url


def listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0
