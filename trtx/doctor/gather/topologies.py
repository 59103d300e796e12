"""Finds trtx's own running and leftover topologies: processes by their environment, files by their names."""

from __future__ import annotations

import contextlib
import os
import re
import tempfile
import time
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

from trtx.topology import TOPOLOGY_VARIABLE

_SCRATCH = re.compile(r"trtx-(?:[0-9a-f]{8}|aiperf-\w+|[a-z0-9-]+\.[a-z0-9-]+)")
_SETTLED_S = 60.0  # a launcher creates its scratch directory shortly before it starts its guardian
_GUARDIAN = b"trtx.launch.guardian"


@dataclass(frozen=True, slots=True)
class Topology:
    """A topology of trtx, or a load of ``trtx bench``, with processes or short-lived files on this machine."""

    name: str  # the name of its scratch directory: trtx-1a2b3c4d, trtx-aiperf-x1y2z3
    pids: tuple[int, ...]
    is_guarded: bool  # its guardian is alive, so its launcher is too, or the guardian is cleaning up
    scratch: Path | None = None  # the scratch directory, if it exists


def gather_topologies(*temporary: Path) -> tuple[Topology, ...]:
    """Returns every topology and load of this user, running or left behind.

    ``temporary``: the directories to search for scratch directories, instead of the temporary directory and ``/tmp``.
    ``trtx bench`` uses ``/tmp`` if the temporary directory's path is too long for a socket.
    """
    pids: dict[str, list[int]] = defaultdict(list)
    guarded: set[str] = set()
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # the process belongs to another user, or has ended
            command = (process / "cmdline").read_bytes().split(b"\0")
            if _GUARDIAN in command:
                guarded.add(_after(command, b"--scratch"))
            elif name := _name(_environment(process)):
                pids[name].append(int(process.name))
    scratches = {
        path.name: path
        for directory in temporary or {Path(tempfile.gettempdir()), Path("/tmp")}
        for path in _scratches(directory)
    }
    return tuple(
        Topology(name, tuple(sorted(pids.get(name, ()))), name in guarded, scratches.get(name))
        for name in sorted(pids.keys() | scratches.keys())
    )


def _environment(process: Path) -> dict[str, str]:
    entries = (process / "environ").read_bytes().decode(errors="replace").split("\0")
    return dict(entry.split("=", 1) for entry in entries if "=" in entry)


def _name(environment: dict[str, str]) -> str | None:
    """Returns the name of a process's topology; for a process of aiperf the name of the load, from its TMPDIR."""
    own = environment.get(TOPOLOGY_VARIABLE) or Path(environment.get("TMPDIR", "")).name
    return own if _SCRATCH.fullmatch(own) else None


def _after(command: list[bytes], option: bytes) -> str:
    return Path(os.fsdecode(command[command.index(option) + 1])).name if option in command[:-1] else ""


def _scratches(temporary: Path) -> list[Path]:
    found = []
    with contextlib.suppress(OSError):
        for path in temporary.glob("trtx-*"):
            status = path.stat()
            if (
                path.is_dir()
                and _SCRATCH.fullmatch(path.name)
                and status.st_uid == os.getuid()
                and time.time() - status.st_mtime > _SETTLED_S
            ):
                found.append(path)
    return found
