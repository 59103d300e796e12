"""What a share that was cut off on this host has left, power lost or all killed: taken away before another starts.

Its directory has the same name again. What it left registered, ``discovery.remove_left_behind`` takes out.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import psutil

from trtx.errors import UsageError
from trtx.launch.processes import members
from trtx.launch.scratch import remove_own
from trtx.topology import Plan

_GUARDED_AGAIN_S = 1.0  # a launcher sees four times a second that its guardian is gone, and starts another


def clear_leftovers(plan: Plan) -> None:
    """The directory of a share of this name. Does nothing on one machine, where each start has a name of its own.
    Raises UsageError where a process of the share lives, or what is there is another user's."""
    if not plan.this_host:
        return
    refuse_second(plan)
    if (problem := remove_own(plan.scratch_dir)) is not None:
        raise UsageError(
            f"{plan.scratch_dir}, where this share keeps its files, {problem}, so it is not touched; have it removed, "
            "or set TMPDIR to a directory of this user's own"
        )


def refuse_second(plan: Plan) -> None:
    """Raises UsageError where a process of this share lives, with what has to be ended: its launcher, as children that
    end are started again; or what is left behind."""
    if not plan.this_host or not (alive := members(plan.marker, ())):
        return
    share, pids = f"a share of {plan.namespace}", ", ".join(map(str, sorted(alive)))
    guardian = _guardian_of(plan.marker)
    if guardian is None:
        time.sleep(_GUARDED_AGAIN_S)
        guardian = _guardian_of(plan.marker)
    if guardian is None:
        raise UsageError(
            f"processes of {share} are on {plan.this_host} already (pid {pids}), and none that watches over them; "
            "`trtx doctor` says how to end what is left behind"
        )
    if not guardian.launcher_lives:
        raise UsageError(
            f"{share} is being ended on {plan.this_host} (pid {pids}), as its launcher is gone; start again in seconds"
        )
    raise UsageError(f"{share} runs on {plan.this_host} already, by pid {guardian.launcher}; end that first")


@dataclass(frozen=True, slots=True)
class _Guardian:
    launcher: int
    launcher_lives: bool


def _guardian_of(marker: str) -> _Guardian | None:
    """Who watches over the processes of ``marker``, by its arguments; its launcher is its parent for as long as it
    lives. None where nobody can be seen to."""
    for process in psutil.process_iter(["cmdline", "ppid"]):
        command = process.info["cmdline"] or []
        if "trtx.launch.guardian" in command and marker in command and "--launcher" in command[:-1]:
            launcher = command[command.index("--launcher") + 1]
            return _Guardian(int(launcher), launcher == str(process.info["ppid"]))
    return None
