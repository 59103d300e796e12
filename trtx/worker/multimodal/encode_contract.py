"""Name and version of the protocol between encode workers and their clients, so that mixed releases are detected."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

_FIELD = "contract"


class OtherRelease(Exception):
    """The message's sender runs another release of trtx or another engine."""


@dataclass(frozen=True, slots=True)
class Contract:
    """A protocol. ``version`` rises with every change that the previous version would misread."""

    name: str
    version: int

    def __str__(self) -> str:
        return f"{self.name}/{self.version}"

    def marked(self, message: Mapping[str, Any]) -> dict[str, Any]:
        return {**message, _FIELD: str(self)}

    def unmarked(self, message: Mapping[str, Any]) -> dict[str, Any]:
        """The message without the mark that :meth:`marked` added.

        Raises OtherRelease for another contract, or for none.
        """
        found = message.get(_FIELD)
        if found != str(self):
            spoken = str(found)[:40] if found is not None else "an older protocol without a name"
            raise OtherRelease(
                f"a worker speaks {spoken} with encode workers, expected {self}; run one release of trtx and one "
                "engine in all workers of a topology"
            )
        return {name: value for name, value in message.items() if name != _FIELD}
