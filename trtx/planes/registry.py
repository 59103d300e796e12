"""Which workers of a topology are registered, and how a dead one leaves the routing: one form for all discovery.

Layout in Dynamo 1.4.2, under files, etcd and Kubernetes alike: an instance record for each endpoint of a worker and a
model card for the worker, all under its instance id.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

_SERVING_ENDPOINT = "generate"


class RegistryUnknown(OSError):
    """What is registered can't be known now. Not known is not gone: whoever asks again may learn it."""


@dataclass(frozen=True, slots=True)
class Instance:
    """A worker that takes requests: its id, and the address of its ``generate`` endpoint.

    A worker has other endpoints too, registered under the same id, some of them long before this one.
    """

    worker_id: int
    port: int
    host: str  # an address, as the worker binds it
    component: str = ""  # such as prefill or backend


@dataclass(frozen=True, slots=True)
class Card:
    """A worker's model card: the name that requests carry, and the runtime data that it publishes."""

    worker_id: int
    model: str
    runtime_data: Any


class Registry(Protocol):
    """One topology's records. What is being written or removed is left out, never told half."""

    @property
    def records_live_s(self) -> float:
        """How long the records of a worker outlive it where nobody removes them; 0 where they do so for ever."""

    def instances(self) -> list[Instance]:
        """All workers that are registered now. Raises OSError where that can't be known."""

    def worker_ids(self) -> set[int]:
        """Workers that a frontend can route to: it needs their endpoint and their model card. Raises OSError."""

    def cards(self) -> list[Card]:
        """The model cards that are registered now. Raises OSError."""

    def renewed_at(self, worker_id: int) -> float | None:
        """When a worker last renewed its records, in s since the epoch; None where nobody says. Raises OSError."""

    def remove(self, worker_id: int) -> None:
        """Takes every record of a worker out, so that nothing is routed to it any more. Raises OSError where that
        can't be done now; :class:`~trtx.planes.watched.WatchedRegistry` tries again instead."""

    def close(self) -> None:
        """Asks no more, and lets go of what it holds."""


def read_instance(record: Mapping[str, Any]) -> Instance | None:
    """Of an instance record; None for one of another endpoint. Raises ValueError, LookupError or TypeError."""
    if record["endpoint"] != _SERVING_ENDPOINT:
        return None
    host, port = read_address(record)
    return Instance(int(record["instance_id"]), port, host, str(record.get("component", "")))


def read_address(record: Mapping[str, Any]) -> tuple[str, int]:
    """Where what an instance record tells of listens. Raises ValueError, LookupError, TypeError or AttributeError."""
    host, _, port = str(record["transport"]["tcp"]).split("/")[0].rpartition(":")
    return host.strip("[]"), int(port)


def read_card(record: Mapping[str, Any]) -> Card:
    """Of a model card's record. Raises ValueError, LookupError, TypeError or AttributeError."""
    card = record["card_json"]
    return Card(int(record["instance_id"]), str(card["display_name"]), card["runtime_config"].get("runtime_data"))
