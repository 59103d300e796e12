"""A topology as it lies in etcd: its plan, in bytes whose meaning is their writer's, and which hosts run a share.

``trtx/topologies/<name>/plan`` and ``…/shares/<host>``, the latter on a lease that its share renews: what is there
without it is gone whole. Both change in one transaction, so of two plans that are started at once under one name one is
there and the other refused.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from trtx.errors import UsageError
from trtx.planes.etcd import Absent, Delete, Etcd, Put, Unchanged

_PREFIX = "trtx/topologies/"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")
MOST_BYTES = 1 << 20  # etcd's own limit of a request is 1.5 MiB, of which base64 in JSON takes nothing


@dataclass(frozen=True, slots=True)
class Standing:
    """What lies there of a topology at one moment. ``plan`` None: it is not published."""

    plan: bytes | None
    hosts: frozenset[str]  # those whose shares run


def read_plan(etcd: Etcd, name: str) -> bytes | None:
    """None where no topology of that name is published. Raises UsageError, EtcdError."""
    return etcd.get(_plan_key(name))


def read_standing(etcd: Etcd, name: str) -> Standing:
    """Raises UsageError, EtcdError."""
    prefix, found = _shares(name), {one.key: one.value for one in etcd.range(_topology(name), is_prefix=True)}
    hosts = frozenset(key.removeprefix(prefix) for key in found if key.startswith(prefix))
    return Standing(found.get(_plan_key(name)), hosts)


def read_hosts(etcd: Etcd, name: str) -> tuple[bool, frozenset[str]]:
    """Whether its plan is there, and the hosts whose shares run: without reading the plan. Raises UsageError,
    EtcdError."""
    prefix = _shares(name)
    found = {one.key for one in etcd.range(_topology(name), is_prefix=True, keys_only=True)}
    hosts = frozenset(key.removeprefix(prefix) for key in found if key.startswith(prefix))
    return _plan_key(name) in found, hosts


def publish_plan(etcd: Etcd, name: str, plan: bytes, host: str, lease: int, *, instead_of: bytes | None) -> bool:
    """With the share of ``host``, whose key hangs on ``lease``, as the only one that runs. False where no longer
    ``instead_of`` lies there (None: nothing), or another share runs meanwhile. Raises UsageError, EtcdError."""
    key = _plan_key(name)
    if len(plan) > MOST_BYTES:
        raise UsageError(
            f"the plan of topology {name!r} has {len(plan):,} bytes, and etcd takes {MOST_BYTES:,}; "
            "give it fewer hosts or shorter engine configs"
        )
    before = Absent(key) if instead_of is None else Unchanged(key, instead_of)
    share = Put(_shares(name) + host, b"", lease)
    return etcd.commit([before, Absent(_shares(name), is_prefix=True)], [Put(key, plan), share])


def add_share(etcd: Etcd, name: str, host: str, lease: int, *, plan: bytes) -> bool:
    """Beside those that run already. False where ``plan`` lies there no longer. Raises UsageError, EtcdError."""
    return etcd.commit([Unchanged(_plan_key(name), plan)], [Put(_shares(name) + host, b"", lease)])


def restore_plan(etcd: Etcd, name: str, plan: bytes) -> bool:
    """By a share that runs, where somebody deleted it. False where one is there. Raises UsageError, EtcdError."""
    return etcd.commit([Absent(_plan_key(name))], [Put(_plan_key(name), plan)])


def remove_share(etcd: Etcd, name: str, host: str) -> None:
    """Of a host on which none runs. Raises UsageError, EtcdError."""
    etcd.delete(_shares(name) + host)


def withdraw_plan(etcd: Etcd, name: str) -> bool:
    """False where a share of it runs, and it stays. Raises UsageError, EtcdError."""
    return etcd.commit([Absent(_shares(name), is_prefix=True)], [Delete(_plan_key(name))])


def published_names(etcd: Etcd) -> tuple[str, ...]:
    """Of all topologies whose plans lie there, in order. Raises EtcdError."""
    found = (entry.key for entry in etcd.range(_PREFIX, is_prefix=True, keys_only=True))
    return tuple(key.removeprefix(_PREFIX).removesuffix("/plan") for key in found if key.endswith("/plan"))


def _plan_key(name: str) -> str:
    return f"{_topology(name)}plan"


def _shares(name: str) -> str:
    return f"{_topology(name)}shares/"


def _topology(name: str) -> str:
    if not _NAME.fullmatch(name):
        raise UsageError(
            f"no topology can be called {name[:80]!r}; expected 63 characters at most of letters, digits, '.', '_' and "
            "'-', with a letter or digit first"
        )
    return f"{_PREFIX}{name}/"
