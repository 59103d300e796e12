"""Keeps the processes of a plan alive: one loop that sees deaths, deletes records, restarts, and gives up in the end.

What a death leads to: its discovery records go at once, what it left behind is killed (its process group, and the
processes of its engine by recorded pid), it is
reported with its exit and the end of its log, and it is started again after a back-off. Before the topology has been
ready for the first time a death ends the launch instead: nothing is being served yet, and a retry would hide the cause.
A worker that lives but whose records have vanished (frozen past Dynamo's 10 s deadline, it never registers again) is
killed, which makes it a death like any other.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

from trtx.engine import ranks
from trtx.engine.ranks import Rank
from trtx.launch.children import Child, RealChild, describe_exit, log_tail
from trtx.launch.discovery import Registry
from trtx.launch.events import Event, EventKind
from trtx.launch.restarts import CRASH_LOOP_DEATHS, RestartPolicy
from trtx.launch.status import WorkerStatus, read_status
from trtx.topology import Plan, ProcessSpec

TICK_S = 0.05
_LOOK_EVERY_S = 0.25  # status files, registry, frontend port: a few file reads each
_VANISHED_AFTER_S = 2.0

State = Literal["starting", "loading", "serving", "restarting", "draining", "ended"]


@dataclass(frozen=True, slots=True)
class Restart:
    """One death that was answered with another start."""

    name: str
    at: float  # seconds since the epoch
    exit: str  # as describe_exit says it
    log_tail: str


@dataclass(slots=True, eq=False)
class Slot:
    """One process of the plan over all its lives."""

    spec: ProcessSpec
    child: Child | None = None
    state: State = "ended"
    started_at: float = 0.0
    restart_at: float | None = None
    worker_id: int | None = None
    was_registered: bool = False
    vanished_since: float | None = None
    had_served: bool = False
    status: WorkerStatus | None = None
    deaths: RestartPolicy = field(default_factory=RestartPolicy)


class Supervisor:
    """Owns all children of one plan. :meth:`step` is the loop's body; :meth:`start` runs it in a thread."""

    def __init__(
        self,
        plan: Plan,
        on_event: Callable[[Event], None],
        *,
        on_start: Callable[[int], None] = lambda pid: None,
        on_look: Callable[[], None] = lambda: None,
        on_ranks: Callable[[str, tuple[Rank, ...]], None] = lambda name, ranks: None,
        is_routed: Callable[[], bool] = lambda: True,
        spawn: Callable[[ProcessSpec], Child] = RealChild,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``on_event``, ``on_start`` (each pid), ``on_look`` (now and then) and ``on_ranks`` (a worker's name and the
        processes of its engine) are called from the loop's thread. ``is_routed``: the frontend counts every worker,
        which it does a moment after they serve; asked before the topology is called whole again."""
        self.slots = [Slot(spec) for spec in plan.processes]
        self.registry = Registry(plan.discovery_dir)
        self.failure: str | None = None
        self.restarts: list[Restart] = []
        self._plan = plan
        self._on_event = on_event
        self._on_start = on_start
        self._on_look = on_look
        self._on_ranks = on_ranks
        self._is_routed = is_routed
        self._spawn = spawn
        self._clock = clock
        self._next_look = 0.0
        self._has_been_ready = False
        self._is_degraded = False
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._run, name="supervisor", daemon=True)

    def start(self) -> None:
        """Starts every process at once, then watches them from a thread of its own."""
        for slot in self.slots:
            self._start(slot)
        self._thread.start()

    def end_watch(self) -> None:
        """From here on deaths are expected: nothing is restarted or reported. The children are not touched."""
        self._end.set()
        if self._thread.is_alive():
            self._thread.join()

    def mark_ready(self) -> None:
        """The topology is ready for the first time: deaths are answered with restarts from now on."""
        self._has_been_ready = True

    @property
    def is_whole(self) -> bool:
        """Every process lives and serves, and the records to delete at its death are known."""
        return all(slot.state == "serving" for slot in self.slots)

    def step(self) -> None:
        """One look at every process: deaths first, then due restarts, then registry and status."""
        now = self._clock()
        for slot in self.slots:
            if self.failure is not None:
                return
            if slot.child is not None and (code := slot.child.poll()) is not None:
                self._died(slot, slot.child, code, now)
            elif slot.restart_at is not None and now >= slot.restart_at:
                self._start(slot)
        if now >= self._next_look:
            self._next_look = now + _LOOK_EVERY_S
            self._on_look()
            self._look(now)

    def _run(self) -> None:
        try:
            while not self._end.is_set():
                self._wait()
                self.step()
        except BaseException as error:
            self.failure = (
                f"the watch over the processes ended by {error!r}, so none would be restarted; start the topology again"
            )
            raise

    def _wait(self) -> None:
        """Sleeps a tick, or until a child ends: a request that is routed to it before its records are gone fails."""
        poll = select.poll()
        for slot in self.slots:
            if slot.child is not None and (exit_fd := slot.child.exit_fd) is not None:
                poll.register(exit_fd, select.POLLIN)
        poll.poll(TICK_S * 1000)

    def _start(self, slot: Slot) -> None:
        slot.restart_at = slot.worker_id = slot.vanished_since = slot.status = None
        slot.was_registered = slot.had_served = False
        try:
            slot.child = self._spawn(slot.spec)
        except OSError as error:
            slot.state = "ended"
            self._give_up(f"{slot.spec.name} can't be started: {error}")
            return
        self._on_start(slot.child.pid)
        slot.state, slot.started_at = "starting", self._clock()
        self._emit("starting", f"{slot.spec.name} started, pid {slot.child.pid}", slot)

    def _died(self, slot: Slot, child: Child, code: int, now: float) -> None:
        # First of all: until its records are gone, requests are still sent to it.
        if slot.spec.role != "frontend":
            self._remove_records(slot, child)
        status = read_status(slot.spec.status_file, child.pid)
        child.kill_group()
        left_behind = _end_ranks_outside(status.ranks, child.pid) if status is not None else ()
        slot.child, slot.state = None, "ended"
        exit_text, tail = describe_exit(code), log_tail(slot.spec.log_path)
        when = f"after {now - slot.started_at:.0f} s" + ("" if slot.had_served else ", before it served")
        what = f"{slot.spec.name} {exit_text} {when}; log: {slot.spec.log_path}"
        if left_behind:
            pids = ", ".join(str(rank.pid) for rank in left_behind)
            what += f"; processes of its engine that outlived it were ended: pid {pids}"
        last_lines = f"; its last lines:\n{tail}" if tail else "; the log is empty"
        if not self._has_been_ready:
            self._give_up(what + last_lines)
            return
        self._emit("exited", what + last_lines, slot)
        delay = slot.deaths.record_death(now, had_served=slot.had_served)
        if delay is None:
            self._give_up(f"{slot.spec.name} died {CRASH_LOOP_DEATHS} times; the last time, {what}{last_lines}")
            return
        self.restarts.append(Restart(slot.spec.name, time.time(), exit_text, tail))
        self._is_degraded = True
        slot.state, slot.restart_at = "restarting", now + delay
        self._emit("restarting", f"{slot.spec.name} starts again in {delay:g} s", slot)

    def _remove_records(self, slot: Slot, child: Child) -> None:
        status = read_status(slot.spec.status_file, child.pid)
        worker_id = status.worker_id if status is not None and status.worker_id is not None else slot.worker_id
        if worker_id is not None:
            self.registry.remove(worker_id)

    def _look(self, now: float) -> None:
        registered = self.registry.worker_ids()
        for slot in self.slots:
            if slot.child is None:
                continue
            if slot.spec.role == "frontend":
                self._look_at_frontend(slot)
            else:
                self._look_at_worker(slot, slot.child, registered, now)
        if self._is_degraded and self.is_whole and self._is_routed():
            self._is_degraded = False
            self._emit("recovered", "the topology is whole again")

    def _look_at_frontend(self, slot: Slot) -> None:
        if slot.state == "serving":
            return
        host = "127.0.0.1" if self._plan.host == "0.0.0.0" else self._plan.host
        with contextlib.suppress(OSError), socket.create_connection((host, self._plan.port), timeout=0.2):
            self._serves(slot)

    def _look_at_worker(self, slot: Slot, child: Child, registered: set[int], now: float) -> None:
        slot.status = read_status(slot.spec.status_file, child.pid)
        if slot.status is not None:
            self._on_ranks(slot.spec.name, slot.status.ranks)
        if slot.worker_id is None:
            if slot.status is not None:
                slot.worker_id = slot.status.worker_id
            elif registered and slot.spec.status_file is None:
                claimed = {other.worker_id for other in self.slots if other.worker_id is not None}
                slot.worker_id = self.registry.owner(child.pid, claimed)
        says_serving = slot.spec.status_file is None or (slot.status is not None and slot.status.state == "serving")
        if slot.worker_id is not None and slot.worker_id in registered:
            slot.was_registered, slot.vanished_since = True, None
            if slot.state != "serving" and says_serving:
                self._serves(slot)
        elif slot.was_registered:
            self._look_at_vanished(slot, child, now)
        elif slot.status is not None:
            slot.state = "loading"

    def _look_at_vanished(self, slot: Slot, child: Child, now: float) -> None:
        if slot.vanished_since is None:
            slot.vanished_since = now
        elif now - slot.vanished_since >= _VANISHED_AFTER_S:
            self._emit(
                "vanished",
                f"{slot.spec.name} (pid {child.pid}) lives but its discovery records are gone, so no request reaches "
                "it; it was frozen or starved for more than 10 s and is being restarted",
                slot,
            )
            slot.vanished_since = now
            child.kill_group()

    def _serves(self, slot: Slot) -> None:
        slot.state, slot.had_served = "serving", True
        loaded = slot.status.load_seconds if slot.status is not None else None
        engine = "" if loaded is None else f", its engine loaded in {loaded:.1f} s"
        self._emit("serving", f"{slot.spec.name} serves after {self._clock() - slot.started_at:.1f} s{engine}", slot)

    def _give_up(self, reason: str) -> None:
        self.failure = reason
        self._emit("gave-up", f"giving up: {reason.partition(chr(10))[0]}")

    def _emit(self, kind: EventKind, message: str, slot: Slot | None = None) -> None:
        self._on_event(Event(kind, message, "" if slot is None else slot.spec.name))


def _end_ranks_outside(recorded: tuple[Rank, ...], group: int) -> tuple[Rank, ...]:
    """Ends recorded processes that are not in the process group just killed, and returns those that still lived."""
    outside = []
    for rank in recorded:
        with contextlib.suppress(ProcessLookupError):
            if os.getpgid(rank.pid) != group:
                outside.append(rank)
    return ranks.end(outside)
