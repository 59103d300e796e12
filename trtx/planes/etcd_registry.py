"""Dynamo's discovery in etcd, read from outside.

Keys in Dynamo 1.6.1: ``v1/instances/<namespace>/<component>/<endpoint>/<id hex>`` and
``v1/mdc/<namespace>/<component>/generate/<id hex>``, with the same JSON as in its files. All keys of a process are
attached to one lease, whose id is the worker's id. Revoking it removes the worker completely, which frontends were seen
to notice within 0.1 s; otherwise the keys go when the lease expires, after ``ETCD_LEASE_TTL``.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Iterator
from typing import Any

from trtx.planes.etcd import Etcd, KeyValue
from trtx.planes.etcd_errors import EtcdError
from trtx.planes.registry import Card, Instance, RegistryUnknown, read_address, read_card, read_instance


class EtcdRegistry:
    """One topology's records in etcd. Each call sends requests within the client's timeout.

    See :class:`~trtx.planes.registry.Registry`.
    """

    def __init__(self, etcd: Etcd, namespace: str, *, lease_ttl_s: float) -> None:
        """``namespace``: Dynamo's. ``lease_ttl_s``: the lease time of its workers. :meth:`close` closes ``etcd``."""
        self._etcd = etcd
        self._namespace = namespace
        self.records_live_s = lease_ttl_s

    def instances(self) -> list[Instance]:
        with _not_known():
            return _instances(self._records("instances"))

    def worker_ids(self) -> set[int]:
        with _not_known():
            # Keys only: a card contains a model's whole config.
            cards = {entry.key.rpartition("/")[2] for entry in self._records("mdc", keys_only=True)}
        return {instance.worker_id for instance in self.instances() if f"{instance.worker_id:x}" in cards}

    def cards(self) -> list[Card]:
        found = []
        with _not_known():
            records = self._records("mdc")
        for entry in records:
            with contextlib.suppress(ValueError, LookupError, TypeError, AttributeError):
                found.append(read_card(json.loads(entry.value)))
        return found

    def leases(self) -> dict[str, set[int]]:
        """Host address -> leases of everything registered there, including frontends. Raises OSError."""
        found: dict[str, set[int]] = {}
        with _not_known():
            records = self._records("instances")
        for entry in records:
            with contextlib.suppress(ValueError, LookupError, TypeError, AttributeError):
                address = read_address(json.loads(entry.value))[0]
                found.setdefault(address, set()).add(entry.lease)
        return found

    def renewed_at(self, worker_id: int) -> float | None:
        """Computed from the worker's lease, to a second."""
        with _not_known():
            lease = self._etcd.lease(worker_id)
        return None if lease is None else time.time() - max(0, lease.granted_s - lease.left_s)

    def remove(self, worker_id: int) -> None:
        with _not_known():
            self._etcd.revoke(worker_id)

    def close(self) -> None:
        self._etcd.close()

    def _records(self, bucket: str, *, keys_only: bool = False) -> tuple[KeyValue, ...]:
        return self._etcd.range(f"v1/{bucket}/{self._namespace}/", is_prefix=True, keys_only=keys_only)


def namespaces(etcd: Etcd) -> set[str]:
    """Returns the Dynamo namespaces in which a model is registered. Raises EtcdError."""
    keys = (entry.key.split("/") for entry in etcd.range("v1/mdc/", is_prefix=True, keys_only=True))
    return {parts[2] for parts in keys if len(parts) > 3}


def _instances(records: tuple[KeyValue, ...]) -> list[Instance]:
    found = []
    for entry in records:
        with contextlib.suppress(ValueError, LookupError, TypeError, AttributeError):
            record: Any = json.loads(entry.value)
            if (instance := read_instance(record)) is not None:
                found.append(instance)
    return found


@contextlib.contextmanager
def _not_known() -> Iterator[None]:
    try:
        yield
    except EtcdError as error:
        raise RegistryUnknown(str(error)) from error
