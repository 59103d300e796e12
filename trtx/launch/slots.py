"""One process of a plan across its restarts, and the record of a restart."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Literal

from trtx.engine.worker_status import WorkerStatus, read
from trtx.errors import LaunchError
from trtx.launch.children import Child
from trtx.launch.processes import is_stopped
from trtx.launch.restarts import RestartPolicy
from trtx.topology import EtcdService, ProcessSpec

_VANISHED_AFTER_S = 2.0
# limit for a worker that drains although trtx did not stop it; the worker's own limits are lower
_DRAINS_AT_MOST_S = 120.0
State = Literal["starting", "loading", "up", "asleep", "restarting", "draining", "ended"]


@dataclass(frozen=True, slots=True)
class Restart:
    """A death that was followed by a restart."""

    name: str
    at: float  # seconds since the epoch
    exit: str  # from describe_exit


@dataclass(slots=True, eq=False)
class Slot:
    """One process of the plan across its restarts."""

    spec: ProcessSpec
    child: Child | None = None
    state: State = "ended"
    started_at: float = 0.0
    up_since: float = 0.0
    restart_at: float | None = None
    worker_id: int | None = None
    was_registered: bool = False
    renewed_at: float | None = None  # when it last renewed its discovery records, in seconds since the epoch
    vanished_since: float | None = None
    unrenewed_s: float | None = None  # age of the last renewal at ``vanished_since``
    draining_since: float | None = None
    stopped_since: float | None = None  # stopped by SIGSTOP or a debugger
    held_back_by: str | None = None  # the reported reason why its restart is delayed
    had_served: bool = False
    ended_because: str | None = None  # why the launcher killed it; None: it did not
    status: WorkerStatus | None = None  # the last status read, because the file may be gone when it is needed
    status_problem: str | None = None  # the reported reason why the status file can't be read
    recomputed_reported: int = 0  # number of recomputed prompts at the last report
    deaths: RestartPolicy = field(default_factory=RestartPolicy)

    def begin(self, child: Child, now: float) -> None:
        """Resets the state for a new process."""
        self.child, self.state, self.started_at = child, "starting", now
        self.restart_at = self.worker_id = self.status = self.status_problem = None
        self.renewed_at = self.unrenewed_s = self.vanished_since = self.draining_since = self.ended_because = None
        self.stopped_since = None
        self.held_back_by, self.recomputed_reported = None, 0
        self.was_registered = self.had_served = False

    def look_at_status(self, child: Child) -> str | None:
        """Reads the status file of ``child``. Returns a message about an unreadable file, once; else None."""
        try:
            self.status, problem = read(self.spec.status_file, child.pid) or self.status, None
        except LaunchError as error:
            problem = str(error)
        is_news, self.status_problem = problem != self.status_problem, problem
        return problem if is_news else None

    def look_at_handoffs(self) -> str | None:
        """A message about prompts whose KV did not arrive, from the status last read; else None.

        Reported for the first prompt, and each time that their number has doubled.
        """
        found = None if self.status is None else self.status.handoffs
        if found is None or found.recomputed < max(1, 2 * self.recomputed_reported):
            return None
        self.recomputed_reported = found.recomputed
        prompts = f"{found.recomputed} of {found.read + found.recomputed} prompts"
        return (
            f"{self.spec.name} recomputed {prompts}, because their KV did not come from a prefill worker; the last one "
            f"was from {found.recomputed_from or 'an unknown worker'}: {found.because or 'for an unknown reason'}"
        )

    def look_at_stopped(self, pid: int, now: float, etcd: EtcdService | None) -> str | None:
        """Returns why process ``pid`` must be ended because it is stopped, or None.

        A stopped worker receives requests while its discovery records live, which over hosts is longer than an outage
        of etcd.
        """
        self.stopped_since = (self.stopped_since or now) if is_stopped(pid) else None
        if etcd is None or self.stopped_since is None or self.ended_because is not None:
            return None
        stopped_s = now - self.stopped_since
        at_most_s = etcd.host_lease_ttl_s or etcd.lease_ttl_s
        return f"it is stopped (by SIGSTOP or a debugger), for {stopped_s:.0f} s" if stopped_s > at_most_s else None

    def look_at_draining(self, now: float) -> str | None:
        """Returns why a worker that drains without trtx's request, or because its engine died, must be killed; or None.

        Such a worker ends by itself after its open requests. It is killed after ``_DRAINS_AT_MOST_S``.
        """
        if self.draining_since is None:
            self.state, self.draining_since = "draining", now
        elif now - self.draining_since > _DRAINS_AT_MOST_S:
            return f"it received a stop signal from elsewhere, and did not exit within {_DRAINS_AT_MOST_S:g} s"
        return None

    def look_at_vanished(self, pid: int, now: float, records_live_s: float) -> str | None:
        """Returns why the worker process ``pid``, whose discovery records are gone, must be killed; None: not yet.

        Unrenewed records live for ``records_live_s``.
        """
        if self.vanished_since is None:
            self.vanished_since = now
            self.unrenewed_s = None if self.renewed_at is None else max(0.0, time.time() - self.renewed_at)
        elif now - self.vanished_since >= _VANISHED_AFTER_S and self.ended_because is None:
            return f"its discovery records are gone, {self._why_vanished(pid, records_live_s)}"
        return None

    def _why_vanished(self, pid: int, records_live_s: float) -> str:
        if is_stopped(pid):
            return "because it is stopped (by SIGSTOP or a debugger) and no longer renews them"
        if self.unrenewed_s is None:
            return "for an unknown reason"
        if self.unrenewed_s < records_live_s:
            return f"{self.unrenewed_s:.0f} s after it renewed them, and this trtx did not delete them"
        return f"because it had not renewed them for {self.unrenewed_s:.0f} s: it was frozen or got no CPU time"
