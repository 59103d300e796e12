"""Judges a frontend from its log, its responses, and whether requests reach the workers. The supervisor acts on it.

A silent frontend answers no request. A blind one does not count a registered worker, which normally takes milliseconds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from trtx.launch.frontend_log import FrontendLog
from trtx.launch.logs import Log
from trtx.launch.processes import is_stopped
from trtx.launch.route import FrontendStatus
from trtx.launch.slots import Slot
from trtx.topology import Plan, ProcessSpec

STOPPED_FRONTEND_S = 10.0  # same time as a stopped worker stays registered
# longer than for a stopped one: it may only be starved of CPU, and a restart would cut off its streams
SILENT_FRONTEND_S = 60.0
UNROUTED_S = 30.0  # how long the frontend may not count workers although every process is up; normally milliseconds


@dataclass(frozen=True, slots=True)
class FrontendState:
    """The state of a frontend; ``because`` is the reason, for the user.

    - ``useless``: it serves no requests and should be restarted.
    - ``hopeless``: a restarted frontend would not serve requests either.
    - ``unproved``: something is not working yet.
    - ``proved``: requests succeed.
    """

    is_now: Literal["useless", "hopeless", "unproved", "proved"]
    because: str = ""


class FrontendWatch:
    """Watches one frontend across restarts.

    Without a ``route``, no request is sent, and it counts as proved once all processes are up.
    """

    def __init__(self, plan: Plan, spec: ProcessSpec, route: FrontendStatus | None) -> None:
        self._plan = plan
        self._spec = spec
        self._route = route
        self._log: FrontendLog | None = None
        self._whole_since: float | None = None
        self._asked_since: float | None = None

    def begin(self, log: Log) -> None:
        """Starts watching a new process and its log."""
        self._log = FrontendLog(log)

    def look(self) -> None:
        """Reads the lines that the frontend wrote to its log since the last call."""
        if self._log is not None:
            self._log.look()

    @property
    def last_error(self) -> str:
        """The last error in its log that concerns more than one request, or ""."""
        return "" if self._log is None else self._log.last_error

    @property
    def refusal(self) -> str:
        """The reason why the frontend can't serve the model, with a remedy; "" if its log does not say so."""
        if self._log is None or not self._log.refusal:
            return ""
        plan = self._plan
        return (
            f"the frontend can't serve {plan.model}: {self._log.refusal}; correct the chat template or the tokenizer "
            f"files in {plan.model_path}; log: {self._spec.log_path}"
        )

    def judge(
        self, frontend: Slot, now: float, *, is_whole: bool, is_known: bool, wants_proof: bool
    ) -> FrontendState | None:
        """Checks, after the first readiness, whether the frontend answers, counts every worker and passes a request.

        None: nothing to report. ``is_whole``: the frontend and every worker are up. ``is_known``: the registry can be
        read now, so a restarted frontend could register.
        """
        self._whole_since = (self._whole_since or now) if is_whole else None
        whole_since, route = self._whole_since, self._route
        if route is None:
            return FrontendState("proved") if wants_proof and whole_since is not None else None
        # Before the first readiness no request is sent, and workers may load for minutes while the frontend is up.
        self._asked_since = asked_since = self._asked_since or now
        route.expect(whole_since, proof=wants_proof)
        if frontend.child is None or frontend.state != "up" or frontend.ended_because is not None:
            return None
        if is_known and self._log is not None and self._log.has_lost_lease:
            return FrontendState("useless", "its lease in etcd has expired, so it lost its list of workers")
        silent_s = now - max(route.answered_at or 0.0, frontend.up_since, asked_since)
        is_frozen = silent_s > STOPPED_FRONTEND_S and is_stopped(frontend.child.pid)
        if is_frozen or silent_s > SILENT_FRONTEND_S:
            why = ": it is stopped (by SIGSTOP or a debugger)" if is_frozen else ""
            return FrontendState("useless", f"it has not answered for {silent_s:.0f} s{why}")
        return None if whole_since is None else self._judge_routing(route, whole_since, wants_proof=wants_proof)

    def _judge_routing(self, route: FrontendStatus, whole_since: float, *, wants_proof: bool) -> FrontendState | None:
        if (route.answered_at or 0.0) - max(route.routed_at or 0.0, whole_since) > UNROUTED_S:
            if not self.refusal:
                error = f"; its last error: {self.last_error}" if self.last_error else ""
                return FrontendState("useless", f"it does not count every registered worker ({route.problem}{error})")
            if route.serves:
                return FrontendState("unproved", f"requests can't be routed to every worker: {self.refusal}")
            return FrontendState("hopeless", self.refusal)
        if not wants_proof:
            return None
        if (route.proved_at or 0.0) >= whole_since:
            return FrontendState("proved", route.proof)
        if route.handoff_problem or route.request_problem:
            problem = route.handoff_problem or f"a request fails: {route.request_problem}"
            return FrontendState("unproved", f"every process is up again, but {problem}")
        return None


class DistantFrontend:
    """A frontend of another host, used by a share without a frontend to prove the topology. Its own host watches it."""

    def __init__(self, name: str, route: FrontendStatus) -> None:
        self._name = name
        self._route = route
        self._whole_since: float | None = None

    def judge(self, now: float, *, is_whole: bool, wants_proof: bool) -> FrontendState | None:
        """Like :meth:`FrontendWatch.judge`, but the result is only ``proved``, ``unproved`` or None."""
        self._whole_since = (self._whole_since or now) if is_whole else None
        whole_since, route = self._whole_since, self._route
        route.expect(whole_since if wants_proof else None, proof=wants_proof)
        if whole_since is None or not wants_proof:
            return None
        if (route.proved_at or 0.0) >= whole_since:
            return FrontendState("proved", route.proof)
        problem = route.handoff_problem or (route.request_problem and f"a request fails: {route.request_problem}")
        if not problem and now - max(route.routed_at or 0.0, whole_since) > UNROUTED_S:
            problem = f"it does not count every registered worker ({route.problem or 'it does not answer'})"
        if not problem:
            return None
        return FrontendState("unproved", f"every process here is up, but at another host's {self._name}: {problem}")


class FrontendWatches:
    """The watches of all frontends of a plan. Each is judged separately, so a lost one does not affect the others."""

    def __init__(self, plan: Plan, routes: Mapping[str, FrontendStatus]) -> None:
        """``routes``: by frontend name.

        Names that the plan, which may be a share, does not contain are other hosts' frontends.
        """
        self._watches = {spec.name: FrontendWatch(plan, spec, routes.get(spec.name)) for spec in plan.frontends}
        self._distant = [DistantFrontend(name, route) for name, route in routes.items() if name not in self._watches]

    @property
    def count(self) -> int:
        """Number of frontends that must prove that the topology works again."""
        return len(self._watches) + len(self._distant)

    def of(self, slot: Slot) -> FrontendWatch:
        return self._watches[slot.spec.name]

    @property
    def last_error(self) -> str:
        """The last error of the first frontend that has one, or ""."""
        return next((watch.last_error for watch in self._watches.values() if watch.last_error), "")

    def judge(
        self, slots: Sequence[Slot], now: float, *, lacks: bool, is_known: bool, wants_proof: bool
    ) -> list[tuple[Slot | None, FrontendState]]:
        """The judgements of all frontends with something to report, each with its slot, or None for another host's.

        ``slots``: of every process. ``lacks``: another host's workers are missing. The rest as in
        :meth:`FrontendWatch.judge`.
        """
        has_workers = not lacks and all(slot.state == "up" for slot in slots if slot.spec.role != "frontend")
        judged: list[tuple[Slot | None, FrontendState]] = []
        for slot in (slot for slot in slots if slot.spec.role == "frontend"):
            is_whole = has_workers and slot.state == "up"
            found = self.of(slot).judge(slot, now, is_whole=is_whole, is_known=is_known, wants_proof=wants_proof)
            if found is not None:
                judged.append((slot, found))
        for distant in self._distant:
            if (found := distant.judge(now, is_whole=has_workers, wants_proof=wants_proof)) is not None:
                judged.append((None, found))
        return judged
