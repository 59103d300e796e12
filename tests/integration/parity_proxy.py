"""A server of another make in front of one of ours: it takes less, says less of itself, and may answer wrongly.

Dynamo's own fields and log-probabilities of prompts are refused, as by a server that never heard of them; its model is
listed as somebody else's.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from loopback import Handler, serving

REFUSED = ("nvext", "prompt_logprobs")


@dataclass
class Proxy:
    """``shifts``: added to every log-probability that goes by; ``names``: models that answers say they are of, in turn;
    ``refuses``: fields of a request; ``lasts``: completions after which it falls silent; ``answers``: returns the body
    of the proxy's own answer to a request, or None for the one of the server behind."""

    behind: str
    url: str = ""
    shifts: float = 0.0
    names: tuple[str, ...] = ()
    refuses: tuple[str, ...] = REFUSED
    lasts: int | None = None
    answers: Callable[[dict[str, Any]], bytes | None] = lambda body: None
    asked: list[dict[str, Any]] = field(default_factory=list)
    _turn: Iterator[str] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self._turn = itertools.cycle(self.names)

    def next_name(self) -> str | None:
        """Each answer takes the next of ``names``, also when several are underway at once."""
        return next(self._turn, None)

    @property
    def is_gone(self) -> bool:
        return self.lasts is not None and len(self.asked) > self.lasts


class _Handler(Handler):
    protocol_version = "HTTP/1.1"
    wbufsize = -1
    of: Proxy

    def do_GET(self) -> None:
        if self.of.is_gone:
            self.close_connection = True
        elif self.path == "/v1/models":
            listed = json.loads(urllib.request.urlopen(f"{self.of.behind}/v1/models").read())
            entries = [{"id": one["id"], "object": "model", "owned_by": "else"} for one in listed["data"]]
            self.answer(200, {"object": "list", "data": entries})
        else:
            self.answer(404, {})

    def do_POST(self) -> None:
        body = self.asked()
        of = self.of
        if found := [name for name in of.refuses if name in body]:
            self.answer(400, {"error": {"message": f"{found[0]}: Extra inputs are not permitted"}})
            return
        if "prompt" in body:
            of.asked.append(body)
        if of.is_gone:
            self.close_connection = True
            return
        if (own := of.answers(body)) is not None:
            self._pass(200, own)
            return
        request = urllib.request.Request(
            f"{of.behind}{self.path}", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        try:
            answer = urllib.request.urlopen(request, timeout=60).read()
        except urllib.error.HTTPError as error:
            self._pass(error.code, error.read())
            return
        name = of.next_name()
        self._pass(200, b"".join(self._changed(line, name) for line in answer.splitlines(keepends=True)))

    def _pass(self, status: int, body: bytes) -> None:
        kind = "text/event-stream" if body.startswith(b"data") else "application/json"
        with contextlib.suppress(OSError):  # the client left
            self.answer(status, body, {"Content-Type": kind})

    def _changed(self, line: bytes, name: str | None) -> bytes:
        shifts = self.of.shifts
        prefix = b"data: " if line.startswith(b"data: ") else b""
        if (not shifts and name is None) or not line.startswith(prefix + b"{"):
            return line
        event = json.loads(line.removeprefix(prefix))
        event["model"] = name or event["model"]
        for choice in event.get("choices", ()):
            told = choice.get("logprobs") or {}
            told["token_logprobs"] = [value + shifts for value in told.get("token_logprobs", ())]
        return prefix + json.dumps(event).encode() + b"\n"


@contextlib.contextmanager
def proxy(behind: str, **said: Any) -> Iterator[Proxy]:
    of = Proxy(behind, **said)
    with serving(_Handler, of=of) as of.url:
        yield of
