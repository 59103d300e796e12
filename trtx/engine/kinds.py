"""The engines that a worker can run."""

from __future__ import annotations

from typing import Literal, get_args

EngineKind = Literal["torch", "tensorrt-llm", "paced"]
ENGINE_KINDS: tuple[str, ...] = get_args(EngineKind)
