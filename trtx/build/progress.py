"""How far a build is: what the child says on its pipe, and what the command shows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

Phase = Literal["waiting", "starting", "loading", "calibrating", "exporting", "proving"]


@dataclass(frozen=True, slots=True)
class Progress:
    """``done`` of ``total`` steps of a phase; a ``total`` of 0 means that they can't be counted."""

    phase: Phase
    done: int = 0
    total: int = 0


Listener = Callable[[Progress], None]
