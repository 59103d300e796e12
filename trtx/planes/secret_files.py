"""Permissions of credentials files, gathered here and judged for ``serve`` and ``doctor``."""

from __future__ import annotations

import stat
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from trtx.planes.credentials import EtcdAuth, NatsAuth
from trtx.planes.fitness import Unfit

_OPEN = 0o066  # read or write access for group or others


@dataclass(frozen=True, slots=True)
class SecretFile:
    """A credentials file on this host."""

    path: str
    mode: int | None = None  # permission bits
    problem: str | None = None  # why it can't be examined


def look_at_secrets(etcd: EtcdAuth | None, nats: NatsAuth | None) -> tuple[SecretFile, ...]:
    """The state of all files that contain a secret; none is opened."""
    found = []
    for path in dict.fromkeys((*(etcd.files if etcd else ()), *(nats.files if nats else ()))):
        try:
            found.append(SecretFile(str(path), stat.S_IMODE(path.stat().st_mode)))
        except OSError as error:
            found.append(SecretFile(str(path), problem=error.strerror or str(error)))
    return tuple(found)


def judge_secrets(files: Sequence[SecretFile]) -> Iterator[Unfit]:
    """The problems of these files."""
    for one in files:
        if one.problem is not None:
            fix = f"put it there, readable by this user alone: chmod 600 {one.path}"
            yield Unfit("failed", f"{one.path}: {one.problem}", "the files that etcd_auth and nats_auth name", fix)
    if loose := [one.path for one in files if one.mode is not None and one.mode & _OPEN]:
        paths = " ".join(loose)
        yield Unfit(
            "warning", f"other users can read or change {', '.join(loose)}", "files of one user", f"chmod 600 {paths}"
        )
