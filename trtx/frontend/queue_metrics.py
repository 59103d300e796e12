"""The metrics of a frontend with bounds, as Prometheus text. Each family has one record here."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.registry import Collector

from trtx.engine.served_family import ServedFamily, recorded
from trtx.frontend.admission import AdmissionQueue

QUEUE_PATH = "/trtx/queue"
QUEUE_FAMILIES: dict[str, ServedFamily] = {}
"""Every family at :data:`QUEUE_PATH`, by name."""
_QUEUED = "with --max-queued-requests or --max-queue-s"
_family = partial(recorded, QUEUE_FAMILIES, by=("frontend",))

WAITING = _family(
    "gauge", "trtx_frontend_waiting_requests", "requests", "Requests that wait in the frontend for a worker."
)
RUNNING = _family(
    "gauge",
    "trtx_frontend_running_requests",
    "requests",
    "Requests that went on to the workers and have not ended; 0 without a bound of the queue.",
)
SLOTS = _family(
    "gauge",
    "trtx_frontend_request_slots",
    "requests",
    "Requests that go on at once: this frontend's share of what the agg or decode workers compute at once.",
    when=f"{_QUEUED}, once the workers are known",
)
REFUSED = _family(
    "counter",
    "trtx_frontend_refused_requests_total",
    "requests",
    "Requests that were refused with Retry-After, by reason: queue full or queue time.",
    "reason",
)
TIMED_OUT = _family(
    "counter", "trtx_frontend_timed_out_requests_total", "requests", "Requests that were ended by --max-request-s."
)


class _Queue(Collector):
    def __init__(self, admission: AdmissionQueue) -> None:
        self._admission = admission

    def collect(self) -> Iterator[Any]:
        admission, counts = self._admission, self._admission.counts
        yield WAITING.of(admission.waiting_requests)
        yield RUNNING.of(admission.running_requests)
        if admission.slots is not None:
            yield SLOTS.of(admission.slots)
        yield REFUSED.family([(("queue full",), counts.refused_full), (("queue time",), counts.refused_late)])
        yield TIMED_OUT.of(counts.ended_late)


def queue_text(admission: AdmissionQueue) -> bytes:
    registry = CollectorRegistry()
    registry.register(_Queue(admission))
    return generate_latest(registry)
