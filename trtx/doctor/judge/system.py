"""Checks cores, memory, limits, ports and disks, which the processes of a topology need besides GPUs."""

from __future__ import annotations

import sys
from collections.abc import Iterator

from trtx.doctor.check import Check, failed, ok, warning
from trtx.doctor.facts import Directory, Facts, System
from trtx.launch import LOWEST_EPHEMERAL

_GIB, _MIB = 2**30, 2**20
LEAST_CORES = 4  # for a frontend, two workers, and aiperf, whose timing manager keeps one core busy
LEAST_MEMORY = (1 * _GIB, 4 * _GIB)  # failure, warning: a torch process takes about 1 GiB before it loads weights
FRONTEND_FILES, FILES_A_STREAM = 64, 2
"""File descriptors of Dynamo's frontend: 58 when idle, 186 with 64 streams, 570 with 256 (ai-dynamo 1.4.2, mode agg). A
worker needs about half as many."""
STREAMS = (64, 1024)  # failure, warning: the highest concurrency of a default sweep, and of a typical one
FRONTEND_INOTIFY = 4  # inotify instances of one frontend (counted with ai-dynamo 1.4.2, file discovery)
LEAST_SHM = 1 * _GIB
"""NCCL keeps its buffers between ranks in /dev/shm; its guide starts containers with --shm-size=1g. Docker's default is
64 MiB."""
# The free space below which the check fails or warns, and how to choose another directory.
DIRECTORIES = {
    "run directories": (256 * _MIB, 2 * _GIB, "choose another with -o"),  # aiperf keeps every request's record
    "checkpoint cache": (256 * _MIB, 20 * _GIB, "set TRTX_CACHE to another"),  # an 8B model in bfloat16 has 16 GiB
    "discovery directory": (16 * _MIB, 256 * _MIB, "set TMPDIR to another"),  # records of a few KB; aiperf's prompts
}


def judge_system(facts: Facts) -> Iterator[Check]:
    system = facts.system
    yield _cores(system)
    yield _memory(system)
    yield _pinned(system)
    if facts.hosts is None:  # over hosts, the checks of each host cover the frontends' ports
        yield _port(system)
    if system.ephemeral_first is not None and system.ephemeral_first < LOWEST_EPHEMERAL:
        yield warning(
            "internal ports",
            f"outgoing connections use ports from {system.ephemeral_first}",
            f"from {LOWEST_EPHEMERAL} or above: they would take ports that a worker is about to listen on",
            "sudo sysctl net.ipv4.ip_local_port_range='32768 60999'",
        )
    yield _open_files(system)
    yield from _inotify(system)
    yield from _shared_memory(facts)
    for directory in system.directories:
        yield _directory(directory)


def _cores(system: System) -> Check:
    seen = f"{system.cpu_cores}, load {system.load_average:.1f}"
    if system.cpu_cores < LEAST_CORES:
        return warning(
            "CPU cores", seen, f"{LEAST_CORES} or more", "give it more: frontend, workers and aiperf share them"
        )
    if system.load_average > system.cpu_cores / 2:
        return warning("CPU cores", seen, "an idle machine", "measure when nothing else runs: results are lower now")
    return ok("CPU cores", seen)


def _memory(system: System) -> Check:
    seen = f"{system.memory_available_bytes / _GIB:.1f} GiB free"
    if system.memory_left_bytes is not None:
        seen += f", {system.memory_left_bytes / _GIB:.1f} GiB below the container's limit"
    fails, warns = LEAST_MEMORY
    usable = _usable_memory(system)
    if usable < warns:
        row = failed if usable < fails else warning
        return row("memory", seen, f"{warns // _GIB} GiB, and the checkpoint's size", "end what uses it")
    return ok("memory", seen)


def _usable_memory(system: System) -> int:
    left = system.memory_left_bytes
    return system.memory_available_bytes if left is None else min(left, system.memory_available_bytes)


def _pinned(system: System) -> Check:
    """``ulimit -l`` bounds no memory that CUDA pins, so it is no cause to warn."""
    locked = "no limit" if system.locked_bytes is None else f"{system.locked_bytes >> 10} KiB"
    usable = f"up to {_usable_memory(system) / _GIB:.1f} GiB for the host_cache_size of all GPUs"
    return ok("pinned memory", f"{usable}; ulimit -l, for RDMA alone: {locked}")


def _port(system: System) -> Check:
    name = f"port {system.port}"
    if system.port_problem is None:
        return ok(name, "any free one" if system.port == 0 else "free on 127.0.0.1")
    problem, _, fix = system.port_problem.rpartition("; ")
    return failed(name, problem or fix, "free", fix)


def _open_files(system: System) -> Check:
    limit = system.open_files
    if limit == sys.maxsize:
        return ok("open files", "no limit")
    streams = max(0, limit - FRONTEND_FILES) // FILES_A_STREAM
    seen = f"{limit} a process: about {streams} streams at once"
    fails, warns = STREAMS
    if streams >= warns:
        return ok("open files", seen)
    wanted = FRONTEND_FILES + FILES_A_STREAM * warns
    if system.open_files_hard >= wanted:
        fix = f"ulimit -n {min(system.open_files_hard, 65_536)} before you start trtx"
    else:
        fix = f"raise the hard limit, now {system.open_files_hard}: docker run --ulimit nofile=65536, or limits.conf"
    row = failed if streams < fails else warning
    return row("open files", seen, f"{wanted} or more, for {warns} streams", fix)


def _inotify(system: System) -> Iterator[Check]:
    if system.inotify_limit is None:
        return
    left = system.inotify_limit - system.inotify_used
    seen = f"{system.inotify_used} of {system.inotify_limit} instances in use"
    fix = f"sudo sysctl fs.inotify.max_user_instances={max(1024, 2 * system.inotify_limit)}"
    if left < FRONTEND_INOTIFY:
        yield failed("inotify", seen, f"{FRONTEND_INOTIFY} free for a frontend to watch discovery", fix)
    elif left < 2 * FRONTEND_INOTIFY:
        yield warning("inotify", seen, f"{FRONTEND_INOTIFY} free for each frontend", fix)
    else:
        yield ok("inotify", seen)


def _shared_memory(facts: Facts) -> Iterator[Check]:
    size = facts.system.shm_bytes
    if size is None:
        return
    seen = f"{size / _GIB:.1f} GiB" if size >= _GIB else f"{size / _MIB:.0f} MiB"
    if size >= LEAST_SHM:
        yield ok("/dev/shm", seen)
        return
    row = failed if facts.engine == "tensorrt-llm" and len(facts.gpus.visible) > 1 else warning
    fix = "docker run --shm-size=1g (or --ipc=host), or: sudo mount -o remount,size=1g /dev/shm"
    yield row("/dev/shm", seen, "1 GiB: NCCL and UCX pass data between processes through it", fix)


def _directory(directory: Directory) -> Check:
    free = directory.free_bytes
    seen = f"{directory.path}, {free / _GIB:.1f} GiB free"
    fails, warns, way_out = DIRECTORIES[directory.name]
    if directory.problem is not None:
        seen = f"{directory.path} can't be written: {directory.problem}"
        return failed(directory.name, seen, "a directory that you can write to", way_out)
    if free < warns:
        row = failed if free < fails else warning
        return row(directory.name, seen, _size(warns), f"free some space, or {way_out}")
    return ok(directory.name, seen)


def _size(amount: int) -> str:
    return f"{amount / _GIB:.0f} GiB free" if amount >= _GIB else f"{amount / _MIB:.0f} MiB free"
