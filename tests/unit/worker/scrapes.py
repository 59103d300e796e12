"""Scrapes a worker's metrics, as a request to its metrics port does."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from trtx.worker.metrics import WorkerMetrics


def text_of(metrics: WorkerMetrics) -> str:
    registry = CollectorRegistry()
    registry.register(metrics)
    return generate_latest(registry).decode()


def samples_of(metrics: WorkerMetrics) -> Iterator[Sample]:
    for family in text_string_to_metric_families(text_of(metrics)):
        yield from family.samples
