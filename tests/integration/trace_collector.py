"""A collector of OpenTelemetry traces: OTLP over HTTP, in protobuf as Dynamo sends it and in JSON as workers do."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from loopback import Handler, serving


@dataclass(frozen=True)
class CollectedSpan:
    service: str
    trace_id: str
    span_id: str
    parent_id: str
    name: str
    start_ns: int
    end_ns: int
    events: tuple[str, ...] = ()

    @property
    def seconds(self) -> float:
        return (self.end_ns - self.start_ns) / 1e9


@dataclass
class TraceCollector:
    url: str
    spans: list[CollectedSpan] = field(default_factory=list)
    complaints: list[str] = field(default_factory=list)

    def trace(self, trace_id: str) -> list[CollectedSpan]:
        return [span for span in list(self.spans) if span.trace_id == trace_id]


@contextmanager
def collector() -> Iterator[TraceCollector]:
    """Serves while inside."""

    kept = TraceCollector("")

    class Traces(Handler):
        def do_POST(self) -> None:
            body = self.body()
            try:
                if self.path == "/v1/traces":
                    is_json = self.headers["Content-Type"] == "application/json"
                    kept.spans.extend(_of_json(json.loads(body)) if is_json else _of_protobuf(body))
            except Exception as error:
                kept.complaints.append(repr(error))
            self.answer(200)

    with serving(Traces) as kept.url:
        yield kept


def _of_json(document: dict[str, Any]) -> Iterator[CollectedSpan]:
    for resource in document["resourceSpans"]:
        named = {one["key"]: one["value"].get("stringValue") for one in resource["resource"]["attributes"]}
        for scope in resource["scopeSpans"]:
            for span in scope["spans"]:
                yield CollectedSpan(
                    named["service.name"], span["traceId"], span["spanId"], span["parentSpanId"], span["name"],
                    int(span["startTimeUnixNano"]), int(span["endTimeUnixNano"]),
                    tuple(event["name"] for event in span.get("events", ())),
                )  # fmt: skip


def _of_protobuf(body: bytes) -> Iterator[CollectedSpan]:
    """Reads the fields of opentelemetry/proto/trace/v1/trace.proto that a test asks for, by their numbers."""
    for resource in _all(body, 1):
        service = ""
        for attribute in _all(_first(resource, 1), 1):
            if _first(attribute, 1) == b"service.name":
                service = _first(_first(attribute, 2), 1).decode()
        for scope in _all(resource, 2):
            for span in _all(scope, 2):
                yield CollectedSpan(
                    service, _first(span, 1).hex(), _first(span, 2).hex(), _first(span, 4).hex(),
                    _first(span, 5).decode(), int.from_bytes(_first(span, 7), "little"),
                    int.from_bytes(_first(span, 8), "little"),
                )  # fmt: skip


def _first(message: bytes, number: int) -> bytes:
    return next(iter(_all(message, number)), b"")


def _all(message: bytes, number: int) -> list[bytes]:
    """The values of a field; a varint as its own bytes."""
    found, at = [], 0
    while at < len(message):
        key, at = _varint(message, at)
        kind = key & 7
        if kind == 2:
            size, at = _varint(message, at)
        elif kind == 0:
            size = _varint(message, at)[1] - at
        else:
            size = {1: 8, 5: 4}[kind]
        if key >> 3 == number:
            found.append(message[at : at + size])
        at += size
    return found


def _varint(message: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = message[at]
        value |= (byte & 0x7F) << shift
        at, shift = at + 1, shift + 7
        if byte < 0x80:
            return value, at
