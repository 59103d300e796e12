"""What an export serves, as a load is held against it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from trtx.checkpoint import Checkpoint


@dataclass(frozen=True, slots=True)
class Served:
    model: str  # the name that clients send
    engine: str
    engine_configs: Mapping[str, Mapping[str, Any]]  # role -> the LLM's keyword arguments
    checkpoint: Checkpoint  # as it is here, weights or not
