"""The door in front of a frontend's HTTP port: bodies are rewritten, and all else passes as it is."""

from __future__ import annotations

import http.client
import json
import socket
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from trtx.frontend.door import Door
from trtx.prompts.maker import Unrenderable


class Echo(BaseHTTPRequestHandler):
    """Answers with what came, a stream in pieces."""

    protocol_version = "HTTP/1.1"

    def _echo(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        if self.path == "/stream":
            self.send_response(200)
            self.send_header("Transfer-Encoding", "chunked")
            self.end_headers()
            for piece in (b"one", b"two", b""):
                self.wfile.write(b"%x\r\n%s\r\n" % (len(piece), piece))
                time.sleep(0.01)
            return
        answer = json.dumps({"path": self.path, "method": self.command, "body": body.decode(), "of": self.headers["X"]})
        self.send_response(200)
        self.send_header("Content-Length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer.encode())

    do_GET = do_POST = _echo

    def log_message(self, *arguments: object) -> None: ...


def rewrite(path: str, body: bytes) -> bytes:
    if body == b"bad":
        raise Unrenderable("the template refuses it")
    return body.upper()


@pytest.fixture(scope="module")
def port() -> Iterator[int]:
    inner = ThreadingHTTPServer(("127.0.0.1", 0), Echo)
    inner.daemon_threads = True
    threading.Thread(target=inner.serve_forever, daemon=True).start()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        outer = int(free.getsockname()[1])
    Door(
        ("127.0.0.1", outer), inner.server_address[1], rewrite, paths=frozenset({"/v1/completions"}), body_limit=1000
    ).start()
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", outer)) == 0:
                break
        time.sleep(0.01)
    yield outer
    inner.shutdown()
    inner.server_close()


def asked(connection: http.client.HTTPConnection, path: str, body: Any = None, **headers: str) -> tuple[int, Any]:
    connection.request("GET" if body is None else "POST", path, body, headers, encode_chunked=True)
    answer = connection.getresponse()
    return answer.status, json.loads(answer.read())


def test_one_connection_carries_many_requests_and_only_prompts_are_rewritten(port: int) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    for _ in range(3):
        status, seen = asked(connection, "/v1/completions", b"abc", X="1")
        assert status == 200 and seen == {"path": "/v1/completions", "method": "POST", "body": "ABC", "of": "1"}
        assert asked(connection, "/other", b"abc")[1]["body"] == "abc"
        assert asked(connection, "/v1/completions?x=1")[1] == {
            "path": "/v1/completions?x=1", "method": "GET", "body": "", "of": None,
        }  # fmt: skip
    connection.request("POST", "/stream", b"")
    assert connection.getresponse().read() == b"onetwo"
    connection.close()


def test_a_body_in_chunks_is_one_body(port: int) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    assert asked(connection, "/v1/completions", iter([b"ab", b"c" * 300]), **{"Transfer-Encoding": "chunked"}) == (
        200, {"path": "/v1/completions", "method": "POST", "body": "AB" + "C" * 300, "of": None},
    )  # fmt: skip
    connection.close()


@pytest.mark.parametrize(
    ("sent", "status", "words"),
    [
        (b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 3\r\n\r\nbad", 400, "the template refuses it"),
        (b"POST /x HTTP/1.1\r\nHost: x\r\nContent-Length: 1001\r\n\r\n" + b"a" * 1001, 413, "more than 1000 bytes"),
        (b"no http at all\r\n\r\n", 400, "no HTTP/1.1"),
        (b"POST /x HTTP/1.1\r\nHost: x\r\nContent-Length: 3\r\nContent-Length: 4\r\n\r\nabcd", 400, "no HTTP/1.1"),
    ],
    ids=["refused", "too large", "no HTTP", "two lengths"],
)
def test_what_is_refused_gets_one_sentence_and_the_connection_ends(
    port: int, sent: bytes, status: int, words: str
) -> None:
    with socket.create_connection(("127.0.0.1", port), timeout=10) as client:
        client.sendall(sent)
        answer = b"".join(iter(lambda: client.recv(65536), b""))
    head, _, body = answer.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 %d " % status)
    assert words in json.loads(body)["message"] and json.loads(body)["code"] == status


def test_requests_that_come_at_once_are_answered_in_order(port: int) -> None:
    one = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nX: %d\r\nContent-Length: 3\r\n\r\nabc"
    last = b"GET /end HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"
    with socket.create_connection(("127.0.0.1", port), timeout=10) as client:
        client.sendall(b"".join(one % number for number in range(5)) + last)
        answer = b"".join(iter(lambda: client.recv(65536), b"")).decode()
    assert [answer.count(f'"of": "{number}"') for number in range(5)] == [1] * 5
    places = [answer.index(f'"of": "{number}"') for number in range(5)]
    assert places == sorted(places) and '"path": "/end"' in answer[places[-1] :]


def test_a_door_in_front_of_nothing_does_not_listen() -> None:
    with socket.socket() as one, socket.socket() as other, socket.socket() as probe:
        for free in (one, other):
            free.bind(("127.0.0.1", 0))
        outer, inner = one.getsockname()[1], other.getsockname()[1]
        one.close()
        Door(("127.0.0.1", outer), inner, rewrite, paths=frozenset(), body_limit=1).start()
        with pytest.raises(ConnectionRefusedError):
            probe.connect(("127.0.0.1", outer))


def test_a_port_in_use_is_an_os_error(port: int) -> None:
    with pytest.raises(OSError, match="in use"):
        Door(("127.0.0.1", port), 1, rewrite, paths=frozenset(), body_limit=1).start()
