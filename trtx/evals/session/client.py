"""HTTP to the server that is scored: what is sent, what counts as an answer, and when the server is given up."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from typing import Any

import httpx

from trtx.evals.messages import Endpoint

_TIMEOUT_S = 600.0  # of one request: a long answer in a full batch
_ATTEMPTS = 3  # at a request that the server answers with its own failure
_PAUSE_S = 0.5


class ServerGone(Exception):
    """Nothing answers at the URL any more."""


@dataclass(frozen=True, slots=True)
class Question:
    """One HTTP request."""

    path: str  # below /v1/
    body: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Refused:
    """What the server said in place of an answer."""

    reason: str


class Client:
    """A connection pool to one server. An async context manager."""

    def __init__(self, endpoint: Endpoint, concurrency: int) -> None:
        headers = {} if endpoint.api_key is None else {"Authorization": f"Bearer {endpoint.api_key}"}
        self._endpoint = endpoint
        self._http = httpx.AsyncClient(
            base_url=f"{endpoint.url}/v1/",
            headers=headers,
            timeout=_TIMEOUT_S,
            limits=httpx.Limits(max_connections=concurrency, max_keepalive_connections=concurrency),
        )

    async def __aenter__(self) -> Client:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._http.aclose()

    def _without_key(self, text: str) -> str:
        """Some servers write back the key that they were sent."""
        key = self._endpoint.api_key
        return text if key is None else text.replace(key, "[redacted]")

    async def context_length(self) -> int | None:
        """What the server says that its model's context holds: Dynamo and vLLM do, each in its own word."""
        try:
            entries = (await self._http.get("models")).raise_for_status().json()["data"]
            own = next(entry for entry in entries if entry["id"] == self._endpoint.model)
        except (httpx.HTTPError, ValueError, KeyError, TypeError, StopIteration):
            return None
        found = own.get("context_window") or own.get("max_model_len")
        return found if isinstance(found, int) else None

    async def ask(self, question: Question) -> dict[str, Any] | Refused:
        """The answer's JSON, or what was said in its place. Raises ServerGone."""
        body = {"model": self._endpoint.model, **question.body}
        began, failures = time.monotonic(), 0
        while True:
            try:
                answer = await self._http.post(question.path, json=body)
            except httpx.TransportError as error:
                if time.monotonic() - began > self._endpoint.patience_s:
                    reason = " ".join(str(error).split()) or type(error).__name__
                    raise ServerGone(f"{self._endpoint.url} does not answer any more ({reason})") from error
                await asyncio.sleep(_PAUSE_S)
                continue
            if answer.is_success:
                return _parsed(answer)
            failures += 1
            if answer.status_code < 500 or failures == _ATTEMPTS:
                return Refused(f"HTTP {answer.status_code}: {self._without_key(_message(answer))}")
            await asyncio.sleep(_PAUSE_S * failures)


def _parsed(answer: httpx.Response) -> dict[str, Any] | Refused:
    try:
        document = answer.json()
    except ValueError:
        return Refused(f"HTTP {answer.status_code} whose body is not JSON")
    return document if isinstance(document, dict) else Refused("the answer is JSON, but no object")


def _message(answer: httpx.Response) -> str:
    """The server's own sentence, wherever it keeps it."""
    try:
        found = answer.json()
    except ValueError:
        found = answer.text
    while isinstance(found, dict):
        found = next((found[name] for name in ("error", "message", "detail") if name in found), str(found))
    return " ".join(str(found).split())[:300] or "no reason given"
