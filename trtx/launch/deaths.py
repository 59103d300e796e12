"""Handles the death of a process: kills the processes that it left, and describes exit, cause and last log lines."""

from __future__ import annotations

import contextlib
import os

from trtx.engine import ranks
from trtx.engine.ranks import Rank
from trtx.launch.children import Child, describe_exit
from trtx.launch.slots import Slot


def end_ranks_outside(recorded: tuple[Rank, ...], group: int) -> tuple[Rank, ...]:
    """Kills recorded processes outside the process group that was just killed. Returns those that were still alive."""
    outside = []
    for rank in recorded:
        with contextlib.suppress(ProcessLookupError):
            if os.getpgid(rank.pid) != group:
                outside.append(rank)
    return ranks.end(outside)


def describe_death(
    slot: Slot, child: Child, code: int, now: float, *, left_behind: tuple[Rank, ...], thief: str | None
) -> str:
    """The message about the death of ``child``, which ran in ``slot``.

    ``left_behind``: processes of its engine that had to be killed. ``thief``: the process that holds the port on which
    the child could not listen.
    """
    how = describe_exit(code) if slot.ended_because is None else "was killed by trtx"
    when = f"after {now - slot.started_at:.0f} s" + ("" if slot.had_served else ", before it was up")
    what = f"{slot.spec.name} {how} {when}"
    if slot.ended_because is not None:
        what += f", because {slot.ended_because}"
    if left_behind:
        pids = ", ".join(str(rank.pid) for rank in left_behind)
        what += f"; processes of its engine outlived it, and trtx ended them: pid {pids}"
    status = slot.status
    if status is not None and status.error and status.error not in child.log.tail():
        what += f"; its status file says: {status.error}"
    if thief is not None:
        what += f": {thief}, which it needs; log: {slot.spec.log_path}"
    elif slot.ended_because is None:
        what += f"; {child.log.last_words(f'{slot.spec.name} {how}')}"
    return what
