"""The record of a metric family that a process of a topology serves."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily

Server = Literal["frontend", "agg", "prefill", "decode", "encode"]
Kind = Literal["counter", "gauge", "histogram"]
Unit = Literal[
    "requests", "tokens", "seconds", "bytes", "blocks", "images", "steps", "events", "grammars", "forwards", "leases",
    "embeddings", "handoffs", "share", "hertz", "watts", "joules", "celsius", "errors", "descriptors", "boolean",
    "batches", "calls", "ratio", "GB/s",
]  # fmt: skip

TEXT_ROLES: tuple[Server, ...] = ("agg", "prefill", "decode")
ROLES: tuple[Server, ...] = (*TEXT_ROLES, "encode")
RANK = "dp_rank"
"""Label of the families of an engine with attention DP; the families of other engines don't have it."""


@dataclass(frozen=True, slots=True)
class ServedFamily:
    """A metric family: one name at ``/metrics``, and what its samples mean.

    ``when``: the condition under which a process of ``by`` serves it; empty: always.
    """

    name: str  # of the family's samples; a histogram's end in _bucket, _sum and _count after it
    kind: Kind
    unit: Unit
    meaning: str
    labels: tuple[str, ...] = ()
    by: tuple[Server, ...] = ROLES
    when: str = ""

    @property
    def sample_names(self) -> tuple[str, ...]:
        if self.kind == "histogram":
            return tuple(f"{self.name}_{end}" for end in ("bucket", "sum", "count"))
        return (self.name,)

    def of(self, value: float) -> Any:
        """The family with a single sample without labels, for a collector."""
        return self.family([((), value)])

    def family(self, samples: Sequence[tuple[tuple[str, ...], float]]) -> Any:
        """The family with ``samples``, each as (values of ``labels``, value), for a collector.

        One value more than labels: the last is the attention-DP rank.
        """
        kind = CounterMetricFamily if self.kind == "counter" else GaugeMetricFamily
        has_rank = bool(samples) and len(samples[0][0]) > len(self.labels)
        made = kind(self.name, self.meaning, labels=[*self.labels, RANK] if has_rank else self.labels)
        for labels, value in samples:
            made.add_metric(labels, value)
        return made

    def distribution(self, cumulative: list[tuple[str, int]], total: float, labels: tuple[str, ...] = ()) -> Any:
        """The histogram with (upper bound, cumulative count) of each bucket, the sum of its values, and its labels."""
        made = HistogramMetricFamily(self.name, self.meaning, labels=self.labels)
        made.add_metric(labels, cumulative, total)
        return made


def recorded(
    families: dict[str, ServedFamily],
    kind: Kind,
    name: str,
    unit: Unit,
    meaning: str,
    *labels: str,
    by: tuple[Server, ...] = ROLES,
    when: str = "",
) -> ServedFamily:
    """Adds a record to ``families``, and returns it."""
    assert name not in families and name.endswith("_total") == (kind == "counter"), name
    families[name] = ServedFamily(name, kind, unit, meaning, labels, by, when)
    return families[name]
