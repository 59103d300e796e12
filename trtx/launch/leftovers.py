"""What a share that was cut off on this host has left, power lost or all killed: taken away before another starts.

Its directory has the same name again. What it left registered, ``discovery.remove_left_behind`` takes out.
"""

from __future__ import annotations

from trtx.errors import UsageError
from trtx.launch.processes import members
from trtx.launch.scratch import remove_own
from trtx.topology import Plan


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
    """Raises UsageError where a process of this share lives."""
    if plan.this_host and (alive := members(plan.marker, ())):
        raise UsageError(
            f"a share of {plan.namespace} runs on {plan.this_host} already (pid {', '.join(map(str, sorted(alive)))}); "
            "end it first"
        )
