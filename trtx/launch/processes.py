"""Finds and ends every process of a topology through ``/proc``. Uses only the standard library.

A process belongs to a topology if its environment contains the topology's marker, which all descendants inherit. It
also belongs to it if it is in the session of a child, because an engine that overwrites its title may overwrite its
environment too.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Collection, Iterator
from pathlib import Path

_PROC = Path("/proc")


def members(marker: str, sessions: Collection[int]) -> set[int]:
    """Living processes with ``marker`` (``NAME=value``) in their environment or in one of ``sessions``; no zombies."""
    return {pid for pid in _pids() if _is_member(pid, marker.encode(), sessions)}


def end_members(marker: str, sessions: Collection[int], *, grace_s: float, kill_s: float) -> set[int]:
    """Sends SIGTERM to all members, and SIGKILL to those that are left after ``grace_s``, for at most ``kill_s``.

    Returns the members that are still alive: a process in an uninterruptible system call dies only when that returns.
    """
    for signal_number, seconds in ((signal.SIGTERM, grace_s), (signal.SIGKILL, kill_s)):
        deadline = time.monotonic() + seconds
        signalled: set[int] = set()
        while left := members(marker, sessions):
            for pid in left - signalled if signal_number == signal.SIGTERM else left:
                send(pid, signal_number)
            signalled |= left
            if time.monotonic() >= deadline:
                break
            time.sleep(0.05)
        else:
            return set()
    return members(marker, sessions)


def is_stopped(pid: int) -> bool:
    """Whether a process is stopped, by SIGSTOP or a debugger."""
    try:
        state = (_PROC / str(pid) / "stat").read_bytes().rpartition(b")")[2].split()[0]
    except (OSError, IndexError):
        return False
    return state in (b"T", b"t")


def send(pid: int, signal_number: int) -> bool:
    """Sends a signal to a process; False if it is gone."""
    try:
        os.kill(pid, signal_number)
    except (ProcessLookupError, PermissionError):
        return False
    return True


def send_to_group(pid: int, signal_number: int) -> bool:
    """Sends a signal to the process group that ``pid`` leads; False if it is gone."""
    try:
        os.killpg(pid, signal_number)
    except (ProcessLookupError, PermissionError):
        return False
    return True


def _pids() -> Iterator[int]:
    own = os.getpid()
    for entry in _PROC.iterdir():
        if entry.name.isdigit() and int(entry.name) != own:
            yield int(entry.name)


def _is_member(pid: int, marker: bytes, sessions: Collection[int]) -> bool:
    try:
        # pid (comm) state ppid pgrp session …; comm may contain spaces and parentheses.
        state, _, _, session = (_PROC / str(pid) / "stat").read_bytes().rpartition(b")")[2].split()[:4]
        if state in (b"Z", b"X"):
            return False
        return int(session) in sessions or marker in (_PROC / str(pid) / "environ").read_bytes().split(b"\0")
    except (OSError, ValueError):
        return False
