"""Readiness of a topology: the frontend counts every expected worker, and a real request succeeds.

``handoffs`` checks whether KV moves between prefill and decode workers. Dynamo 1.6.1's ``/health`` and ``/v1/models``
are not used: the first returns 200 from the start, and the second proves nothing.
"""

from __future__ import annotations

import http.client
import json
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlsplit

from trtx.tls import trust_of

# Dynamo's name of each role in /v1/models/<name>/ready.
_WORKER_TYPES = {"agg": "aggregated", "prefill": "prefill", "decode": "decode", "encode": "encode"}
_LAUNCHER_HEADER = "x-trtx-launcher"  # as in trtx/frontend/admission.py
_UNROUTED_S, _RETRY_S = 10.0, 0.2  # how long, and how often, a first request is repeated


@dataclass(frozen=True, slots=True)
class Readiness:
    """The frontend's answer.

    ``summary`` is like ``1 of 2 prefill, 1 of 1 decode``, or the reason for not being ready.
    """

    is_ready: bool
    summary: str
    serves: bool = False  # there is at least one worker of every role
    has_answered: bool = True


def parse_readiness(document: Mapping[str, Any], namespace: str, expected: Mapping[str, int]) -> Readiness:
    """Parses the body of ``GET /v1/models/<name>/ready``. ``expected``: number of workers per role."""
    found = document.get("namespaces", {}).get(namespace, {}).get("worker_types", {})
    counts = {role: int(found.get(_WORKER_TYPES[role], {}).get("workers", 0)) for role in expected}
    summary = ", ".join(f"{counts[role]} of {count} {role}" for role, count in expected.items())
    serves = document.get("ready") is True
    if all(counts[role] >= count for role, count in expected.items()):
        if serves:
            return Readiness(True, summary, serves)
        summary += f": {document.get('reason', 'the frontend does not say why')}"
    return Readiness(False, summary, serves)


def ask_readiness(
    url: str, model: str, namespace: str, expected: Mapping[str, int], *, certificate: Path | None = None
) -> Readiness:
    """Sends one readiness request to the frontend. Any error means not ready yet.

    ``certificate``: as for :func:`request`, here and below.
    """
    try:
        path = f"/v1/models/{quote(model, safe='')}/ready"
        code, body = request(url, "GET", path, timeout_s=2.0, certificate=certificate)
        if code == 404:
            return Readiness(False, "it knows no worker")
        document = json.loads(body)
        return parse_readiness(document, namespace, expected)
    except (OSError, http.client.HTTPException, ValueError, AttributeError, TypeError) as error:
        return Readiness(False, f"the frontend does not answer ({error})", has_answered=False)


def is_live(url: str, *, certificate: Path | None = None) -> bool:
    """Whether the frontend answers at all. Dynamo 1.6.1's /live always returns 200 and logs nothing."""
    try:
        request(url, "GET", "/live", timeout_s=2.0, certificate=certificate)
    except (OSError, http.client.HTTPException):
        return False
    return True


def own_headers(namespace: str) -> dict[str, str]:
    """The header with which the launcher's own requests pass the bounds of a frontend (``trtx.frontend.admission``).

    A topology under load could not prove that a restarted worker serves otherwise.
    """
    return {_LAUNCHER_HEADER: namespace}


def complete(
    url: str,
    model: str,
    prompt: str,
    max_tokens: int,
    *,
    timeout_s: float,
    certificate: Path | None = None,
    headers: Mapping[str, str] | None = None,
) -> str | None:
    """Sends one real request through frontend and workers. Returns None if it produced tokens, else the error."""
    body = {"model": model, "prompt": prompt, "max_tokens": max_tokens, "temperature": 0.0}
    try:
        code, answer = request(
            url, "POST", "/v1/completions", body, headers=headers, timeout_s=timeout_s, certificate=certificate
        )
        if code != 200:
            return f"HTTP {code}: {answer.decode(errors='replace')[:300] or 'empty body'}"
        document = json.loads(answer)
        if document["choices"][0]["finish_reason"] is None:
            return "the answer ended without a finish_reason"
        return None
    except (OSError, http.client.HTTPException, ValueError, LookupError, TypeError) as error:
        return f"{type(error).__name__}: {error}"


def once_routed(ask: Callable[[], str | None]) -> str | None:
    """Repeats ``ask``, a call of :func:`complete`, for a few seconds while it gets a 503.

    Dynamo 1.6.1's frontend counts a worker as ready a moment before its router knows the worker.
    """
    until = time.monotonic() + _UNROUTED_S
    while True:
        problem = ask()
        if problem is None or not problem.startswith("HTTP 503") or time.monotonic() >= until:
            return problem
        time.sleep(_RETRY_S)


def request(
    url: str,
    method: str,
    path: str,
    body: Mapping[str, Any] | None = None,
    *,
    headers: Mapping[str, str] | None = None,
    timeout_s: float,
    certificate: Path | None = None,
) -> tuple[int, bytes]:
    """Sends one HTTP request, never through a proxy. Returns status code and body; raises OSError or HTTPException.

    ``certificate``: the certificate of a TLS frontend, which is accepted under any address that it has here.
    """
    address = urlsplit(url)
    host, port = address.hostname or "", address.port
    if address.scheme == "https":
        trust = trust_of(url, certificate)
        connection: http.client.HTTPConnection = http.client.HTTPSConnection(
            host, port, timeout=timeout_s, context=trust
        )
    else:
        connection = http.client.HTTPConnection(host, port, timeout=timeout_s)
    try:
        payload = None if body is None else json.dumps(body)
        kind = {"Content-Type": "application/json"} if payload else {}
        connection.request(method, path, payload, {**kind, **(headers or {})})
        response = connection.getresponse()
        return response.status, response.read()
    finally:
        connection.close()
