"""Preconditions of a restart: etcd and NATS are reachable, and run directory and scratch directory are usable."""

from __future__ import annotations

from trtx.launch.reachable import reachable
from trtx.launch.run_directory import RunDirectory
from trtx.launch.scratch import Scratch
from trtx.topology import Plan


class Preconditions:
    """Checks the preconditions of one plan.

    Over hosts, etcd and NATS must be reachable: Dynamo 1.6.1 waits 120 s for each and then ends, so a longer
    outage would otherwise become a crash loop.
    """

    def __init__(self, plan: Plan, run_directory: RunDirectory, scratch: Scratch | None) -> None:
        """``scratch``: the directory for shared tensors, or None to leave it unchecked."""
        self._run_directory = run_directory
        self._scratch = scratch
        self._needed = (
            []
            if plan.etcd is None or plan.nats is None
            else [("etcd", plan.etcd.endpoints), ("NATS", (plan.nats.url,))]
        )

    def __call__(self) -> str | None:
        """The beginning of a sentence on why a process can't start now, or None. Takes at most a second."""
        found = self._run_directory.start_problem()
        if found is None and self._scratch is not None:
            found = self._scratch.start_problem()
        for name, urls in self._needed if found is None else ():
            if not reachable(urls):
                return f"{name} at {', '.join(urls)} takes no connection, so it finds no other process; start it again"
        return found
