"""The registered workers of a topology, and the removal of dead ones: one interface for all discovery backends.

Layout in Dynamo 1.6.1 for files, etcd and Kubernetes: an instance record for each endpoint of a worker, and a model
card for the worker, all under its instance id.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

_SERVING_ENDPOINT = "generate"
_GENERATING = ("aggregated", "decode")  # types of workers in Dynamo 1.6.1 that generate text


class RegistryUnknown(OSError):
    """The registry can't be read now. Unknown does not mean gone; a later call may succeed."""


@dataclass(frozen=True, slots=True)
class Instance:
    """A worker that takes requests: its id, and the address of its ``generate`` endpoint.

    A worker registers other endpoints under the same id too, some of them long before this one.
    """

    worker_id: int
    port: int
    host: str  # the address that the worker binds
    component: str = ""  # such as prefill or backend


@dataclass(frozen=True, slots=True)
class Card:
    """A worker's model card: the model name in requests, and the runtime data that the worker publishes."""

    worker_id: int
    model: str
    runtime_data: Any
    slots: int = 0  # requests that it generates text for at once; 0: none, or it does not say


class Registry(Protocol):
    """One topology's records.

    Records that are being written or removed are left out, so none is returned incomplete.
    """

    @property
    def records_live_s(self) -> float:
        """How long a dead worker's records live if they are not removed; 0: for ever."""

    def instances(self) -> list[Instance]:
        """All workers that are registered now. Raises OSError if they can't be read."""

    def worker_ids(self) -> set[int]:
        """Workers to which a frontend can route: those with an endpoint and a model card. Raises OSError."""

    def cards(self) -> list[Card]:
        """The model cards that are registered now. Raises OSError."""

    def renewed_at(self, worker_id: int) -> float | None:
        """When a worker last renewed its records, in seconds since the epoch; None if unknown. Raises OSError."""

    def remove(self, worker_id: int) -> None:
        """Removes every record of a worker, so that nothing is routed to it any more.

        Raises OSError if that fails now; :class:`~trtx.planes.watched.WatchedRegistry` retries instead.
        """

    def close(self) -> None:
        """Stops all requests and releases resources."""


def read_instance(record: Mapping[str, Any]) -> Instance | None:
    """Parses an instance record; None for one of another endpoint. Raises ValueError, LookupError or TypeError."""
    if record["endpoint"] != _SERVING_ENDPOINT:
        return None
    host, port = read_address(record)
    return Instance(int(record["instance_id"]), port, host, str(record.get("component", "")))


def read_address(record: Mapping[str, Any]) -> tuple[str, int]:
    """The address in an instance record. Raises ValueError, LookupError, TypeError or AttributeError."""
    host, _, port = str(record["transport"]["tcp"]).split("/")[0].rpartition(":")
    return host.strip("[]"), int(port)


def read_card(record: Mapping[str, Any]) -> Card:
    """Parses a model card's record. Raises ValueError, LookupError, TypeError or AttributeError."""
    card = record["card_json"]
    config = card["runtime_config"]
    slots = 0
    if card.get("worker_type") in _GENERATING:
        slots = int(config.get("max_num_seqs") or 0) * int(config.get("data_parallel_size") or 1)
    return Card(int(record["instance_id"]), str(card["display_name"]), config.get("runtime_data"), slots)
