"""A server of OpenAI's API that is of another make than ours: it may want a key, and tells of itself what it likes.

``dynamo``, ``VLLM`` and ``SGLANG`` are what such servers answer at their own routes, cut to what is read of it.
"""

from __future__ import annotations

import contextlib
import itertools
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any

from hostile_server import chunk, stream

MODEL = "tiny"
CHAT, MODELS = "/v1/chat/completions", "/v1/models"


def models(owner: str | None, *names: str) -> dict[str, Any]:
    return {"object": "list", "data": [{"id": name, "object": "model", "owned_by": owner} for name in names or [MODEL]]}


def dynamo(*devices: str, **workers: int) -> dict[str, Any]:
    """What Dynamo 1.4.2's frontend answers, with so many workers of each of its worker types."""
    types = {kind: {"workers": count, "needs": []} for kind, count in workers.items()}
    instances = [{"component": "backend", "endpoint": "generate", "device_type": device} for device in devices]
    return {
        MODELS: models("nvidia"),
        "/openapi.json": {"openapi": "3.1.0", "info": {"title": "NVIDIA Dynamo OpenAI Frontend", "version": "1.4.2"}},
        f"/v1/models/{MODEL}/ready": {"model": MODEL, "ready": True, "namespaces": {"ns": {"worker_types": types}}},
        "/health": {"status": "healthy", "instances": instances},
    }


VLLM = {MODELS: models("vllm"), "/version": {"version": "0.19.1"}, "/health": {}}
SGLANG = {MODELS: models("sglang"), "/get_server_info": {"version": "0.5.9", "tp_size": 4, "internal_states": [{}]}}


@dataclass
class OtherServer:
    """``seen``: of each request, its path and what stood in its Authorization header."""

    url: str = ""
    documents: Mapping[str, Any] = field(default_factory=lambda: VLLM)
    key: str | None = None
    shows_models: bool = False  # to those without a key too
    on_chat: Callable[[], None] = lambda: None
    sends_on: Mapping[str, tuple[int, str]] = field(default_factory=dict)  # by path: a redirect's status and Location
    sends_on_probes: bool = True  # a chat without messages too
    names: str | None = None  # in each answer, as its model; None: the one that was asked
    gives_back: int = 0  # which chat, from 1, gets an error with its key in it; 0: none
    seen: list[tuple[str, str | None]] = field(default_factory=list)

    def refuses(self, path: str, authorization: str | None) -> bool:
        self.seen.append((path, authorization))
        is_open = not path.startswith("/v1/") or (self.shows_models and path == MODELS)
        return self.key is not None and not is_open and authorization != f"Bearer {self.key}"


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    wbufsize = -1  # head and body in one write, or each answer waits 40 ms for the client's delayed acknowledgement
    server: _Server

    def do_GET(self) -> None:
        of = self.server.described
        if of.refuses(self.path, self.headers["Authorization"]):
            self._refuse()
        elif self.path in of.sends_on:
            self._send_on()
        elif self.path in of.documents:
            self._send(200, json.dumps(of.documents[self.path]).encode())
        else:
            self._send(404, b'{"detail": "Not Found"}')

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.server.described.refuses(self.path, self.headers["Authorization"]):
            self._refuse()
        elif self.path in (of := self.server.described).sends_on and ("messages" in asked or of.sends_on_probes):
            self._send_on()
        elif self.path != CHAT or "messages" not in asked:
            self._send(400, b'{"error": {"message": "messages: Field required", "type": "BadRequestError"}}')
        else:
            self.server.described.on_chat()
            if self.server.next_chat() == self.server.described.gives_back:
                self._refuse()
            else:
                names = self.server.described.names or asked["model"]
                self._send(200, _answer(asked, names), "text/event-stream; charset=utf-8")

    def log_message(self, *arguments: object) -> None: ...

    def _send_on(self) -> None:
        status, location = self.server.described.sends_on[self.path]
        self.send_response(status)
        self.send_header("Location", location)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def _refuse(self) -> None:
        """With the key that was offered, as some do."""
        offered = self.headers["Authorization"]
        self._send(401, json.dumps({"error": {"message": f"Incorrect API key provided: {offered}"}}).encode())

    def _send(self, status: int, body: bytes, kind: str = "application/json") -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


def _answer(asked: Mapping[str, Any], names: str) -> bytes:
    """As many tokens as asked, one an event, each event with fields of the server's own."""
    count = asked.get("max_completion_tokens") or asked["max_tokens"]
    told = {"model": names, "system_fingerprint": "fp_1", "usage": None}
    events = [{**chunk({"content": f"w{n} "}), **told} for n in range(count)]
    counted = {"prompt_tokens": 64, "completion_tokens": count, "total_tokens": 64 + count}
    end = {**chunk({}), "choices": [], **told, "usage": counted}
    return stream(
        [{**chunk({"role": "assistant", "content": ""}), **told}, *events, {**chunk({}, "length"), **told}, end]
    )


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    described: OtherServer

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self._chats = itertools.count(1)

    def next_chat(self) -> int:
        return next(self._chats)


@contextlib.contextmanager
def other_server(documents: Mapping[str, Any], **said: Any) -> Iterator[OtherServer]:
    """One that answers on loopback, as described."""
    server = _Server()
    server.described = OtherServer(f"http://127.0.0.1:{server.server_port}", documents, **said)
    thread = Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    try:
        yield server.described
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
