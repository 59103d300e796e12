"""A registry for callers that must not wait for the network: a thread queries it, and callers get the last result.

The supervisor checks a topology's processes four times a second, and each delay in noticing a dead worker costs
requests, but a request to etcd may take seconds to fail. A removal is retried until it succeeds or the worker's records
have expired: after an outage, etcd may still hold a dead worker's lease.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from trtx.planes.registry import Card, Instance, Registry, RegistryUnknown

LOOKS_EVERY_S = 0.25
_FAILS_EVERY_S = 0.5  # interval of queries and removals after a failure
_LEASES_EVERY_S = 2.0
_CLOSES_WITHIN_S = 1.0


@dataclass(slots=True)
class _Seen:
    """The result of the last query, or why it failed."""

    instances: list[Instance] = field(default_factory=list)
    worker_ids: set[int] = field(default_factory=set)
    problem: str | None = "it has not been queried yet"


class WatchedRegistry:
    """Wraps ``registry`` with a thread. See :class:`~trtx.planes.registry.Registry`.

    Reads return the result of the last query, or raise RegistryUnknown if it failed, so that outdated results are never
    returned as current. ``cards`` queries the registry directly.
    """

    def __init__(self, registry: Registry, on_problem: Callable[[str], None] = lambda problem: None) -> None:
        """Sends no request before the first call.

        ``on_problem``: called from the thread, with a message, when the registry answers queries but a dead worker
        can't be removed. A repeated reason is reported once.
        """
        self._registry = registry
        self._on_problem = on_problem
        self._told = ""
        self._seen = _Seen()
        self._renewed: dict[int, float | None] = {}
        self._wants_renewed: set[int] = set()
        self._renewed_next = 0.0
        self._to_remove: dict[int, float] = {}  # worker id -> time until which the removal is retried
        self._removed: set[int] = set()
        self._lock = threading.Lock()
        self._news = threading.Event()
        self._is_closed = self._was_started = False
        self._thread = threading.Thread(target=self._run, name="registry", daemon=True)

    @property
    def records_live_s(self) -> float:
        return self._registry.records_live_s

    @property
    def problem(self) -> str | None:
        """The reason why the registry's state is unknown now, or None."""
        return self._seen.problem

    def instances(self) -> list[Instance]:
        return [instance for instance in self._known().instances if instance.worker_id not in self._removed]

    def worker_ids(self) -> set[int]:
        return self._known().worker_ids - self._removed

    def cards(self) -> list[Card]:
        return self._registry.cards()

    def renewed_at(self, worker_id: int) -> float | None:
        self._known()
        with self._lock:
            self._wants_renewed.add(worker_id)
            return self._renewed.get(worker_id)

    def remove(self, worker_id: int) -> None:
        """Schedules the removal and returns at once. Never raises."""
        with self._lock:
            self._removed.add(worker_id)
            self._wants_renewed.discard(worker_id)
            self._to_remove[worker_id] = time.monotonic() + self.records_live_s + _CLOSES_WITHIN_S
        self._ensure_asking()
        self._news.set()

    def close(self) -> None:
        """Completes pending removals if that takes at most a second, then stops the thread."""
        deadline = time.monotonic() + _CLOSES_WITHIN_S
        while self._to_remove and self._thread.is_alive() and time.monotonic() < deadline:
            self._news.set()
            time.sleep(0.01)
        self._is_closed = True
        self._news.set()
        if self._thread.is_alive():
            self._thread.join(timeout=_CLOSES_WITHIN_S)
        self._registry.close()

    def _ensure_asking(self) -> None:
        with self._lock:
            if not (self._is_closed or self._was_started):
                self._was_started = True
                self._thread.start()

    def _known(self) -> _Seen:
        self._ensure_asking()
        seen = self._seen
        if seen.problem is not None:
            raise RegistryUnknown(f"the registered workers are unknown: {seen.problem}")
        return seen

    def _run(self) -> None:
        while not self._is_closed:
            # Cleared before the work, so that a removal that is requested during the work starts the next turn at once.
            self._news.clear()
            problem = self._remove()
            is_known = self._look()
            if problem is not None and is_known and problem != self._told:
                self._told = problem
                self._on_problem(
                    f"the router still sends requests to a dead worker, whose record can't be removed: {problem}"
                )
            self._news.wait(LOOKS_EVERY_S if is_known and problem is None else _FAILS_EVERY_S)

    def _remove(self) -> str | None:
        """Tries all pending removals. Returns the reason if one failed, else None."""
        with self._lock:
            due = dict(self._to_remove)
        problem = None
        for worker_id, until in due.items():
            try:
                self._registry.remove(worker_id)
            except OSError as error:
                problem = str(error)
                if time.monotonic() < until:
                    continue
            with self._lock:
                self._to_remove.pop(worker_id, None)
        return problem

    def _look(self) -> bool:
        try:
            self._seen = _Seen(self._registry.instances(), self._registry.worker_ids(), None)
            if time.monotonic() >= self._renewed_next:
                self._renewed_next = time.monotonic() + _LEASES_EVERY_S
                self._look_at_leases()
        except OSError as error:
            self._seen = _Seen(problem=str(error))
            return False
        return True

    def _look_at_leases(self) -> None:
        with self._lock:
            wanted = set(self._wants_renewed)
        renewed = {worker_id: self._registry.renewed_at(worker_id) for worker_id in wanted}
        with self._lock:
            self._renewed = renewed
