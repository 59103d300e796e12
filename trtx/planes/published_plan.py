"""A topology's record in etcd: an opaque plan and the hosts that run a share of it.

Keys: ``trtx/topologies/<name>/plan`` and ``…/shares/<host>``. Each running share renews a lease, to which its key is
attached. A plan without a live share counts as deleted. Plan and first share are written in one transaction, so if two
hosts publish a plan under the same name at once, one succeeds and the other is refused.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from trtx.errors import UsageError
from trtx.planes.etcd import Absent, Delete, Etcd, Put, Unchanged

_PREFIX = "trtx/topologies/"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")
MOST_BYTES = 1 << 20  # etcd limits a request to 1.5 MiB, counted after the gateway has decoded the base64


@dataclass(frozen=True, slots=True)
class Standing:
    """A topology's record at one moment. ``plan`` None: not published."""

    plan: bytes | None
    hosts: frozenset[str]  # hosts with a running share


def read_plan(etcd: Etcd, name: str) -> bytes | None:
    """The plan, or None if no topology with that name is published. Raises UsageError, EtcdError."""
    return etcd.get(_plan_key(name))


def read_standing(etcd: Etcd, name: str) -> Standing:
    """The topology's record. Raises UsageError, EtcdError."""
    prefix, found = _shares(name), {one.key: one.value for one in etcd.range(_topology(name), is_prefix=True)}
    hosts = frozenset(key.removeprefix(prefix) for key in found if key.startswith(prefix))
    return Standing(found.get(_plan_key(name)), hosts)


def read_hosts(etcd: Etcd, name: str) -> tuple[bool, frozenset[str]]:
    """Whether the plan is published, and the hosts with a running share; does not read the plan itself.

    Raises UsageError, EtcdError.
    """
    prefix = _shares(name)
    found = {one.key for one in etcd.range(_topology(name), is_prefix=True, keys_only=True)}
    hosts = frozenset(key.removeprefix(prefix) for key in found if key.startswith(prefix))
    return _plan_key(name) in found, hosts


def publish_plan(etcd: Etcd, name: str, plan: bytes, host: str, lease: int, *, instead_of: bytes | None) -> bool:
    """Publishes a plan together with its first share, that of ``host``, whose key is attached to ``lease``.

    The plan replaces ``instead_of`` (None: no plan is published yet). Returns False if another plan is published by
    now, or if a share is running. Raises UsageError, EtcdError.
    """
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
    """Adds a host's share. Returns False if ``plan`` is no longer published. Raises UsageError, EtcdError."""
    return etcd.commit([Unchanged(_plan_key(name), plan)], [Put(_shares(name) + host, b"", lease)])


def restore_plan(etcd: Etcd, name: str, plan: bytes) -> bool:
    """Publishes the plan of a running share again if its key was deleted.

    Returns False if a plan is published. Raises UsageError, EtcdError.
    """
    return etcd.commit([Absent(_plan_key(name))], [Put(_plan_key(name), plan)])


def remove_share(etcd: Etcd, name: str, host: str) -> None:
    """Removes the key of a host on which no share runs. Raises UsageError, EtcdError."""
    etcd.delete(_shares(name) + host)


def withdraw_plan(etcd: Etcd, name: str) -> bool:
    """Deletes the plan. Returns False and deletes nothing if a share is running. Raises UsageError, EtcdError."""
    return etcd.commit([Absent(_shares(name), is_prefix=True)], [Delete(_plan_key(name))])


def published_names(etcd: Etcd) -> tuple[str, ...]:
    """Names of all published topologies, in order. Raises EtcdError."""
    found = (entry.key for entry in etcd.range(_PREFIX, is_prefix=True, keys_only=True))
    return tuple(key.removeprefix(_PREFIX).removesuffix("/plan") for key in found if key.endswith("/plan"))


def _plan_key(name: str) -> str:
    return f"{_topology(name)}plan"


def _shares(name: str) -> str:
    return f"{_topology(name)}shares/"


def _topology(name: str) -> str:
    if not _NAME.fullmatch(name):
        raise UsageError(
            f"{name[:80]!r} is not a valid topology name; expected at most 63 letters, digits, '.', '_' and '-', with "
            "a letter or digit first"
        )
    return f"{_PREFIX}{name}/"
