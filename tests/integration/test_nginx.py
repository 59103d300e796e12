"""The exported gateway in real nginx: who is asked again, who is not, and who gets in."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import re
import signal
import socket
import ssl
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from called import call
from certificates import make
from loopback import Handler, serving
from nginx_process import Nginx, running_nginx
from processes import free_port, until
from topology_clients import trtx_serve

from trtx.tls import default_trust, pinned
from trtx.topology import Plan

KEY, HOLDER = "3f9c0a7be15d", "ada"
PATH = "/v1/completions"


def two_ports() -> int:
    """A free port with a free one after it, as two frontends take them."""
    while True:
        first = free_port()
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", first + 1))
            return first


@contextlib.contextmanager
def gateway(directory: Path, port: int, *arguments: str) -> Iterator[tuple[Nginx, int]]:
    """nginx before two frontends on ``port`` and the one after it, and where it listens."""
    listen = free_port()
    done = call(
        *("export", "nginx", "--frontends", "2", "--port", str(port), "--listen", f"127.0.0.1:{listen}"),
        *(*arguments, "--output", str(directory / "exported")),
    )
    assert done.code == 0, done.err
    with running_nginx(directory / "nginx", directory / "exported" / "trtx.conf", listen) as nginx:
        yield nginx, listen


@dataclass
class Frontend:
    """Plays one, as Dynamo 1.4.2 was seen to behave. ``seen``: of each request, path and Authorization."""

    behaves: str = "answers"
    seen: list[tuple[str, str | None]] = field(default_factory=list)
    goes_on: threading.Event = field(default_factory=threading.Event)


class _Handler(Handler):
    protocol_version = "HTTP/1.1"
    plays: Frontend

    def do_GET(self) -> None:
        self._answer()

    def do_POST(self) -> None:
        self.body()
        self._answer()

    def _answer(self) -> None:
        plays = self.plays
        plays.seen.append((self.path, self.headers["Authorization"]))
        if plays.behaves == "dies":  # with the whole request read
            self.close_connection = True
        elif plays.behaves.isdecimal():
            self.answer(int(plays.behaves), b"{}")
        elif plays.behaves == "answers":
            self.answer(200, b'{"choices": []}')
        else:
            self.send_response(200)
            self.send_header("Content-Type", "text/event-stream")
            self.send_header("Transfer-Encoding", "chunked")
            self.end_headers()
            self.chunk(b"data: one\n\n")
            if plays.behaves == "dies in a stream":
                self.close_connection = True
                return
            assert plays.goes_on.wait(30)
            self.chunk(b"data: [DONE]\n\n")
            self.chunk(b"")


@contextlib.contextmanager
def played(port: int, *frontends: Frontend) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        for index, plays in enumerate(frontends):
            stack.enter_context(serving(_Handler, port + index, plays=plays))
        yield


def ask(port: int, path: str = PATH, key: str | None = None, method: str = "POST") -> tuple[int, bytes]:
    """Status and body. IncompleteRead where the answer was cut."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    try:
        headers = {} if key is None else {"Authorization": f"Bearer {key}"}
        connection.request(method, path, b"{}" if method == "POST" else None, headers)
        response = connection.getresponse()
        return response.status, response.read()
    finally:
        connection.close()


@pytest.mark.parametrize("behaves", ["dies", "404", "503", "502", "nobody listens"])
def test_what_a_frontend_has_not_begun_to_answer_goes_to_another(behaves: str, tmp_path: Path) -> None:
    port, bad, good = two_ports(), Frontend(behaves), Frontend()
    there = (bad, good) if behaves != "nobody listens" else ()
    with contextlib.ExitStack() as opened:
        opened.enter_context(played(port, *there) if there else played(port + 1, good))
        nginx, listen = opened.enter_context(gateway(tmp_path, port))
        for _ in range(4):
            assert ask(listen) == (200, b'{"choices": []}')
        until("every request is in the log", lambda: len(nginx.tried) == 4)
        assert f"127.0.0.1:{port}, 127.0.0.1:{port + 1}" in {addresses for _, _, addresses, _ in nginx.tried}
    assert len(good.seen) == 4


@pytest.mark.parametrize("status", ["404", "503", "500", "400"])
def test_what_all_frontends_say_is_what_the_client_hears(status: str, tmp_path: Path) -> None:
    port, both = two_ports(), (Frontend(status), Frontend(status))
    with played(port, *both), gateway(tmp_path, port) as (_, listen):
        assert ask(listen)[0] == int(status)
        each = 2 if status in ("404", "503") else 1
        assert sum(len(one.seen) for one in both) == each
        if status == "503":  # which counts as a failure: of all of them, it is nginx that says so next
            assert ask(listen)[0] == 502
        else:
            assert [ask(listen)[0] for _ in range(3)] == [int(status)] * 3, "nobody is given up for it"
        for one in both:
            one.behaves = "answers"
        until("they are asked again", lambda: ask(listen)[0] == 200, seconds=20)


def test_a_stream_that_has_begun_is_cut_and_asked_of_nobody_again(tmp_path: Path) -> None:
    port, both = two_ports(), (Frontend("dies in a stream"), Frontend("dies in a stream"))
    with played(port, *both), gateway(tmp_path, port) as (_, listen):
        with pytest.raises(http.client.IncompleteRead):
            ask(listen)
        assert sum(len(one.seen) for one in both) == 1


def test_each_event_comes_before_the_next_is_there(tmp_path: Path) -> None:
    port, both = two_ports(), (Frontend("streams"), Frontend("streams"))
    with played(port, *both), gateway(tmp_path, port) as (_, listen):
        connection = http.client.HTTPConnection("127.0.0.1", listen, timeout=30)
        connection.request("POST", PATH, b"{}")
        response = connection.getresponse()
        assert response.readline() == b"data: one\n"
        for one in both:
            one.goes_on.set()
        assert response.read() == b"\ndata: [DONE]\n\n"
        connection.close()


def test_a_key_opens_it_and_stays_there_and_metrics_are_nobodys(tmp_path: Path) -> None:
    keys = tmp_path / "keys.map"
    keys.write_text(f'"Bearer {KEY}" {HOLDER};\n')
    port, both = two_ports(), (Frontend(), Frontend())
    with played(port, *both), gateway(tmp_path, port, "--api-keys", str(keys)) as (nginx, listen):
        for key in (None, "wrong", f"{KEY}0", ""):
            status, body = ask(listen, key=key)
            assert status == 401 and json.loads(body)["error"]["code"] == "invalid_api_key"
        assert ask(listen, "/health", method="GET")[0] == 401
        assert not [one for one in both if one.seen]
        assert ask(listen, key=KEY)[0] == 200
        assert ask(listen, "/metrics", key=KEY, method="GET")[0] == 404
        assert [seen for one in both for seen in one.seen] == [(PATH, None)], "the key stays at the gateway"
        assert KEY not in (tmp_path / "exported" / "trtx.conf").read_text()
        assert KEY not in nginx.errors()


def test_a_rate_is_limited_for_all_and_for_each_key(tmp_path: Path) -> None:
    keys = tmp_path / "keys.map"
    keys.write_text(f'"Bearer {KEY}" {HOLDER};\n"Bearer other" bob;\n')
    options = ("--api-keys", str(keys), "--rate-limit", "0.05", "--rate-limit-per-key", "0.05", "--rate-burst", "2")
    port, both = two_ports(), (Frontend(), Frontend())
    with played(port, *both), gateway(tmp_path, port, *options) as (_, listen):
        assert [ask(listen, key="wrong")[0] for _ in range(5)] == [401] * 5  # counts for nobody
        assert [ask(listen, "/health", KEY, "GET")[0] for _ in range(5)] == [200] * 5
        assert [ask(listen, key=KEY)[0] for _ in range(3)] == [200, 200, 200]  # one of the rate, two of the burst
        connection = http.client.HTTPConnection("127.0.0.1", listen, timeout=30)
        connection.request("POST", PATH, b"{}", {"Authorization": f"Bearer {KEY}"})
        response = connection.getresponse()
        assert (response.status, response.headers["Retry-After"]) == (429, "20")
        assert json.loads(response.read())["error"]["code"] == "rate_limit_exceeded"
        connection.close()
        assert ask(listen, key="other")[0] == 429, "all clients together have had theirs"


def test_a_service_that_decides_is_asked_as_the_document_says(tmp_path: Path) -> None:
    document = (Path(__file__).parents[2] / "docs" / "security.md").read_text()
    snippet = re.search(r"```nginx\n(.+?)```", document, re.DOTALL)
    assert snippet is not None and "`auth_request /who;`" in document
    port, decides, both = two_ports(), Frontend("401"), (Frontend(), Frontend())
    door, listen = free_port(), free_port()
    words = ("--frontends", "2", "--port", str(port), "--listen", f"127.0.0.1:{listen}")
    exported = call("export", "nginx", *words).out
    location = snippet[1].replace(":9000", f":{door}") + "    location / {\n        auth_request /who;"
    file = tmp_path / "trtx.conf"
    file.write_text(exported.replace("    location / {", location))
    with played(port, *both), played(door, decides), running_nginx(tmp_path / "nginx", file, listen):
        assert ask(listen, key=KEY)[0] == 401 and not [one for one in both if one.seen]
        decides.behaves = "answers"
        assert ask(listen, key=KEY)[0] == 200
        assert decides.seen == [("/check", f"Bearer {KEY}")] * 2
        assert ask(listen, "/who", key=KEY, method="GET")[0] == 404, "it is nobody else's"


@dataclass
class Asked:
    """One request to a real topology through the gateway, by its number."""

    number: int
    is_stream: bool
    status: int = 0
    text: bytes = b""
    problem: str = ""
    has_begun: threading.Event = field(default_factory=threading.Event)

    def send(self, port: int, model: str, trust: ssl.SSLContext, tokens: int) -> None:
        connection = http.client.HTTPSConnection("localhost", port, timeout=60, context=trust)
        body = {"model": model, "prompt": f"{self.number}", "max_tokens": tokens, "ignore_eos": True}
        try:
            headers = {"Content-Type": "application/json"}
            connection.request("POST", f"{PATH}?{self.number}", json.dumps(body | {"stream": self.is_stream}), headers)
            response = connection.getresponse()
            self.status, self.text = response.status, response.readline()
            self.has_begun.set()
            self.text += response.read()
        except (OSError, http.client.HTTPException) as error:
            self.problem = f"{type(error).__name__}: {error}"
        finally:
            connection.close()

    @property
    def is_whole(self) -> bool:
        end = b"data: [DONE]" if self.is_stream else b'"finish_reason":"length"'
        return not self.problem and self.status == 200 and end in self.text


def started(number: int, *, is_stream: bool, port: int, plan: Plan, tokens: int) -> tuple[Asked, threading.Thread]:
    assert plan.certificate is not None
    one = Asked(number, is_stream)
    thread = threading.Thread(target=one.send, args=(port, plan.model, pinned(plan.certificate), tokens))
    thread.start()
    return one, thread


@pytest.mark.proof  # two frontends and a topology; what nginx does is above
def test_a_frontend_that_is_killed_loses_its_own_streams_alone(tmp_path: Path) -> None:
    """Over TLS, on both sides of nginx. While it starts again, nobody sees that it is away."""
    pair, port = make(tmp_path, "own", ["localhost", "127.0.0.1"]), two_ports()
    files = ("--tls-cert", str(pair.certificate), "--tls-key", str(pair.key))
    paced = ("--engine", "paced", "--set", "paced_itl_ms=40", "--set", "paced_ttft_ms=20")
    with (
        trtx_serve(*paced, "--frontends", "2", "--port", str(port), *files) as serve,
        gateway(tmp_path, port, *files) as (nginx, listen),
    ):
        plan = serve.wait_ready()
        asked: list[tuple[Asked, threading.Thread]] = []
        for number in range(4):  # ten seconds: none may have ended by the time that all streams have begun
            asked.append(started(number, is_stream=False, port=listen, plan=plan, tokens=250))
        for number in range(4, 12):
            asked.append(started(number, is_stream=True, port=listen, plan=plan, tokens=100))
        for one, _ in asked[4:]:
            assert one.has_begun.wait(30)
        os.kill(serve.pid_of("frontend-1"), signal.SIGKILL)
        while "the topology is whole again" not in serve.text():
            again, thread = started(99, is_stream=False, port=listen, plan=plan, tokens=1)
            thread.join(60)
            assert again.is_whole, f"{again.status} {again.text!r} {again.problem}"
        for _, thread in asked:
            thread.join(60)
        until("all are in the log", lambda: len({uri for uri, *_ in nginx.tried}) == 13)
        tried: dict[str, Any] = {uri: addresses for uri, _, addresses, _ in nginx.tried}
        killed = {int(uri.partition("?")[2]) for uri, at in tried.items() if at == f"127.0.0.1:{port + 1}"} - {99}
        lost = {one.number for one, _ in asked if not one.is_whole}
        streams = set(range(4, 12))
        assert lost == killed & streams, (lost, tried)
        assert lost and lost != streams, "both frontends had some"
        moved = {uri for uri, at in tried.items() if at == f"127.0.0.1:{port + 1}, 127.0.0.1:{port}"}
        assert moved, "what had not begun was sent again"


@pytest.mark.proof
def test_a_run_is_measured_and_scored_through_it_and_the_key_is_written_nowhere(tmp_path: Path) -> None:
    authority = make(tmp_path, "authority")
    pair = make(tmp_path, "own", ["localhost"], signer=authority)
    keys, port = tmp_path / "keys.map", two_ports()
    keys.write_text(f'"Bearer {KEY}" {HOLDER};\n')
    options = ("--listen-cert", str(pair.certificate), "--listen-key", str(pair.key), "--api-keys", str(keys))
    with (
        trtx_serve("--model", "synthetic:tiny-trained", "--frontends", "2", "--port", str(port)) as serve,
        gateway(tmp_path, port, *options) as (nginx, listen),
    ):
        model = str(serve.wait_ready(120).model_path)
        variables = {"SSL_CERT_FILE": str(authority.certificate), "OPENAI_API_KEY": KEY}
        at = ("--url", f"https://localhost:{listen}", "--tokenizer", model, "-o", str(tmp_path / "runs"))
        load = (
            "--concurrency",
            "4",
            "--isl",
            "32",
            "--osl",
            "16",
            "--request-count",
            "24",
            "--prompt-corpus",
            "random",
        )
        default_trust.cache_clear()  # of a process that asks once
        measured = call("bench", *load, *at, variables=variables)
        assert measured.code == 0, measured.out + measured.err
        scored = call("eval", "--tasks", "trtx_copying", "--limit", "3", *at, variables=variables)
        assert scored.code == 0, scored.out + scored.err
        default_trust.cache_clear()
        asked = {addresses for uri, _, addresses, _ in nginx.tried if "completions" in uri and addresses != "-"}
        assert asked >= {f"127.0.0.1:{port}", f"127.0.0.1:{port + 1}"}, "each frontend had some"
    files = [path for path in (tmp_path / "runs").rglob("*") if path.is_file()]
    assert files and not [path for path in files if KEY.encode() in path.read_bytes()]
