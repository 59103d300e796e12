"""Watches the workers of other hosts in the shared registry, for the share of a topology on this host."""

from __future__ import annotations

from collections.abc import Collection

from trtx.planes.registry import Registry
from trtx.topology import Plan

_COMPONENT_OF_REST = "backend"
# component in which each role's workers register; all others use _COMPONENT_OF_REST
_COMPONENTS = {"prefill": "prefill", "encode": "encode"}


class RemoteWorkers:
    """Counts the registered workers of all hosts. For a topology on one machine it expects none and reports nothing."""

    def __init__(self, whole: Plan | None, here: str) -> None:
        """``whole``: the plan of all hosts, including ``here``; None if the topology runs on one machine."""
        workers = () if whole is None else whole.workers
        self._roles = tuple(dict.fromkeys(worker.role for worker in workers))
        self._expected_own = sum(worker.host == here for worker in workers)
        self._expected_others = len(workers) - self._expected_own
        hosts = () if whole is None else whole.hosts
        self._address = next((host.address for host in hosts if host.name == here), "")
        self._own = self._others = 0  # registered workers, at most as many as expected
        self._components: set[str] = set()
        self._reported: tuple[int, tuple[str, ...]] | None = None

    def see(self, registered: Collection[int], registry: Registry) -> None:
        """Updates the counts: ``registered`` are the ids of all workers that are registered now, including this host's.

        Raises OSError if ``registry`` no longer knows their addresses.
        """
        if not self._roles:
            return
        there = {one.worker_id: one for one in registry.instances() if one.worker_id in registered}
        own = sum(one.host == self._address for one in there.values())
        # Capped per side: a dead worker whose records still exist must not hide a missing one.
        self._own, self._others = min(own, self._expected_own), min(len(there) - own, self._expected_others)
        self._components = {one.component for one in there.values()}

    @property
    def missing(self) -> str:
        """A message such as ``1 of 3 workers are registered``; empty if no worker is missing."""
        registered, expected = self._own + self._others, self._expected_own + self._expected_others
        return f"{registered} of {expected} workers are registered" if registered < expected else ""

    def loss(self) -> str | None:
        """A message about lost workers of other hosts, once per change; else None.

        Also None if only this host's own workers are missing, because they are reported separately.
        """
        missing = tuple(
            role for role in self._roles if _COMPONENTS.get(role, _COMPONENT_OF_REST) not in self._components
        )
        found = (self._others, missing) if self._others < self._expected_others else None
        is_news, self._reported = found != self._reported, found
        if found is None or not is_news:
            return None
        whose = "other hosts" if self._own == self._expected_own else "other hosts and of this one"
        follows = (
            f"no {' and no '.join(missing)} worker is left on any host, so requests are refused until there is one"
            if missing
            else "the remaining workers continue to serve"
        )
        return f"workers of {whose} are gone: {self.missing}; {follows}"
