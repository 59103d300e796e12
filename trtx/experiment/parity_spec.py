"""What one run of ``trtx eval parity`` is asked to do, its record in the lock, and the topology of each route."""

from __future__ import annotations

import os
from typing import Any, Literal, get_args

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from trtx.bench.documents import problem
from trtx.checkpoint import resolve_checkpoint
from trtx.config import TopologySpec
from trtx.engine import KV_FAULT_VARIABLE
from trtx.errors import UsageError
from trtx.evals.parity import Shape
from trtx.experiment.axes import NamedTopology
from trtx.experiment.scoring_spec import MOST_CONCURRENT
from trtx.topology import Plan

Route = Literal["agg", "disagg", "kv", "migrated", "chunked"]
ROUTES: tuple[Route, ...] = get_args(Route)
REFERENCE: Route = "agg"
AGAIN = "agg-again"  # the second pass of the reference


class ParitySpec(BaseModel):
    """Field by field what was typed, defaults resolved."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str = "parity"
    routes: tuple[Route, ...] = Field(default=ROUTES, min_length=1)  # the reference is among them, first
    prompts: int = Field(default=64, ge=10, le=100_000)  # that are compared; below 10 there is no interval
    isl: int = Field(default=256, ge=4)  # tokens of the longest prompt
    osl: int = Field(default=32, ge=2)  # tokens of every answer
    concurrency: int = Field(default=8, ge=1, le=MOST_CONCURRENT)  # requests in flight
    seed: int = Field(default=0, ge=0)  # of the prompts
    max_num_tokens: int | None = Field(default=None, ge=1)  # of the route chunked; None: see chunk_tokens
    fault: str | None = None  # TRTX_FAULT, for tests: KV is corrupted on purpose
    topology: TopologySpec = Field(default_factory=lambda: TopologySpec.model_validate({"port": 0}))

    @field_validator("routes")
    @classmethod
    def _with_reference(cls, value: tuple[Route, ...]) -> tuple[Route, ...]:
        if len(set(value)) != len(value):
            twice = next(one for place, one in enumerate(value) if one in value[:place])
            raise ValueError(f"routes names {twice} twice; expected each once")
        return (REFERENCE, *(one for one in value if one != REFERENCE))

    @model_validator(mode="after")
    def _chunks_some(self) -> ParitySpec:
        if "chunked" in self.routes and self.isl <= self.chunk_tokens:
            raise ValueError(
                f"isl {self.isl} is no longer than max_num_tokens {self.chunk_tokens} of the route chunked, which "
                "would cut no prompt; expected longer prompts, a smaller max_num_tokens, or routes without chunked"
            )
        return self

    @property
    def chunk_tokens(self) -> int:
        """``max_num_tokens`` of the route chunked: what was asked, or twice as many as requests may decode at a time,
        for chunks beside them, and 32 at least."""
        return self.max_num_tokens or max(32, 2 * self.concurrency)

    @property
    def shape(self) -> Shape:
        return Shape(self.prompts, self.isl, self.osl, self.seed)

    @property
    def topologies(self) -> tuple[NamedTopology, ...]:
        """By route, in the order in which they are served."""
        return tuple(NamedTopology(route, self._topology(route)) for route in self.routes)

    def _topology(self, route: Route) -> TopologySpec:
        several = max(2, self.topology.workers)
        chunks = ("enable_chunked_prefill=true", f"max_num_tokens={self.chunk_tokens}")
        own: dict[Route, dict[str, Any]] = {
            "agg": {"mode": "agg", "workers": 1},
            "disagg": {"mode": "disagg", "workers": 1},
            "kv": {"mode": "agg", "workers": several, "router_mode": "kv"},
            "migrated": {"mode": "agg", "workers": several},
            "chunked": {"mode": "agg", "workers": 1, "overrides": (*self.topology.overrides, *chunks)},
        }
        return self.topology.model_copy(update=own[route])

    def to_json(self) -> dict[str, Any]:
        """Plain values, with the labels that routes lead to."""
        return {**self.model_dump(mode="json"), "topologies": list(self.routes)}


def parity_of(fields: dict[str, Any]) -> ParitySpec:
    """Of typed values. Raises UsageError naming the option."""
    try:
        return ParitySpec.model_validate(fields)
    except ValidationError as error:
        sentence = problem(error)
        field, space, rest = sentence.partition(" ")
        name = field.partition(".")[0]
        known = name in ParitySpec.model_fields
        raise UsageError(f"--{name.replace('_', '-')}{space}{rest}" if known else sentence) from error


def planted_fault() -> str | None:
    """What the environment asks to be wrong, for tests: this is the one verb that takes it, and tells of it."""
    return os.environ.get(KV_FAULT_VARIABLE)


def check_lengths(spec: ParitySpec, plan: Plan) -> None:
    """Raises UsageError where prompt and answer are longer than the model or a worker of ``plan`` takes."""
    asked = spec.isl + spec.osl
    context = resolve_checkpoint(str(plan.model_path)).context_length
    bounds = [(f"the context of {plan.model}", context)]
    bounds += [(f"max_seq_len of {role} workers", one.get("max_seq_len")) for role, one in plan.engine_configs.items()]
    for name, most in bounds:
        if most is not None and asked > most:
            raise UsageError(
                f"--isl {spec.isl} and --osl {spec.osl} make {asked} tokens, and {name} is {most}; ask for less"
            )


def dtype_of(plan: Plan) -> str | None:
    """That the model is computed in: what the config says, else float32 where the torch engine has no GPU, else the
    checkpoint's own; None for an engine that computes nothing."""
    if plan.engine not in ("torch", "tensorrt-llm"):
        return None
    asked = str(plan.engine_configs[REFERENCE].get("dtype") or "auto")
    if asked != "auto":
        return asked
    if plan.engine == "torch" and not plan.gpu_names:
        return "float32"
    return resolve_checkpoint(str(plan.model_path)).dtype
