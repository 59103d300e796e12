"""A server of OpenAI's API that is of another make than ours: it may want a key, and tells of itself what it likes.

``dynamo``, ``VLLM`` and ``SGLANG`` are what such servers answer at their own routes, cut to what is read of it.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from hostile_server import chunk, stream
from loopback import Handler, serving

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
    chats: Iterator[int] = field(default_factory=lambda: itertools.count(1))  # their numbers

    def refuses(self, path: str, authorization: str | None) -> bool:
        self.seen.append((path, authorization))
        is_open = not path.startswith("/v1/") or (self.shows_models and path == MODELS)
        return self.key is not None and not is_open and authorization != f"Bearer {self.key}"


class _Handler(Handler):
    protocol_version = "HTTP/1.1"
    wbufsize = -1  # head and body in one write, or each answer waits 40 ms for the client's delayed acknowledgement
    of: OtherServer

    def do_GET(self) -> None:
        of = self.of
        if of.refuses(self.path, self.headers["Authorization"]):
            self._refuse()
        elif self.path in of.sends_on:
            self._send_on()
        elif self.path in of.documents:
            self.answer(200, of.documents[self.path])
        else:
            self.answer(404, {"detail": "Not Found"})

    def do_POST(self) -> None:
        asked = self.asked()
        if self.of.refuses(self.path, self.headers["Authorization"]):
            self._refuse()
        elif self.path in (of := self.of).sends_on and ("messages" in asked or of.sends_on_probes):
            self._send_on()
        elif self.path != CHAT or "messages" not in asked:
            self.answer(400, {"error": {"message": "messages: Field required", "type": "BadRequestError"}})
        else:
            self.of.on_chat()
            if next(self.of.chats) == self.of.gives_back:
                self._refuse()
            else:
                names = self.of.names or asked["model"]
                self.answer(200, _events(asked, names), {"Content-Type": "text/event-stream; charset=utf-8"})

    def _send_on(self) -> None:
        status, location = self.of.sends_on[self.path]
        self.answer(status, headers={"Location": location})

    def _refuse(self) -> None:
        """With the key that was offered, as some do."""
        offered = self.headers["Authorization"]
        self.answer(401, {"error": {"message": f"Incorrect API key provided: {offered}"}})


def _events(asked: Mapping[str, Any], names: str) -> bytes:
    """As many tokens as asked, one an event, each event with fields of the server's own."""
    count = asked.get("max_completion_tokens") or asked["max_tokens"]
    told = {"model": names, "system_fingerprint": "fp_1", "usage": None}
    events = [{**chunk({"content": f"w{n} "}), **told} for n in range(count)]
    counted = {"prompt_tokens": 64, "completion_tokens": count, "total_tokens": 64 + count}
    end = {**chunk({}), "choices": [], **told, "usage": counted}
    return stream(
        [{**chunk({"role": "assistant", "content": ""}), **told}, *events, {**chunk({}, "length"), **told}, end]
    )


@contextlib.contextmanager
def other_server(documents: Mapping[str, Any], **said: Any) -> Iterator[OtherServer]:
    """One that answers on loopback, as described."""
    of = OtherServer(documents=documents, **said)
    with serving(handler_of(of)) as of.url:
        yield of


def handler_of(of: OtherServer) -> type[Handler]:
    return type("Handler", (_Handler,), {"of": of})
