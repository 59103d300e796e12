"""Truly ready: the frontend counts every expected worker, and one real request went through the whole route. Whether
KV moves between the workers of a split topology is asked in ``handoffs``.

Dynamo 1.4.2's ``/health`` is 200 from the first moment and ``/v1/models`` proves nothing: neither is asked.
"""

from __future__ import annotations

import http.client
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlsplit

from trtx.tls import trust_of

# What Dynamo calls each role in /v1/models/<name>/ready.
_WORKER_TYPES = {"agg": "aggregated", "prefill": "prefill", "decode": "decode", "encode": "encode"}


@dataclass(frozen=True, slots=True)
class Readiness:
    """``summary`` reads ``1 of 2 prefill, 1 of 1 decode``, or why the frontend says no."""

    is_ready: bool
    summary: str
    serves: bool = False  # there is a worker of every role, if not every worker
    has_answered: bool = True


def parse_readiness(document: Mapping[str, Any], namespace: str, expected: Mapping[str, int]) -> Readiness:
    """Reads the body of ``GET /v1/models/<name>/ready``. ``expected``: workers of each role."""
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
    """One question to the frontend. Anything but its answer means not ready yet. ``certificate``: as :func:`request`,
    here and below."""
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
    """Whether the frontend answers at all. Seen with Dynamo 1.4.2: 200 whatever it serves, and no line in its log."""
    try:
        request(url, "GET", "/live", timeout_s=2.0, certificate=certificate)
    except (OSError, http.client.HTTPException):
        return False
    return True


def complete(
    url: str, model: str, prompt: str, max_tokens: int, *, timeout_s: float, certificate: Path | None = None
) -> str | None:
    """One real request through frontend and workers. None when it made tokens, else what went wrong."""
    body = {"model": model, "prompt": prompt, "max_tokens": max_tokens, "temperature": 0.0}
    try:
        code, answer = request(url, "POST", "/v1/completions", body, timeout_s=timeout_s, certificate=certificate)
        if code != 200:
            return f"HTTP {code}: {answer.decode(errors='replace')[:300] or 'empty body'}"
        document = json.loads(answer)
        if document["choices"][0]["finish_reason"] is None:
            return "the answer ended without a finish_reason"
        return None
    except (OSError, http.client.HTTPException, ValueError, LookupError, TypeError) as error:
        return f"{type(error).__name__}: {error}"


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
    """One HTTP request, never through a proxy. ``certificate``: of a frontend that speaks TLS, which is asked under
    whatever address it has here. Status code and body; raises OSError or HTTPException."""
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
