"""What an answer of a server may be, over HTTP."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from loopback import Handler, serving

from trtx.evals.messages import Endpoint
from trtx.evals.session.client import Client, ServerRefusal, ServerRequest


def answer_to(body: bytes, status: int = 200, location: str | None = None) -> dict[str, Any] | ServerRefusal:
    """What a question becomes that a server answers with ``body``."""

    class Fixed(Handler):
        def do_POST(self) -> None:
            self.body()
            self.answer(status, body, {} if location is None else {"Location": location})

    async def ask(url: str) -> dict[str, Any] | ServerRefusal:
        async with Client(Endpoint("agg", url, "model", "", 0.0), 1) as client:
            return await client.ask(ServerRequest("completions", {"prompt": "x"}))

    with serving(Fixed) as url:
        return asyncio.run(ask(url))


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (b"<html>", "not JSON that can be read"),
        (b"[" * 100_000, "not JSON that can be read"),
        (rb'{"choices": [{"text": "\ud800", "finish_reason": "stop"}]}', "half of a character"),
        (rb'{"choices": [{"text": "\uDC00x", "finish_reason": "stop"}]}', "half of a character"),
    ],
)
def test_an_answer_that_no_file_can_hold_is_one_samples_refusal(body: bytes, said: str) -> None:
    found = answer_to(body)
    assert isinstance(found, ServerRefusal) and said in found.reason


def test_both_halves_of_a_character_are_one() -> None:
    body = rb'{"choices": [{"text": "\ud83d\ude00", "finish_reason": "stop"}]}'
    found = answer_to(body)
    assert isinstance(found, dict) and found["choices"][0]["text"] == "\N{GRINNING FACE}"


def test_a_redirect_is_no_answer_and_not_followed() -> None:
    """To a port at which nobody listens: one that followed it would tell so."""
    found = answer_to(b"", 307, "http://127.0.0.1:9/v1/completions?token=secret")
    assert found == ServerRefusal(
        "HTTP 307: it redirects to http://127.0.0.1:9/v1/completions, and trtx follows no redirect"
    )


def test_a_server_is_asked_past_a_proxy_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")  # at which nobody listens
    monkeypatch.delenv("no_proxy", raising=False)
    monkeypatch.delenv("NO_PROXY", raising=False)
    found = answer_to(b'{"choices": [{"text": "x", "finish_reason": "stop"}]}')
    assert isinstance(found, dict)
