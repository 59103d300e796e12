"""What an encode worker and those who ask it agree on, by name and version: a mix of releases is told, not guessed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

_FIELD = "contract"


class OtherRelease(Exception):
    """Who sent the message is of another release of trtx, or runs another engine."""


@dataclass(frozen=True, slots=True)
class Contract:
    """``version`` rises with whatever in a message one of the version before would take for something else."""

    name: str
    version: int

    def __str__(self) -> str:
        return f"{self.name}/{self.version}"

    def marked(self, message: Mapping[str, Any]) -> dict[str, Any]:
        return {**message, _FIELD: str(self)}

    def unmarked(self, message: Mapping[str, Any]) -> dict[str, Any]:
        """What :meth:`marked` got. Raises OtherRelease for a message of another contract, or of none."""
        found = message.get(_FIELD)
        if found != str(self):
            told = str(found)[:40] if found is not None else "a contract from before they had names"
            raise OtherRelease(
                f"a worker speaks {told} with encode workers, expected {self}; run one release of trtx and one engine "
                "in all workers of a topology"
            )
        return {name: value for name, value in message.items() if name != _FIELD}
