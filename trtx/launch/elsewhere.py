"""What other hosts have of the topology that this one has a share of, as the registry that they share tells it."""

from __future__ import annotations


class Elsewhere:
    """Counts the workers of all hosts. On one machine nothing is elsewhere, and nothing lacks."""

    def __init__(self, expected: int) -> None:
        """``expected``: workers of all hosts; 0 on one machine."""
        self._expected = expected
        self._registered = 0
        self._told = ""

    def see(self, registered: int) -> None:
        """So many are registered now, those of this host among them."""
        self._registered = registered

    @property
    def lack(self) -> str:
        """Such as ``1 of 3 workers are registered``; empty where nothing lacks."""
        if self._registered >= self._expected:
            return ""
        return f"{self._registered} of {self._expected} workers are registered"

    def loss(self, *, own_are_up: bool) -> str | None:
        """The sentence on workers of other hosts that are gone, once for each change; else None. Where some of this
        host are not up, what lacks may be those, which are told as such."""
        if self.lack == self._told or (self.lack and not own_are_up):
            return None
        self._told = self.lack
        return f"workers of other hosts are gone: {self.lack}; what is there serves on" if self.lack else None
