"""HTTP client of the server that is scored: requests, the criteria for an answer, and when to give up."""

from __future__ import annotations

import asyncio
import json
import time
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from typing import Any

import httpx

from trtx.bench.answers import words
from trtx.bench.redirects import sent_on
from trtx.evals.messages import REQUEST_TIMEOUT_S, Endpoint
from trtx.tls import trust_of

_ATTEMPTS = 3  # attempts of a request on a server error or a broken connection
_PAUSE_S = 0.5
_FAULTY_REQUEST = (httpx.codes.BAD_REQUEST, httpx.codes.UNPROCESSABLE_ENTITY)
_LIMITED_ATTEMPTS = 10  # attempts of a request that exceeds a rate limit (429)
_LONGEST_PAUSE_S = 60.0  # upper limit for Retry-After


class ServerGone(Exception):
    """The server no longer answers."""


@dataclass(frozen=True, slots=True)
class ServerRequest:
    """One HTTP request."""

    path: str  # below /v1/
    body: dict[str, Any]


@dataclass(frozen=True, slots=True)
class ServerRefusal:
    """The server's reason for refusing an answer."""

    reason: str
    is_of_request: bool = False  # the server says that the request is at fault (400 or 422)


@dataclass(frozen=True, slots=True)
class _Failure:
    """A failure of one attempt that may succeed if repeated."""

    reason: str
    pause_s: float = _PAUSE_S
    attempts: int = _ATTEMPTS


class Client:
    """A connection pool for one server. An async context manager."""

    def __init__(self, endpoint: Endpoint, concurrency: int, *, request_timeout_s: float = REQUEST_TIMEOUT_S) -> None:
        headers = {} if endpoint.api_key is None else {"Authorization": f"Bearer {endpoint.api_key}"}
        self._endpoint = endpoint
        self._request_timeout_s = request_timeout_s
        self._http = httpx.AsyncClient(
            base_url=f"{endpoint.url}/v1/",
            headers=headers,
            timeout=request_timeout_s,
            limits=httpx.Limits(max_connections=concurrency, max_keepalive_connections=concurrency),
            verify=trust_of(endpoint.url, endpoint.certificate),
            trust_env=False,
        )

    async def __aenter__(self) -> Client:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._http.aclose()

    def _without_key(self, text: str) -> str:
        """Redacts the API key, because some servers echo it."""
        key = self._endpoint.api_key
        return text if key is None else text.replace(key, "[redacted]")

    async def context_length(self) -> int | None:
        """The context length that the server reports; Dynamo and vLLM use different names for it."""
        own = await self._own_entry() or {}
        found = own.get("context_window") or own.get("max_model_len")
        return found if isinstance(found, int) else None

    async def ask(self, question: ServerRequest) -> dict[str, Any] | ServerRefusal:
        """The JSON answer, or the server's refusal. Raises ServerGone.

        Server errors and broken connections are retried. A persistent error counts as a refusal if the server still
        lists the model. If it doesn't, one of its workers may be restarting, so retries continue.
        """
        lost_since, failures = None, 0
        while True:
            found = await self._attempt(question)
            if not isinstance(found, _Failure):
                return found
            failures += 1
            if failures >= found.attempts:
                if await self._own_entry() is not None:
                    return ServerRefusal(found.reason)
                lost_since, failures = self._since(lost_since, found.reason), 0
            await asyncio.sleep(found.pause_s)

    async def _attempt(self, question: ServerRequest) -> dict[str, Any] | ServerRefusal | _Failure:
        try:
            answer = await self._http.post(question.path, json={"model": self._endpoint.model, **question.body})
        except httpx.ConnectTimeout:
            return _Failure(f"no connection within {self._request_timeout_s:g} s, which the request timeout allows")
        except httpx.PoolTimeout:
            return _Failure(f"no connection was free within {self._request_timeout_s:g} s")
        except httpx.TimeoutException:
            return _Failure(f"no answer within {self._request_timeout_s:g} s")
        except httpx.RequestError as error:
            return _Failure(" ".join(str(error).split()) or type(error).__name__)
        if answer.is_success:
            return self._parsed(answer)
        if where := sent_on(answer.status_code, answer.headers.get("Location"), str(answer.request.url)):
            return ServerRefusal(f"HTTP {answer.status_code}: {where}")
        text = words(self._without_key(answer.text)) or "no reason given"
        reason = f"HTTP {answer.status_code}: {text}"
        if answer.status_code == httpx.codes.TOO_MANY_REQUESTS:
            return _Failure(reason, retry_after(answer), _LIMITED_ATTEMPTS)
        if answer.status_code < 500 and answer.status_code != httpx.codes.NOT_FOUND:
            return ServerRefusal(reason, is_of_request=answer.status_code in _FAULTY_REQUEST)
        return _Failure(reason)

    def _parsed(self, answer: httpx.Response) -> dict[str, Any] | ServerRefusal | _Failure:
        """Parses an answer. Some servers send errors with a success status, as Dynamo does when a worker dies."""
        try:
            document = answer.json()
            if b"\\ud" in answer.content.lower():  # a lone surrogate, which can't be written as UTF-8
                json.dumps(document, ensure_ascii=False).encode()
        except UnicodeEncodeError:
            return ServerRefusal(f"HTTP {answer.status_code} whose body has half of a character (a lone surrogate)")
        except (ValueError, RecursionError):
            return ServerRefusal(f"HTTP {answer.status_code} whose body is not JSON that can be read")
        if isinstance(document, dict) and isinstance(document.get("choices"), list) and not document.get("error"):
            return document
        text = words(self._without_key(answer.text))
        if isinstance(document, dict) and (document.get("error") or document.get("object") == "error"):  # older vLLM
            return _Failure(f"error in the answer: {text}")
        return ServerRefusal(f"no completion in the answer: {text}")

    def _since(self, lost_since: float | None, reason: str) -> float:
        """The time since which the server has been unreachable. Raises ServerGone after the permitted time."""
        now = time.monotonic()
        if lost_since is not None and now - lost_since > self._endpoint.patience_s:
            raise ServerGone(f"{self._endpoint.url} does not answer any more ({reason})")
        return lost_since or now

    async def _own_entry(self) -> dict[str, Any] | None:
        """The model's entry in the server's list; None if there is none."""
        try:
            entries = (await self._http.get("models")).raise_for_status().json()["data"]
            found: dict[str, Any] = next(entry for entry in entries if entry["id"] == self._endpoint.model)
        except (httpx.HTTPError, ValueError, KeyError, TypeError, StopIteration):
            return None
        return found


def retry_after(answer: httpx.Response) -> float:
    """The server's requested delay in seconds, at most a minute; accepts both forms of RFC 9110, 10.2.3."""
    header = answer.headers.get("Retry-After", "")
    try:
        wanted = float(header) if header.isdigit() else parsedate_to_datetime(header).timestamp() - time.time()
    except ValueError:
        return _PAUSE_S
    return min(max(wanted, 0.0), _LONGEST_PAUSE_S)
