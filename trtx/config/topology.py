"""What a person asks for when they ask for a topology: flags or YAML become one checked value."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

Mode = Literal["agg", "disagg"]
Role = Literal["agg", "prefill", "decode", "encode"]
RouterMode = Literal["round-robin", "random", "least-loaded", "kv"]


class TopologySpec(BaseModel):
    """Asked for, not yet resolved: ``topology.plan`` turns it and a ``Machine`` into a ``Plan``."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    model: str | None = None  # None: synthetic:tiny-trained without a GPU, synthetic:qwen3-0.6b with one
    served_model_name: str | None = None  # None: the model's own short name
    mode: Mode = "agg"
    workers: int = Field(default=1, ge=1)  # agg workers
    prefill: int = Field(default=1, ge=1)
    decode: int = Field(default=1, ge=1)
    tp: int = Field(default=1, ge=1)
    engine: str = "auto"  # auto, torch, simulated, tensorrt-llm, paced
    gpus: tuple[int, ...] | None = None  # indices into the caller's visible set; None: all of them
    host: str = "127.0.0.1"
    port: int = Field(default=8000, ge=0, le=65535)  # 0: any free port
    router_mode: RouterMode = "round-robin"
    router_args: tuple[str, ...] = ()  # further flags of dynamo.frontend; the last of a kind wins
    engine_configs: dict[Role, Path] = Field(default_factory=dict)  # role -> YAML; absent: shipped defaults
    overrides: tuple[str, ...] = ()  # "a.b=c", every role; "prefill.a.b=c", one role

    @property
    def roles(self) -> dict[Role, int]:
        """Workers of each role."""
        return {"agg": self.workers} if self.mode == "agg" else {"prefill": self.prefill, "decode": self.decode}
