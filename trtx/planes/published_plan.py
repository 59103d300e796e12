"""A topology's plan as it lies in etcd, for the hosts that join it: bytes, whose meaning is their writer's."""

from __future__ import annotations

import re

from trtx.errors import UsageError
from trtx.planes.etcd import Etcd

_PREFIX = "trtx/topologies/"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")
MOST_BYTES = 1 << 20  # etcd's own limit of a request is 1.5 MiB, of which base64 in JSON takes nothing


def publish_plan(etcd: Etcd, name: str, plan: bytes) -> None:
    """In place of the one before. It stays until :func:`withdraw_plan`. Raises UsageError, EtcdError."""
    if len(plan) > MOST_BYTES:
        raise UsageError(
            f"the plan of topology {name!r} has {len(plan):,} bytes, and etcd takes {MOST_BYTES:,}; "
            "give it fewer hosts or shorter engine configs"
        )
    etcd.put(_key(name), plan)


def read_plan(etcd: Etcd, name: str) -> bytes | None:
    """None where no topology of that name is published. Raises UsageError, EtcdError."""
    return etcd.get(_key(name))


def withdraw_plan(etcd: Etcd, name: str) -> None:
    """Raises UsageError, EtcdError."""
    etcd.delete(_key(name))


def published_names(etcd: Etcd) -> tuple[str, ...]:
    """Of all topologies whose plans lie there, in order. Raises EtcdError."""
    found = etcd.range(_PREFIX, is_prefix=True, keys_only=True)
    return tuple(entry.key.removeprefix(_PREFIX).removesuffix("/plan") for entry in found)


def _key(name: str) -> str:
    if not _NAME.fullmatch(name):
        raise UsageError(
            f"no topology can be called {name[:80]!r}; expected 63 characters at most of letters, digits, '.', '_' and "
            "'-', with a letter or digit first"
        )
    return f"{_PREFIX}{name}/plan"
