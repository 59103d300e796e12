"""Sends spans to an OpenTelemetry collector (OTLP over HTTP, in JSON), in its own thread."""

from __future__ import annotations

import contextlib
import json
import logging
import threading
from collections import deque
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from trtx.worker.requests.spans import Span, spans_of
from trtx.worker.requests.stage_clock import EndedRequest

if TYPE_CHECKING:
    import httpx

logger = logging.getLogger(__name__)

ENABLED, ENDPOINT, SERVICE = "OTEL_EXPORT_ENABLED", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_SERVICE_NAME"
"""OpenTelemetry's variables, which Dynamo's own spans follow too (``trtx.topology.commands``)."""
MOST_WAITING = 2_000  # requests
_BATCH = 200  # requests
_EVERY_SECONDS = 0.5
_TIMEOUT_SECONDS = 5.0
_AGAIN_SECONDS = 5.0  # after a failure


class SpanExport:
    """Takes ended requests from the event loop. If the collector does not keep up, the oldest waiting ones are lost."""

    def __init__(self, endpoint: str, service: str) -> None:
        """``endpoint``: the URL that takes spans, such as ``http://127.0.0.1:4318/v1/traces``."""
        self._endpoint, self._service = endpoint, service
        self._waiting: deque[tuple[EndedRequest, Mapping[str, str]]] = deque(maxlen=MOST_WAITING)
        self._news, self._closed = threading.Event(), threading.Event()
        self._is_lost = False
        self._thread = threading.Thread(target=self._run, name="spans", daemon=True)
        self._thread.start()

    def put(self, row: EndedRequest, trace_headers: Mapping[str, str] | None) -> None:
        """Adds a request. Never blocks."""
        if trace_headers:
            self._waiting.append((row, trace_headers))
            self._news.set()

    def close(self) -> None:
        """Sends the waiting spans, unless the collector is gone, and ends the thread."""
        self._closed.set()
        self._news.set()
        self._thread.join(_TIMEOUT_SECONDS)

    def _run(self) -> None:
        import httpx  # half of a worker's import time, which only a traced one needs

        with httpx.Client(timeout=_TIMEOUT_SECONDS, trust_env=False) as client:
            is_last = False
            while not is_last:
                self._news.wait()
                is_last = self._closed.wait(_EVERY_SECONDS)
                self._news.clear()
                while spans := self._next():
                    if not self._send(client, spans):
                        self._closed.wait(_AGAIN_SECONDS)
                        break

    def _next(self) -> list[Span]:
        spans: list[Span] = []
        with contextlib.suppress(IndexError):
            for _ in range(_BATCH):
                spans += spans_of(*self._waiting.popleft())
        return spans

    def _send(self, client: httpx.Client, spans: list[Span]) -> bool:
        """Returns whether the collector took the spans. Logs when it begins to fail."""
        from httpx import HTTPError

        try:
            client.post(
                self._endpoint, content=_document(self._service, spans), headers={"Content-Type": "application/json"}
            ).raise_for_status()
        except HTTPError as error:
            if not self._is_lost:
                logger.warning("%s takes no spans (%s); they are lost until it does", self._endpoint, error)
            self._is_lost = True
            return False
        self._is_lost = False
        return True


def _document(service: str, spans: list[Span]) -> bytes:
    named: dict[str, Any] = {"key": "service.name", "value": {"stringValue": service}}
    scope = {"scope": {"name": "trtx.worker"}, "spans": spans}
    return json.dumps({"resourceSpans": [{"resource": {"attributes": [named]}, "scopeSpans": [scope]}]}).encode()
