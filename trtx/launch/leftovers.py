"""Removes what an earlier share on this host left behind after a power loss or SIGKILL, before another share starts.

Shares of the same topology reuse the directory's name. ``discovery.remove_left_behind`` removes registrations.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import psutil

from trtx.errors import UsageError
from trtx.launch.processes import members
from trtx.launch.scratch import remove_own
from trtx.topology import Plan

_GUARDED_AGAIN_S = 1.0  # a launcher checks four times a second whether its guardian is alive, and starts another


def clear_leftovers(plan: Plan) -> None:
    """Removes the directory of an earlier share with this name.

    No effect on one machine, where each start has a new name. Raises UsageError if a process of the share is alive, or
    if the directory belongs to another user.
    """
    if not plan.this_host:
        return
    refuse_second(plan)
    if (problem := remove_own(plan.scratch_dir)) is not None:
        raise UsageError(
            f"{plan.scratch_dir}, where this share keeps its files, {problem}, so trtx does not touch it; have it "
            "removed, or set TMPDIR to a directory of this user's own"
        )


def refuse_second(plan: Plan) -> None:
    """Raises UsageError if a process of this share is alive, and names what the user has to end.

    That is the share's launcher, which would restart killed children, or the leftover processes if it is gone.
    """
    if not plan.this_host or not (alive := members(plan.marker, ())):
        return
    share, pids = f"a share of {plan.namespace}", ", ".join(map(str, sorted(alive)))
    guardian = _guardian_of(plan.marker)
    if guardian is None:
        time.sleep(_GUARDED_AGAIN_S)
        guardian = _guardian_of(plan.marker)
    if guardian is None:
        raise UsageError(
            f"processes of {share} are on {plan.this_host} already (pid {pids}), but neither their launcher nor its "
            "guardian; `trtx doctor` says how to end what is left behind"
        )
    if not guardian.launcher_lives:
        raise UsageError(
            f"{share} is being stopped on {plan.this_host} (pid {pids}), because its launcher is gone; try again in a "
            "few seconds"
        )
    raise UsageError(f"{share} already runs on {plan.this_host} as pid {guardian.launcher}; stop that process first")


@dataclass(frozen=True, slots=True)
class _Guardian:
    launcher: int
    launcher_lives: bool


def _guardian_of(marker: str) -> _Guardian | None:
    """The guardian of the processes with ``marker``, found by its arguments, or None if none is visible.

    Its launcher is alive exactly while it is the guardian's parent.
    """
    for process in psutil.process_iter(["cmdline", "ppid"]):
        command = process.info["cmdline"] or []
        if "trtx.launch.guardian" in command and marker in command and "--launcher" in command[:-1]:
            launcher = command[command.index("--launcher") + 1]
            return _Guardian(int(launcher), launcher == str(process.info["ppid"]))
    return None
