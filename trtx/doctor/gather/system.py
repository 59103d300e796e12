"""Reads cores, memory, limits, ports and directories from the operating system."""

from __future__ import annotations

import contextlib
import os
import resource
import shutil
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import psutil

from trtx.checkpoint.synthetic import default_cache_dir
from trtx.errors import UsageError
from trtx.launch import PortHolder, probe, write_problem
from trtx.memory import host_memory

_LOOPBACK = "127.0.0.1"
_ROOT = Path("/")
_SHM = Path("/dev/shm")
_PROCESSES = Path("/proc")
_INOTIFY_LIMIT = Path("/proc/sys/fs/inotify/max_user_instances")
_EPHEMERAL = Path("/proc/sys/net/ipv4/ip_local_port_range")


@dataclass(frozen=True, slots=True)
class Directory:
    """A directory that trtx writes to, or its nearest existing parent."""

    name: str
    path: Path
    free_bytes: int
    problem: str | None = None  # why a test file could not be written


@dataclass(frozen=True, slots=True)
class System:
    """The machine without its GPUs."""

    cpu_cores: int
    load_average: float  # the number of runnable processes, averaged over the last minute
    memory_available_bytes: int
    memory_left_bytes: int | None  # below the container's limit; None: it has none
    locked_bytes: int | None  # ulimit -l; None: no limit
    open_files: int  # soft limit
    open_files_hard: int
    inotify_used: int  # inotify instances of this user
    inotify_limit: int | None
    shm_bytes: int | None  # size of /dev/shm
    port: int
    port_problem: str | None
    ephemeral_first: int | None
    directories: tuple[Directory, ...]


def gather_system(port: int, runs: Path) -> System:
    open_files, open_files_hard = (
        sys.maxsize if limit == resource.RLIM_INFINITY else limit
        for limit in resource.getrlimit(resource.RLIMIT_NOFILE)
    )
    memory = host_memory(_ROOT)
    return System(
        cpu_cores=probe().cpu_cores,
        load_average=os.getloadavg()[0],
        memory_available_bytes=psutil.virtual_memory().available,
        memory_left_bytes=memory.left,
        locked_bytes=memory.locked,
        open_files=open_files,
        open_files_hard=open_files_hard,
        inotify_used=_inotify_instances(),
        inotify_limit=_first_number(_INOTIFY_LIMIT),
        shm_bytes=shutil.disk_usage(_SHM).total if _SHM.is_dir() else None,
        port=port,
        port_problem=_port_problem(port),
        ephemeral_first=_first_number(_EPHEMERAL),
        directories=(
            _directory("run directories", runs.absolute()),
            _directory("checkpoint cache", default_cache_dir()),
            _directory("discovery directory", Path(tempfile.gettempdir())),
        ),
    )


def _port_problem(port: int) -> str | None:
    holder = PortHolder()
    try:
        held = holder.hold(_LOOPBACK, port)
    except UsageError as error:
        return str(error)
    holder.release([held])
    return None


def _directory(name: str, path: Path) -> Directory:
    while not path.is_dir() and path != path.parent:
        path = path.parent
    return Directory(name, path, shutil.disk_usage(path).free, write_problem(path))


def _first_number(path: Path) -> int | None:
    try:
        return int(path.read_text().split()[0])
    except (OSError, ValueError, IndexError):
        return None


def _inotify_instances() -> int:
    """Counts the inotify instances of this user's processes. Dynamo's frontend uses four."""
    return sum(
        _is_inotify(descriptor) for descriptors in _PROCESSES.glob("[0-9]*/fd") for descriptor in _own(descriptors)
    )


def _own(descriptors: Path) -> list[Path]:
    """Lists a process's descriptors; empty for another user's process and for one that has ended."""
    with contextlib.suppress(OSError):
        if descriptors.stat().st_uid == os.getuid():
            return list(descriptors.iterdir())
    return []


def _is_inotify(descriptor: Path) -> bool:
    with contextlib.suppress(OSError):
        return str(descriptor.readlink()) == "anon_inode:inotify"
    return False
