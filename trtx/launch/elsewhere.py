"""What other hosts have of the topology that this one has a share of, as the registry that they share tells it."""

from __future__ import annotations

from collections.abc import Collection

from trtx.planes.registry import Registry
from trtx.topology import Plan

_COMPONENT_OF_REST = "backend"
_COMPONENTS = {"prefill": "prefill", "encode": "encode"}  # in which a worker of each role registers; else the above


class Elsewhere:
    """Counts the workers of all hosts. On one machine nothing is elsewhere, and nothing lacks."""

    def __init__(self, whole: Plan | None, here: str) -> None:
        """``whole``: of all hosts, of which this is ``here``; None on one machine."""
        workers = () if whole is None else whole.workers
        self._roles = tuple(dict.fromkeys(worker.role for worker in workers))
        self._expected_own = sum(worker.host == here for worker in workers)
        self._expected_others = len(workers) - self._expected_own
        hosts = () if whole is None else whole.hosts
        self._address = next((host.address for host in hosts if host.name == here), "")
        self._own = self._others = 0  # that are registered, of those expected
        self._components: set[str] = set()
        self._told: tuple[int, tuple[str, ...]] | None = None

    def see(self, registered: Collection[int], registry: Registry) -> None:
        """Workers of these ids are registered now, those of this host among them. Raises OSError where ``registry``
        does not know any more where they are."""
        if not self._roles:
            return
        there = {one.worker_id: one for one in registry.instances() if one.worker_id in registered}
        own = sum(one.host == self._address for one in there.values())
        # One that is gone and whose records are not must not stand for another that lacks.
        self._own, self._others = min(own, self._expected_own), min(len(there) - own, self._expected_others)
        self._components = {one.component for one in there.values()}

    @property
    def lack(self) -> str:
        """Such as ``1 of 3 workers are registered``; empty where nothing lacks."""
        registered, expected = self._own + self._others, self._expected_own + self._expected_others
        return f"{registered} of {expected} workers are registered" if registered < expected else ""

    def loss(self) -> str | None:
        """The sentence on workers of other hosts that are gone, once for each change; else None, as where those that
        lack are this host's own, which are told as such."""
        missing = tuple(
            role for role in self._roles if _COMPONENTS.get(role, _COMPONENT_OF_REST) not in self._components
        )
        found = (self._others, missing) if self._others < self._expected_others else None
        is_news, self._told = found != self._told, found
        if found is None or not is_news:
            return None
        whose = "other hosts" if self._own == self._expected_own else "other hosts and of this one"
        follows = (
            f"no {' and no '.join(missing)} worker is left on any host, so requests are refused until there is one"
            if missing
            else "what is there serves on"
        )
        return f"workers of {whose} are gone: {self.lack}; {follows}"
