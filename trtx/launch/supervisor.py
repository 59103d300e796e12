"""Keeps the processes of a plan alive: one loop that detects deaths, deletes records, restarts, and finally gives up.

On a death, its discovery records are deleted first. Then everything that it left behind is killed (its process group,
and its engine's processes by recorded pid), the exit and the end of the log are reported, and it is restarted after a
back-off. Before the topology has been ready for the first time, a death ends the launch instead: nothing is being
served yet, and a retry would hide the cause.

A process that is alive but can't serve requests is killed, and then handled like any other death: a worker whose
records have vanished (it never registers again), and a frontend that does not answer or does not count the registered
workers. Every reported cause was checked, and "whole again" is reported only after a real request succeeded.
"""

from __future__ import annotations

import contextlib
import logging
import select
import threading
import time
from collections.abc import Callable, Mapping
from types import MappingProxyType

from trtx.launch.children import Child, describe_exit
from trtx.launch.deaths import describe_death, end_ranks_outside
from trtx.launch.discovery import listening_ports, owner, registry_of, spawner_of
from trtx.launch.events import Event, EventKind
from trtx.launch.frontend_watch import FrontendWatches
from trtx.launch.guardian import Guardian
from trtx.launch.ports import taken
from trtx.launch.preconditions import Preconditions
from trtx.launch.remote_hosts import RemoteWorkers
from trtx.launch.restarts import CRASH_LOOP_DEATHS
from trtx.launch.route import FrontendStatus
from trtx.launch.run_directory import RunDirectory
from trtx.launch.scratch import Scratch
from trtx.launch.slots import Restart, Slot
from trtx.planes.registry import RegistryUnknown
from trtx.topology import Plan, ProcessSpec

logger = logging.getLogger(__name__)

TICK_S = 0.05
_LOOK_EVERY_S = 0.25  # interval of reading status files, registry and frontend port, which takes a few file reads each
_ROOM_EVERY_S = 1.0  # interval of retries of a delayed restart


class Supervisor:
    """Owns all children of one plan. :meth:`step` is the loop's body; :meth:`start` runs the loop in a thread."""

    def __init__(
        self,
        plan: Plan,
        on_event: Callable[[Event], None],
        *,
        guardian: Guardian | None = None,
        routes: Mapping[str, FrontendStatus] = MappingProxyType({}),
        scratch: Scratch | None = None,
        whole: Plan | None = None,
        spawn: Callable[[ProcessSpec], Child] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``on_event`` is called from the loop's thread.

        ``guardian`` gets every process, ``routes`` query the frontends (by name; for a share without a frontend, other
        hosts'), ``scratch`` holds the directory of the discovery records; without them, the corresponding checks are
        skipped. ``whole``: the plan of all hosts if ``plan`` is one host's share. ``spawn`` None: as in the plan, with
        its credentials. Raises UsageError if those can't be read.
        """
        self.slots = [Slot(spec) for spec in plan.processes]
        self.registry = registry_of(plan, lambda problem: self._emit("lost", problem))
        self.failure: str | None = None
        self.restarts: list[Restart] = []
        self.sessions: list[int] = []  # pids of all children ever started; each leads a session
        self._plan = plan
        self._on_event = on_event
        self._guardian = guardian
        self._scratch = scratch
        self._run_directory = RunDirectory(plan)
        self._start_problem = Preconditions(plan, self._run_directory, scratch)
        self._frontends = FrontendWatches(plan, routes)
        self._remote = RemoteWorkers(whole, plan.this_host)
        self._spawn = spawn or spawner_of(plan)
        self._clock = clock
        self._next_look = 0.0
        self._has_been_ready = False
        self._is_degraded = False
        self._route_problem = ""
        self._registry_problem: str | None = None  # the reported reason why the registry can't be read
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._run, name="supervisor", daemon=True)

    def start(self) -> None:
        """Starts every process, then the watching thread."""
        for slot in self.slots:
            self._start(slot)
        self._thread.start()

    def end_watch(self) -> None:
        """Stops the watch: from now on, deaths are neither reported nor followed by a restart.

        Children keep running.
        """
        self._end.set()
        if self._thread.is_alive():
            self._thread.join()

    def leave(self) -> None:
        """Removes the workers' registrations and closes the registry. Call it after all children have ended."""
        for slot in self.slots:
            if slot.worker_id is not None:
                with contextlib.suppress(OSError):  # the records expire by themselves
                    self.registry.remove(slot.worker_id)
        self.registry.close()

    def mark_ready(self) -> None:
        """Marks the first readiness of the topology: from now on, a death is followed by a restart."""
        self._has_been_ready = True

    @property
    def is_whole(self) -> bool:
        """Whether every process is up and registered, including other hosts' workers."""
        return all(slot.state == "up" for slot in self.slots) and not self.missing_workers

    @property
    def missing_workers(self) -> str:
        """What is missing on other hosts, such as ``1 of 3 workers are registered``; "" if nothing."""
        return self._remote.missing

    @property
    def frontend_error(self) -> str:
        """The last error in a running frontend's log that concerns more than one request, or ""."""
        return self._frontends.last_error

    def step(self) -> None:
        """Checks every process once: deaths first, then due restarts, then registry and status files."""
        now = self._clock()
        for slot in self.slots:
            if self.failure is not None:
                return
            if slot.child is not None and (code := slot.child.poll()) is not None:
                self._died(slot, slot.child, code, now)
            elif slot.restart_at is not None and now >= slot.restart_at:
                if (problem := self._start_problem()) is None:
                    self._start(slot)
                else:
                    self._hold_back(slot, problem, now)
        if now >= self._next_look:
            self._next_look = now + _LOOK_EVERY_S
            if self._guardian is not None:
                self._guardian.ensure_alive()
            self._look(now)

    def _run(self) -> None:
        try:
            while not self._end.is_set():
                self._wait()
                self.step()
        except BaseException as error:
            self.failure = (
                f"supervision of the processes failed with {error!r}, so none would be restarted; restart the topology"
            )
            raise

    def _wait(self) -> None:
        """Sleeps for a tick or until a child ends: a request routed to it before its records are deleted fails."""
        poll = select.poll()
        for slot in self.slots:
            if slot.child is not None and (exit_fd := slot.child.exit_fd) is not None:
                poll.register(exit_fd, select.POLLIN)
        poll.poll(TICK_S * 1000)

    def _start(self, slot: Slot) -> None:
        slot.restart_at = None
        try:
            child = self._spawn(slot.spec)
        except OSError as error:
            slot.state = "ended"
            self._restart_or_give_up(slot, f"{slot.spec.name} can't be started: {error}", str(error))
            return
        slot.begin(child, self._clock())
        if slot.spec.role == "frontend":
            self._frontends.of(slot).begin(child.log)
        self.sessions.append(child.pid)
        if self._guardian is not None:
            self._guardian.watch(child.pid)
        self._emit("starting", f"{slot.spec.name} started, pid {child.pid}", slot)

    def _hold_back(self, slot: Slot, problem: str, now: float) -> None:
        """Delays the restart of a process that could not start or register now.

        Restarting it anyway would become a crash loop, which ends the processes that still serve.
        """
        slot.restart_at = now + _ROOM_EVERY_S
        if slot.held_back_by != problem:
            slot.held_back_by = problem
            message = f"{slot.spec.name} is not started yet: {problem}, and it will start; running processes continue"
            self._emit("held-back", message, slot)

    def _died(self, slot: Slot, child: Child, code: int, now: float) -> None:
        # First, because requests are routed to it until its records are gone.
        slot.look_at_status(child)
        status = slot.status
        worker_id = status.worker_id if status is not None and status.worker_id is not None else slot.worker_id
        if worker_id is not None:
            with contextlib.suppress(OSError):
                self.registry.remove(worker_id)
        child.kill_group()
        left_behind = end_ranks_outside(status.ranks, child.pid) if status is not None else ()
        slot.child, slot.state = None, "ended"
        # A frontend that has never served may have found its HTTP port taken: name the process that uses the port.
        may_lack_port = slot.spec.role == "frontend" and not slot.had_served
        thief = taken(*self._plan.http_of(slot.spec)) if may_lack_port else None
        exit_text = describe_exit(code)
        what = describe_death(slot, child, code, now, left_behind=left_behind, thief=thief)
        self._restart_or_give_up(slot, what, exit_text)

    def _restart_or_give_up(self, slot: Slot, what: str, exit_text: str) -> None:
        if not self._has_been_ready:
            self._give_up(what)
            return
        self._emit("exited", what, slot)
        now = self._clock()
        delay = slot.deaths.record_death(now, had_served=slot.had_served)
        slot.had_served = False
        if delay is None:
            self._give_up(f"{slot.spec.name} died {CRASH_LOOP_DEATHS} times; the last time, {what}")
            return
        self.restarts.append(Restart(slot.spec.name, time.time(), exit_text))
        self._is_degraded = True
        slot.state, slot.restart_at = "restarting", now + delay
        self._emit("restarting", f"{slot.spec.name} starts again in {delay:g} s", slot)

    def _look(self, now: float) -> None:
        if (message := self._run_directory.mend()) is not None:
            self._emit("lost", message)
        if self._scratch is not None and (problem := self._scratch.problem()) is not None:
            self._start_over(self._scratch, problem)
            return
        try:
            registered = self._registered()
            for slot in self.slots:
                if slot.child is None or self.failure is not None:
                    continue
                if slot.spec.role == "frontend":
                    self._look_at_frontend(slot, slot.child)
                else:
                    self._look_at_worker(slot, slot.child, registered, now)
            if registered is not None:
                self._look_at_remote_hosts(registered)
        except OSError:  # no descriptor is free, or a file system error: unknown does not mean gone; look again later
            return
        self._look_at_routes(now, is_known=registered is not None)

    def _registered(self) -> set[int] | None:
        """Ids of the workers that are registered now. None if unknown; the other checks go on."""
        try:
            registered = self.registry.worker_ids()
        except RegistryUnknown as error:
            if self._registry_problem is None:
                self._registry_problem = str(error)
                if self._has_been_ready:
                    self._emit("lost", f"{error}; running processes continue with the workers that they know")
            return None
        if self._registry_problem is not None and self._has_been_ready:
            self._emit("found", "the registered workers are known again")
        self._registry_problem = None
        return registered

    def _start_over(self, scratch: Scratch, problem: str) -> None:
        """Recreates the scratch directory and restarts every process, as they find each other by its records.

        See :mod:`trtx.launch.scratch`.
        """
        if not self._has_been_ready:
            self._give_up(f"{problem} while the topology started, which needs it; start it again")
            return
        try:
            scratch.make_again()
        except OSError as error:
            self._give_up(
                f"{problem}, and can't be recreated ({error.strerror}): without it no request finds a worker; "
                "start the topology again, with TMPDIR where nothing else cleans up"
            )
            return
        self._emit("lost", f"{problem}: no request can find a worker without it, so every process is started again")
        for slot in self.slots:
            if slot.child is not None:
                self._kill(slot, slot.child, problem)

    def _kill(self, slot: Slot, child: Child, because: str) -> None:
        slot.ended_because = because
        child.kill_group()

    def _look_at_remote_hosts(self, registered: set[int]) -> None:
        """Reports lost workers of other hosts. Their own host restarts them; this one proves the recovery."""
        self._remote.see(registered, self.registry)
        if self._has_been_ready and (message := self._remote.loss()) is not None:
            self._is_degraded = True
            self._emit("lost", message)

    def _look_at_frontend(self, slot: Slot, child: Child) -> None:
        watch = self._frontends.of(slot)
        watch.look()
        if watch.refusal and not self._has_been_ready:
            self._give_up(watch.refusal)
        # Checks its own listening sockets, because another process may have taken the port since it was chosen.
        port = self._plan.http_of(slot.spec)[1]
        if slot.state != "up" and port in listening_ports(child.pid):
            self._is_up(slot, f"listens on port {port}")

    def _look_at_worker(self, slot: Slot, child: Child, registered: set[int] | None, now: float) -> None:
        if (message := slot.look_at_status(child)) is not None:
            self._emit("lost", message, slot)
        if (message := slot.look_at_handoffs()) is not None:
            self._emit("recomputed", message, slot)
        if slot.status is not None:
            if self._guardian is not None:
                self._guardian.watch_ranks(slot.spec.name, slot.status.ranks)
            if slot.status.state == "asleep":
                if slot.state != "asleep":
                    slot.state = "asleep"
                    self._emit("asleep", f"{slot.spec.name} has left routing: it sleeps, or gets new weights", slot)
                return
            if slot.status.state == "draining":
                if (why := slot.look_at_draining(now)) is not None:
                    self._kill(slot, child, why)
                return
        if slot.worker_id is None and slot.status is not None:
            slot.worker_id = slot.status.worker_id
        if slot.worker_id is not None and self._guardian is not None:
            self._guardian.watch_worker(slot.spec.name, slot.worker_id)
        if registered is None:
            if slot.state != "up" and slot.status is not None:
                slot.state = "loading"
            return
        if slot.worker_id is None and registered:  # no status file, or an incomplete one
            claimed = {other.worker_id for other in self.slots if other.worker_id is not None}
            slot.worker_id = owner(self.registry, child.pid, claimed)
        if slot.worker_id is not None and slot.worker_id in registered:
            slot.was_registered, slot.vanished_since = True, None
            slot.renewed_at = self.registry.renewed_at(slot.worker_id) or slot.renewed_at
            # a worker reports "serving" before it registers, so a status that says otherwise is out of date
            if slot.state != "up":
                self._is_up(slot, "is registered")
            if (why := slot.look_at_stopped(child.pid, now, self._plan.etcd)) is not None:
                self._restart_useless(slot, child, why)
        elif slot.was_registered:
            if (why := slot.look_at_vanished(child.pid, now, self.registry.records_live_s)) is not None:
                self._restart_useless(slot, child, why)
        elif slot.status is not None:
            slot.state = "loading"

    def _restart_useless(self, slot: Slot, child: Child, because: str) -> None:
        self._emit("vanished", f"{slot.spec.name} (pid {child.pid}) is alive, but {because}; it is started again", slot)
        self._kill(slot, child, because)

    def _look_at_routes(self, now: float, *, is_known: bool) -> None:
        if not self._has_been_ready:
            return
        states = self._frontends.judge(
            self.slots, now, lacks=bool(self._remote.missing), is_known=is_known, wants_proof=self._is_degraded
        )
        for slot, judged in states:
            if judged.is_now == "useless" and slot is not None and slot.child is not None:
                self._restart_useless(slot, slot.child, judged.because)
            elif judged.is_now == "hopeless":
                self._give_up(judged.because)
        proved = [judged.because for _, judged in states if judged.is_now == "proved"]
        if unproved := [judged.because for _, judged in states if judged.is_now == "unproved"]:
            self._report_route("; ".join(unproved))
        if self._is_degraded and self.is_whole and len(proved) == self._frontends.count:
            self._is_degraded, self._route_problem = False, ""
            message = proved[0] if proved else ""
            self._emit("recovered", "the topology is whole again" + (message and f": {message}"))

    def _report_route(self, message: str) -> None:
        if message != self._route_problem:
            self._route_problem = message
            self._emit("unproved", message)

    def _is_up(self, slot: Slot, what: str) -> None:
        if slot.state == "asleep":
            slot.state = "up"
            self._emit("up", f"{slot.spec.name} is awake, and back in routing", slot)
            return
        slot.state, slot.had_served, slot.up_since = "up", True, self._clock()
        loaded = slot.status.load_seconds if slot.status is not None else None
        engine = "" if loaded is None else f", its engine loaded in {loaded:.1f} s"
        self._emit("up", f"{slot.spec.name} {what} after {slot.up_since - slot.started_at:.1f} s{engine}", slot)

    def _give_up(self, reason: str) -> None:
        self.failure = reason
        self._emit("gave-up", f"giving up: {reason.partition(chr(10))[0]}")

    def _emit(self, kind: EventKind, message: str, slot: Slot | None = None) -> None:
        try:
            self._on_event(Event(kind, message, "" if slot is None else slot.spec.name))
        except Exception:  # a failing listener must not end the watch
            logger.exception("an event could not be reported: %s", message)
