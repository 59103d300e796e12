"""Why a process that starts now would end at once, or find nobody: looked at before each restart."""

from __future__ import annotations

from trtx.launch.reachable import reachable
from trtx.launch.run_directory import RunDirectory
from trtx.launch.scratch import Scratch
from trtx.topology import Plan


class Shortage:
    """Of one plan. Over hosts, etcd and NATS have to answer: Dynamo 1.4.2 waits for the one for 120 s, and ends at once
    without the other, so that an outage of a minute would be a crash loop."""

    def __init__(self, plan: Plan, run_directory: RunDirectory, scratch: Scratch | None) -> None:
        """``scratch`` None: nobody looks at it."""
        self._run_directory = run_directory
        self._scratch = scratch
        self._needed = (
            []
            if plan.etcd is None or plan.nats is None
            else [("etcd", plan.etcd.endpoints), ("NATS", (plan.nats.url,))]
        )

    def __call__(self) -> str | None:
        """One sentence's beginning; None where it can start. Takes a second at most."""
        found = self._run_directory.shortage()
        if found is None and self._scratch is not None:
            found = self._scratch.shortage()
        for name, urls in self._needed if found is None else ():
            if not reachable(urls):
                return f"{name} at {', '.join(urls)} takes no connection, without which it finds nobody; start it again"
        return found
