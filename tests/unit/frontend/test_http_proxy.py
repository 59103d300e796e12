"""The HTTP proxy in front of a frontend's HTTP port: bodies are rewritten, and all else passes as it is."""

from __future__ import annotations

import http.client
import json
import random
import socket
import time
from collections.abc import Iterator
from functools import partial
from http.server import ThreadingHTTPServer
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from loopback import Handler, listens, running
from processes import free_port, until

from trtx.frontend.answer_framing import AnswerFraming
from trtx.frontend.discovery import lacks_generator
from trtx.frontend.http_proxy import HttpProxy
from trtx.frontend.sleeping_workers import why_unavailable
from trtx.planes.file_registry import FileRegistry
from trtx.prompts.rendering import Unrenderable


class Echo(Handler):
    """Answers with what came, a stream in pieces."""

    protocol_version = "HTTP/1.1"

    def _echo(self) -> None:
        body = self.body()
        if body == b"ASLEEP":
            self.answer(503, b"dynamos")
            return
        if body in (b"ROUTELESS", b"UNKNOWN", b"FAILED"):
            message = {b"UNKNOWN": b'{"message": "Model not found"}', b"FAILED": b"dynamos"}.get(body, b"")
            self.send_response(500 if body == b"FAILED" else 404)
            self.send_header("Transfer-Encoding", "chunked")
            self.end_headers()
            for piece in (message, b"") if message else (b"",):
                self.wfile.write(b"%x\r\n%s\r\n" % (len(piece), piece))
            return
        if self.path == "/stream":
            self.send_response(200)
            self.send_header("Transfer-Encoding", "chunked")
            self.end_headers()
            for piece in (b"one", b"two", b""):
                self.chunk(piece)
                time.sleep(0.01)
            return
        self.answer(200, {"path": self.path, "method": self.command, "body": body.decode(), "of": self.headers["X"]})

    do_GET = do_POST = _echo


def rewrite(path: str, body: bytes) -> bytes:
    if body == b"bad":
        raise Unrenderable("the template refuses it")
    if body == b"bug":
        raise KeyError("a mistake in the rewrite")
    return body.upper()


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("run")
    (made / "serve" / "status").mkdir(parents=True)
    return made


@pytest.fixture(scope="module")
def port(run_dir: Path) -> Iterator[int]:
    with running(inner := ThreadingHTTPServer(("127.0.0.1", 0), Echo)):
        outer = free_port()
        HttpProxy(
            ("127.0.0.1", outer), inner.server_port, rewrite, paths=frozenset({"/v1/completions"}), body_limit=1000,
            why_unavailable=partial(why_unavailable, run_dir),
            lacks_worker=partial(lacks_generator, FileRegistry(run_dir / "kv")),
        ).start()  # fmt: skip
        until("the proxy listens", partial(listens, outer))
        yield outer


def asked(connection: http.client.HTTPConnection, path: str, body: Any = None, **headers: str) -> tuple[int, Any]:
    connection.request("GET" if body is None else "POST", path, body, headers, encode_chunked=True)
    answer = connection.getresponse()
    return answer.status, json.loads(answer.read())


def request(path: str, body: bytes) -> bytes:
    return b"POST %s HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%s" % (path.encode(), len(body), body)


def exchanged(port: int, *pieces: bytes) -> list[tuple[int, bytes]]:
    """Sends ``pieces`` without waiting; status and body of every answer until the connection ends."""
    answers = []
    with socket.create_connection(("127.0.0.1", port), timeout=10) as client:
        client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for piece in pieces:
            client.sendall(piece)
        file = client.makefile("rb")
        while head := file.readline():
            headers = http.client.parse_headers(file)
            if headers.get("Transfer-Encoding") == "chunked":
                body = b""
                while size := int(file.readline(), 16):
                    body += file.read(size)
                    file.readline()
                file.readline()
            else:
                body = file.read(int(headers["Content-Length"]))
            answers.append((int(head.split()[1]), body))
    return answers


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
        (b"POST /v1/completions HTTP/1.0\r\nContent-Length: 3\r\n\r\nbad", 400, "the template refuses it"),
        (b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 3\r\n\r\nbug", 500, "KeyError"),
        (b"POST /x HTTP/1.1\r\nHost: x\r\nContent-Length: 1001\r\n\r\n" + b"a" * 1001, 413, "more than 1000 bytes"),
        (b"POST /x HTTP/1.1\r\nHost: x\r\nContent-Length: 1001\r\nExpect: 100-continue\r\n\r\n", 413, "1000 bytes"),
        (b"no http at all\r\n\r\n", 400, "the request is not valid HTTP/1.1: illegal request line"),
        (b"GET /x HTTP/1.1\r\n: y\r\n\r\n", 400, "the request is not valid HTTP/1.1: illegal header line"),
        (b"GET /x HTTP/1.1\r\n\r\n", 400, "the request is not valid HTTP/1.1: missing mandatory Host: header"),
        (b"GET /x HTTP/1.1\r\nX: " + b"a" * (256 << 10), 431, "the head of the request has more than 262144 bytes"),
        (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", 505, "HTTP/2.0 is not served here; use HTTP/1.1"),
        (
            b"POST /x HTTP/1.1\r\nHost: x\r\nContent-Length: 3\r\nContent-Length: 4\r\n\r\nabcd",
            400,
            "the request is not valid HTTP/1.1: conflicting Content-Length headers",
        ),
    ],
    ids=[
        "HTTP/1.0",
        "error of the rewrite",
        "too large",
        "announced",
        "no HTTP",
        "no name",
        "no host",
        "large head",
        "HTTP/2",
        "two lengths",
    ],
)
def test_a_refusal_that_ends_the_connection_comes_behind_the_answers_that_are_due(
    port: int, sent: bytes, status: int, words: str
) -> None:
    answers = exchanged(port, request("/stream", b""), request("/v1/completions", b"abc"), sent)
    (_, streamed), (_, echoed), (found, refusal) = answers
    assert streamed == b"onetwo" and json.loads(echoed)["body"] == "ABC"
    assert found == status
    message = json.loads(refusal)["message"]
    assert words in message and "bytearray" not in message and json.loads(refusal)["code"] == status


def test_a_client_that_sends_a_large_body_to_its_end_gets_the_refusal(port: int) -> None:
    body = b"a" * (32 << 20)  # more than the buffers of both sockets hold
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    for one in (body, iter([body])):  # with a length, and in chunks
        connection.request("POST", "/v1/completions", one)
        answer = connection.getresponse()
        assert answer.status == 413 and "more than 1000 bytes" in json.loads(answer.read())["message"]
    connection.close()


def test_a_prompt_that_is_refused_leaves_the_connection_to_the_requests_around_it(port: int) -> None:
    good, bad = request("/v1/completions", b"abc"), request("/v1/completions", b"bad")
    end = b"GET /end HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"
    answers = exchanged(port, request("/stream", b""), bad, good, bad, bad, request("/stream", b""), good, end)
    assert [status for status, _ in answers] == [200, 400, 200, 400, 400, 200, 200, 200]
    assert answers[0][1] == answers[5][1] == b"onetwo" and json.loads(answers[-1][1])["path"] == "/end"


def test_requests_that_come_at_once_are_answered_in_order_however_they_are_cut(port: int) -> None:
    chosen = random.Random(7)
    for _ in range(10):
        bodies = [bytes(chosen.choices(range(128), k=chosen.choice((0, 1, 40, 900)))) for _ in range(5)]
        sent = b"".join(request("/v1/completions", body) for body in bodies)
        sent += b"GET /end HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"
        cuts = sorted(chosen.choices(range(len(sent)), k=6))
        answers = exchanged(port, *(sent[begin:end] for begin, end in pairwise([0, *cuts, len(sent)])))
        assert [json.loads(body)["body"].encode() for _, body in answers] == [*(body.upper() for body in bodies), b""]


@pytest.mark.parametrize(
    ("method", "answer"),
    [
        (b"GET", b"HTTP/1.1 200 OK\r\nContent-Length: 3\r\n\r\nabc"),
        (b"GET", b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n"),
        (b"HEAD", b"HTTP/1.1 200 OK\r\nContent-Length: 3\r\n\r\n"),
        (b"GET", b"HTTP/1.1 204 No Content\r\n\r\n"),
        (b"POST", b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 OK\r\nContent-Length: 1\r\n\r\na"),
        (
            b"POST",
            b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nB;x=1\r\ndata: a\r\n\r\n\r\n0\r\nT: 1\r\n\r\n",
        ),
    ],
)
def test_the_end_of_an_answer_is_found_wherever_its_bytes_are_cut(method: bytes, answer: bytes) -> None:
    for size in range(1, len(answer) + 1):
        framing = AnswerFraming(method)
        pieces = [answer[at : at + size] for at in range(0, len(answer), size)]
        assert [framing.feed(piece) for piece in pieces] == [False] * (len(pieces) - 1) + [True]


def test_an_answer_without_a_length_ends_with_its_connection() -> None:
    assert not AnswerFraming(b"GET").feed(b"HTTP/1.1 200 OK\r\n\r\n0\r\n\r\n")


def test_a_door_in_front_of_nothing_does_not_listen() -> None:
    with socket.socket() as one, socket.socket() as other, socket.socket() as probe:
        for free in (one, other):
            free.bind(("127.0.0.1", 0))
        outer, inner = one.getsockname()[1], other.getsockname()[1]
        one.close()
        HttpProxy(("127.0.0.1", outer), inner, rewrite, paths=frozenset(), body_limit=1).start()
        with pytest.raises(ConnectionRefusedError):
            probe.connect(("127.0.0.1", outer))


def test_a_port_in_use_is_an_os_error(port: int) -> None:
    with pytest.raises(OSError, match="in use"):
        HttpProxy(("127.0.0.1", port), 1, rewrite, paths=frozenset(), body_limit=1).start()


@pytest.mark.parametrize("content", [b'{"state": "serving"}', b'{"state": "asleep"}', b"[]", b"half"])
def test_a_503_says_how_to_wake_a_model_that_sleeps_and_the_connection_goes_on(
    port: int, run_dir: Path, content: bytes
) -> None:
    (run_dir / "serve" / "status" / "agg-0.json").write_bytes(content)
    asleep, other, after = exchanged(
        port, request("/v1/completions", b"asleep"), request("/other", b"ASLEEP"), b"GET /x HTTP/1.1\r\nHost: x\r\n"
        b"Connection: close\r\n\r\n",
    )  # fmt: skip
    assert (asleep[0], other, after[0]) == (503, (503, b"dynamos"), 200)
    if b"asleep" in content:
        document = json.loads(asleep[1])
        assert document["code"] == 503 and "run trtx wake" in document["message"]
        assert run_dir.name in document["message"] and str(run_dir) not in document["message"]
    else:
        assert asleep[1] == b"dynamos"


def test_a_404_without_a_body_is_a_503_that_a_client_may_repeat(port: int, run_dir: Path) -> None:
    (run_dir / "serve" / "status" / "agg-0.json").write_bytes(b'{"state": "serving"}')
    gone, other, unknown, after = exchanged(
        port, request("/v1/completions", b"routeless"), request("/v1/embeddings", b"ROUTELESS"),
        request("/v1/completions", b"unknown"), b"GET /x HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n",
    )  # fmt: skip
    document = json.loads(gone[1])
    assert (gone[0], document["code"]) == (503, 503) and "no worker of the model is ready" in document["message"]
    assert (other, unknown[0], after[0]) == ((404, b""), 404, 200) and b"Model not found" in unknown[1]


def register(run_dir: Path, port: int) -> None:
    """A worker with that port, as Dynamo 1.6.1 writes its record."""
    (bucket := run_dir / "kv" / "v1" / "instances").mkdir(parents=True, exist_ok=True)
    record = {"component": "backend", "endpoint": "generate", "instance_id": 7}
    record["transport"] = {"tcp": f"127.0.0.1:{port}/7/generate"}
    (bucket / "ns%2Fbackend%2Fgenerate%2F7").write_text(json.dumps(record))


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/other"])
def test_a_500_is_a_503_only_for_a_prompt_and_while_no_worker_is_left(port: int, run_dir: Path, path: str) -> None:
    (run_dir / "serve" / "status" / "agg-0.json").write_bytes(b'{"state": "serving"}')
    last = b"GET /x HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"
    with socket.create_server(("127.0.0.1", 0)) as worker:
        register(run_dir, worker.getsockname()[1])
        assert exchanged(port, request(path, b"FAILED"), last)[0] == (500, b"dynamos")
    (failed, message), (after, _) = exchanged(port, request(path, b"FAILED"), last)
    assert (failed, after) == (500 if path == "/other" else 503, 200)
    assert (b"no worker of the model is ready" in message) == (path != "/other")
