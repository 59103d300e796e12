"""Stops a topology stage by stage within one deadline, and leaves no process behind."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Literal

from trtx.engine import ranks
from trtx.launch.processes import end_members
from trtx.launch.slots import Slot
from trtx.topology import Plan

Ending = Literal["clean", "forced", "stuck"]  # ended by itself; was killed; could not be killed

# A request passes prefill, decode, frontend. Stopped in this order, each can finish its requests. All of them use
# encode workers; decode does when it has to compute a prompt itself.
_STAGES = (("prefill",), ("agg", "decode"), ("encode",), ("frontend",))
_LEFT = 1 / 8
"""Share of the deadline that each stage leaves to each later stage with processes.

Later stages have little to wait for, while the workers before them finish answers, which may take as long as clients
requested.
"""
_POLL_S = 0.05
_KILL_S = 5.0


def stop(
    plan: Plan,
    slots: Sequence[Slot],
    sessions: Sequence[int],
    *,
    deadline_s: float,
    hurry: Callable[[], bool],
) -> dict[str, Ending]:
    """Ends all children of ``slots`` and everything that they started. Returns how each ended.

    Each stage gets SIGTERM and may drain until its part of ``deadline_s`` has passed; see :func:`deadlines`. ``hurry``
    is polled while waiting; once it returns True, the rest is killed at once. ``sessions``: pids of all children ever
    started. Afterwards no process of the topology is alive, except one in an uninterruptible system call.
    """
    start = time.monotonic()
    endings: dict[str, Ending] = {}
    stages = [[slot for slot in slots if slot.spec.role in roles and slot.child is not None] for roles in _STAGES]
    for stage, seconds in zip(stages, deadlines([len(stage) for stage in stages], deadline_s), strict=True):
        deadline = start + seconds
        for slot in stage:
            assert slot.child is not None
            slot.state = "draining"
            slot.child.terminate()
        while _alive(stage) and time.monotonic() < deadline and not hurry():
            time.sleep(_POLL_S)
        for slot in stage:
            assert slot.child is not None
            endings[slot.spec.name] = "clean" if slot.child.poll() is not None else "forced"
            slot.child.kill_group()
    stuck = end_members(plan.marker, sessions, grace_s=0.0, kill_s=_KILL_S)
    for slot in slots:  # processes that have neither the marker nor the session
        if slot.child is None:
            continue
        slot.look_at_status(slot.child)
        for rank in ranks.end(slot.status.ranks) if slot.status is not None else ():
            endings[f"{slot.spec.name}'s pid {rank.pid}"] = "forced"
    for slot in slots:
        if slot.child is None:
            continue
        deadline = time.monotonic() + _KILL_S
        while slot.child.poll() is None and time.monotonic() < deadline:
            time.sleep(_POLL_S)
        if slot.child.poll() is None or slot.child.pid in stuck:
            endings[slot.spec.name] = "stuck"
        else:
            slot.state = "ended"
    for pid in stuck:
        endings.setdefault(f"pid {pid}", "stuck")
    return endings


def deadlines(processes: Sequence[int], deadline_s: float) -> list[float]:
    """Seconds from the start until each stage is killed. ``processes``: number of processes per stage."""
    later = [sum(count > 0 for count in processes[number:]) for number in range(1, len(processes) + 1)]
    return [deadline_s * (1 - _LEFT * count) for count in later]


def _alive(stage: Sequence[Slot]) -> bool:
    return any(slot.child is not None and slot.child.poll() is None for slot in stage)
