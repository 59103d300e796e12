"""What a client sees of a frontend with bounds: refusals, deadlines, and the state of the queue."""

from __future__ import annotations

import http.client
import json
import socket
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import ThreadingHTTPServer
from typing import Any

import pytest
from loopback import Handler, running
from processes import free_port, until

from trtx.frontend.admission import Bounds
from trtx.frontend.http_proxy import HttpProxy

CHAT = "/v1/chat/completions"
RESPONSES = "/v1/responses"


@dataclass
class Gates:
    """``goes_on``: held answers end. ``came``, ``gone``: how many requests arrived, and how many lost their client."""

    goes_on: threading.Event = field(default_factory=threading.Event)
    came: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))
    gone: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))


class Slow(Handler):
    """Plays Dynamo: an answer waits for the gate, a stream after its first event."""

    protocol_version = "HTTP/1.1"
    gates: Gates

    def do_POST(self) -> None:
        body = self.asked()
        self.gates.came.release()
        self.send_response(200)
        if body.get("stream"):
            self.send_header("Transfer-Encoding", "chunked")
            self.end_headers()
            self.chunk(b'data: {"n": 1}\n\n')
        self._held()
        if body.get("stream"):
            self.chunk(b"data: [DONE]\n\n")
            self.chunk(b"")
        else:
            self.send_header("Content-Length", "2")
            self.end_headers()
            self.wfile.write(b"{}")

    def _held(self) -> None:
        """Waits for the gate, or for the client's end."""
        self.connection.settimeout(0.01)
        while not self.gates.goes_on.is_set():
            try:
                if self.connection.recv(1, socket.MSG_PEEK) == b"":
                    raise ConnectionResetError
            except TimeoutError:
                continue
            except OSError:
                self.gates.gone.release()
                raise
        self.connection.settimeout(None)


@pytest.fixture
def served() -> Iterator[Callable[[Bounds], tuple[int, Gates]]]:
    gates = Gates()

    class Server(ThreadingHTTPServer):
        def handle_error(self, *arguments: object) -> None: ...  # a client that leaves

    inner = Server(("127.0.0.1", 0), type("Handler", (Slow,), {"gates": gates}))

    def serve(bounds: Bounds) -> tuple[int, Gates]:
        port = free_port()
        HttpProxy(
            ("127.0.0.1", port),
            inner.server_port,
            None,
            body_limit=1000,
            bounds=bounds,
            read_slots=lambda: 1,
            overload_status=429,
            namespace="mine",
        ).start()
        wanted = "trtx_frontend_request_slots 1" if bounds.has_queue else "trtx_frontend_running_requests"
        until_metrics(port, wanted)
        return port, gates

    with running(inner):
        yield serve
        gates.goes_on.set()


def until_metrics(port: int, *shown: str) -> None:
    until(f"{shown} in the metrics", lambda: all(line in metrics(port) for line in shown), seconds=10, every=0.005)


def metrics(port: int) -> str:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    try:
        connection.request("GET", "/trtx/queue")
        return connection.getresponse().read().decode()
    except OSError:
        return "it does not listen yet"
    finally:
        connection.close()


def asked(port: int, body: dict[str, Any], path: str = CHAT, **headers: str) -> http.client.HTTPConnection:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    connection.request("POST", path, json.dumps(body), {name.replace("_", "-"): text for name, text in headers.items()})
    return connection


def test_a_full_queue_answers_at_once_with_retry_after_and_the_connection_goes_on(served: Any) -> None:
    port, gates = served(Bounds(max_queued_requests=1))
    running = asked(port, {})
    until_metrics(port, "running_requests 1")
    waiting = asked(port, {})
    until_metrics(port, "waiting_requests 1")
    refused = asked(port, {})
    answer = refused.getresponse()
    assert answer.status == 429 and int(answer.headers["Retry-After"]) >= 1
    assert json.loads(answer.read()) == {
        "message": "the server is overloaded: 1 requests already wait; try again later",
        "type": "Too Many Requests",
        "code": 429,
    }
    gates.goes_on.set()
    assert running.getresponse().status == waiting.getresponse().status == 200
    refused.request("POST", CHAT, "{}")
    assert refused.getresponse().status == 200
    assert 'refused_requests_total{reason="queue full"} 1' in metrics(port)


def test_a_request_that_waits_too_long_is_refused(served: Any) -> None:
    port, gates = served(Bounds(max_queue_s=0.05))
    running = asked(port, {})
    until_metrics(port, "running_requests 1")
    answer = asked(port, {}).getresponse()
    assert answer.status == 429 and answer.headers["Retry-After"] == "1"
    assert "no worker was free within 0.05 s" in json.loads(answer.read())["message"]
    gates.goes_on.set()
    assert running.getresponse().status == 200


def test_a_proof_of_the_launcher_passes_a_full_queue(served: Any) -> None:
    port, gates = served(Bounds(max_queued_requests=1))
    running = [asked(port, {}) for _ in range(2)]
    until_metrics(port, "waiting_requests 1")
    proof = asked(port, {}, x_trtx_launcher="mine")
    other = asked(port, {}, x_trtx_launcher="another")
    assert other.getresponse().status == 429
    gates.goes_on.set()
    assert [one.getresponse().status for one in (proof, *running)] == [200, 200, 200]


def test_a_client_that_leaves_gives_its_slot_and_its_place_back(served: Any) -> None:
    port, gates = served(Bounds(max_queued_requests=1))
    running, waiting = asked(port, {}), asked(port, {})
    until_metrics(port, "waiting_requests 1")
    waiting.close()
    until_metrics(port, "waiting_requests 0")
    assert gates.came.acquire(timeout=60), "the request of a client that leaves earlier never reaches Dynamo"
    running.close()
    until_metrics(port, "running_requests 0")
    assert gates.gone.acquire(timeout=60), "Dynamo sees the client go, and frees its KV"


def test_an_answer_past_its_deadline_is_a_504_and_is_ended_at_dynamo(served: Any) -> None:
    port, gates = served(Bounds(max_queue_s=60, max_request_s=0.5))
    late = asked(port, {})
    answer = late.getresponse()
    assert answer.status == 504
    assert "took longer than 0.5 s" in json.loads(answer.read())["message"]
    assert gates.gone.acquire(timeout=60)
    until_metrics(port, "running_requests 0")
    gates.goes_on.set()
    late.request("POST", CHAT, "{}")
    assert late.getresponse().status == 200


def test_the_deadline_also_ends_a_request_that_waits(served: Any) -> None:
    port, gates = served(Bounds(max_queued_requests=5, max_request_s=0.5))
    answers = [asked(port, {}) for _ in range(2)]
    assert [one.getresponse().status for one in answers] == [504, 504]
    until_metrics(port, "waiting_requests 0", "running_requests 0")
    assert gates.gone.acquire(timeout=60)
    assert "timed_out_requests_total 2" in metrics(port)


@pytest.mark.parametrize(("path", "says"), [(CHAT, b'data: {"error": {'), (RESPONSES, b"event: error\ndata: {")])
def test_a_stream_past_its_deadline_ends_with_a_sentence(served: Any, path: str, says: bytes) -> None:
    port, gates = served(Bounds(max_request_s=0.5))
    answer = asked(port, {"stream": True}, path).getresponse()
    assert answer.status == 200
    events = answer.read()
    assert events.startswith(b'data: {"n": 1}\n\n' + says), events
    assert b"took longer than 0.5 s" in events
    assert events.endswith(b"data: [DONE]\n\n") == (path == CHAT)
    assert gates.gone.acquire(timeout=60)


def plain(length: int, *lines: str, path: str = CHAT) -> bytes:
    return "\r\n".join([f"POST {path} HTTP/1.1", "Host: a", f"Content-Length: {length}", *lines, "", ""]).encode()


@pytest.fixture
def full(served: Any) -> int:
    """The port of an HTTP proxy whose queue is full."""
    port, _ = served(Bounds(max_queued_requests=1))
    full.held = [asked(port, {}) for _ in range(2)]  # type: ignore[attr-defined]
    until_metrics(port, "waiting_requests 1")
    return int(port)


def read_answers(client: socket.socket, count: int) -> list[bytes]:
    received = b""
    while received.count(b'"code": 429}') < count:
        data = client.recv(4096)
        assert data, received
        received += data
    return received.split(b"HTTP/1.1 ")[1:]


def test_a_full_queue_refuses_before_the_body_has_come_and_the_connection_goes_on(full: int) -> None:
    with socket.create_connection(("127.0.0.1", full), timeout=10) as client:
        client.sendall(plain(5))
        (answer,) = read_answers(client, 1)
        assert answer.startswith(b"429 Too Many Requests\r\n") and b"connection: close" not in answer
        client.sendall(b"{}")
        client.sendall(b"   " + plain(2) + b"{}" + plain(2, path=RESPONSES) + b"{}")
        assert len(read_answers(client, 2)) == 2
    assert 'refused_requests_total{reason="queue full"} 3' in metrics(full)


def test_a_refused_client_that_asks_for_it_is_closed_once_its_body_has_come(full: int) -> None:
    with socket.create_connection(("127.0.0.1", full), timeout=10) as client:
        client.sendall(plain(2, "Connection: close"))
        (answer,) = read_answers(client, 1)
        assert b"connection: close\r\n" in answer
        client.sendall(b"{}")
        assert client.recv(1) == b""


@pytest.mark.parametrize(
    ("request_bytes", "status"),
    [
        (plain(2) + b"{}", b"429"),
        (plain(2, "Connection: close") + b"{}", b"429"),
        (plain(2, "Expect: 100-continue") + b"{}", b"100"),
        (b"POST /v1/messages HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n\r\n", b"429"),
        (b"POST /v1/messages HTTP/1.0\r\nContent-Length: 2\r\n\r\n{}", b"429"),
        (plain(2, "Content-Length: 3") + b"{} ", b"400"),
        (plain(2, "Name : with a space") + b"{}", b"400"),
        (plain(1001), b"413"),
    ],
)
def test_a_full_queue_changes_no_other_answer(full: int, request_bytes: bytes, status: bytes) -> None:
    for cut in (len(request_bytes), 1, len(request_bytes) // 2):
        with socket.create_connection(("127.0.0.1", full), timeout=10) as client:
            client.sendall(request_bytes[:cut])
            client.sendall(request_bytes[cut:] + (b"x" * 1001 if status == b"413" else b""))
            assert client.recv(12) == b"HTTP/1.1 " + status
