"""What one run of ``trtx eval parity`` is asked to do, its record in the lock, and the topology of each route."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, Literal, get_args

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from trtx.bench.documents import problem
from trtx.checkpoint import read_model_config, resolve_checkpoint
from trtx.config import TopologySpec
from trtx.engine import KV_FAULT_VARIABLE, parse_kv_fault
from trtx.errors import UsageError
from trtx.evals.parity import Shape
from trtx.evals.parity.gate import EPSILON
from trtx.experiment.bench.axes import NamedTopology
from trtx.experiment.bench.spec import Attach
from trtx.experiment.directory import PROVENANCE
from trtx.experiment.scoring_spec import MOST_CONCURRENT
from trtx.runs.forms import LOCK
from trtx.topology import Plan

Route = Literal["agg", "disagg", "kv", "migrated", "chunked"]
ROUTES: tuple[Route, ...] = get_args(Route)
REFERENCE: Route = "agg"
AGAINST, URL = "against", "url"  # with --url: what is held against, and what is held against it
AGAIN = "-again"  # behind the reference's label: its second pass
Dtype = Literal["float32", "bfloat16", "float16"]


class ParitySpec(BaseModel):
    """Field by field what was typed, defaults resolved."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str = "parity"
    routes: tuple[Route, ...] = ROUTES  # the reference is among them, first; none with ``attach``
    prompts: int = Field(default=64, ge=10, le=100_000)  # that are compared; below 10 there is no interval
    isl: int = Field(default=256, ge=4)  # tokens of the longest prompt
    osl: int = Field(default=32, ge=2)  # tokens of every answer
    concurrency: int = Field(default=8, ge=1, le=MOST_CONCURRENT)  # requests in flight
    seed: int = Field(default=0, ge=0)  # of the prompts
    max_num_tokens: int | None = Field(default=None, ge=1)  # of the route chunked; None: see chunk_tokens
    fault: str | None = None  # TRTX_FAULT, for tests: KV is corrupted on purpose
    topology: TopologySpec = Field(default_factory=lambda: TopologySpec.model_validate({"port": 0}))
    attach: Attach | None = None  # a server that is compared in place of routes
    against: Attach | None = None  # what it is held against; None beside ``attach``: ``topology``, served aggregated
    dtype: Dtype | None = None  # that both are computed in, with ``attach``; None: nobody said

    @field_validator("routes")
    @classmethod
    def _with_reference(cls, value: tuple[Route, ...]) -> tuple[Route, ...]:
        if len(set(value)) != len(value):
            twice = next(one for place, one in enumerate(value) if one in value[:place])
            raise ValueError(f"routes names {twice} twice; expected each once")
        return (REFERENCE, *(one for one in value if one != REFERENCE)) if value else ()

    @model_validator(mode="after")
    def _compares_something(self) -> ParitySpec:
        if bool(self.routes) == (self.attach is not None):
            raise ValueError("routes are served, or a server is attached; expected one of both")
        if self.attach is None and (self.against or self.dtype):
            raise ValueError("against and dtype are of a server that is attached; expected attach")
        if self.attach is not None and self.max_num_tokens is not None:
            raise ValueError("max_num_tokens is of the route chunked, and a server is attached; leave it out")
        if self.attach is not None and self.fault is not None:
            raise ValueError(
                f"{KV_FAULT_VARIABLE} is set, and no fault reaches a server that is running already; unset it"
            )
        return self

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
    def promises_bits(self) -> bool:
        """Every route has to give the reference's bits. Nobody promises that of a server that is attached."""
        return self.topology.deterministic and self.attach is None

    @property
    def shape(self) -> Shape:
        return Shape(self.prompts, self.isl, self.osl, self.seed)

    @property
    def labels(self) -> tuple[str, ...]:
        """What is asked, the reference first."""
        return self.routes if self.attach is None else (AGAINST, URL)

    @property
    def passes(self) -> dict[str, str]:
        """Each pass, in its order, and the label of what is asked: the reference twice."""
        reference, *others = self.labels
        return {reference: reference, f"{reference}{AGAIN}": reference, **{label: label for label in others}}

    @property
    def attached(self) -> dict[str, Attach]:
        """By label, what is running already."""
        found = {AGAINST: self.against, URL: self.attach}
        return {label: one for label, one in found.items() if one is not None}

    @property
    def topologies(self) -> tuple[NamedTopology, ...]:
        """By label, in the order in which trtx serves them."""
        served = [label for label in self.labels if label not in self.attached]
        return tuple(NamedTopology(label, self._topology(label)) for label in served)

    def _topology(self, label: str) -> TopologySpec:
        several = max(2, self.topology.workers)
        chunks = ("enable_chunked_prefill=true", f"max_num_tokens={self.chunk_tokens}")
        own: dict[str, dict[str, Any]] = {
            "agg": {"mode": "agg", "workers": 1},
            AGAINST: {"mode": "agg", "workers": 1},
            "disagg": {"mode": "disagg", "workers": 1},
            "kv": {"mode": "agg", "workers": several, "router_mode": "kv"},
            "migrated": {"mode": "agg", "workers": several},
            "chunked": {"mode": "agg", "workers": 1, "overrides": (*self.topology.overrides, *chunks)},
        }
        return self.topology.model_copy(update=own[label])

    def to_json(self) -> dict[str, Any]:
        """Plain values, with the labels that routes lead to."""
        return {**self.model_dump(mode="json"), "topologies": list(self.labels)}


def parity_of(fields: dict[str, Any]) -> ParitySpec:
    """Of typed values. Raises UsageError naming the option."""
    try:
        return ParitySpec.model_validate(fields)
    except ValidationError as error:
        sentence, where = problem(error), error.errors()[0]["loc"]
        if where[:1] in (("attach",), ("against",)) and sentence.startswith("url "):
            raise UsageError(f"--{_OPTIONS.get(str(where[0]), where[0])} {sentence.removeprefix('url ')}") from error
        field, space, rest = sentence.partition(" ")
        name = field.partition(".")[0]
        known = name in ParitySpec.model_fields
        option = _OPTIONS.get(name, name.replace("_", "-"))
        raise UsageError(f"--{option}{space}{rest}" if known else sentence) from error


_OPTIONS = {"attach": URL}  # field -> option, where they differ


def read_parity_spec(run_dir: Path) -> ParitySpec:
    """Of a run's lock. Raises UsageError where it is none of ``trtx eval parity``, or can't be read."""
    if not (run_dir / LOCK.file).exists():
        raise UsageError(f"{run_dir} is no run directory, it has no {LOCK.file}; expected one of trtx eval parity")
    fields = LOCK.load(run_dir)
    if "routes" not in fields:
        raise UsageError(f"{run_dir} is no run of trtx eval parity; go on with it by the verb that began it")
    asked = {name: value for name, value in fields.items() if name not in (PROVENANCE, "topologies")}
    return LOCK.restored(asked, ParitySpec, str(run_dir / LOCK.file))


def planted_fault() -> str | None:
    """What the environment asks to be wrong, for tests: this is the one verb that takes it, and tells of it."""
    return os.environ.get(KV_FAULT_VARIABLE)


def check_fault(fault: str, plan: Plan) -> None:
    """Raises UsageError where no worker of ``plan`` could ever do what ``fault`` asks."""
    asked = parse_kv_fault(fault)
    if plan.engine != "torch":
        raise UsageError(f"{KV_FAULT_VARIABLE} is {fault}, and engine {plan.engine} knows no fault; choose torch")
    layers = read_model_config(plan.model_path).num_layers
    if asked.layer >= layers:
        raise UsageError(
            f"{KV_FAULT_VARIABLE} is {fault}, and {plan.model} has {layers} layers; expected a layer from 0 to "
            f"{layers - 1}"
        )


def check_lengths(spec: ParitySpec, plan: Plan) -> None:
    """Raises UsageError where prompt and answer are longer than the model or a worker of ``plan`` takes."""
    asked = spec.isl + spec.osl
    context = resolve_checkpoint(str(plan.model_path)).context_by(plan.engine)
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
    asked = str(plan.engine_configs["agg"].get("dtype") or "auto")
    if asked != "auto":
        return asked
    if plan.engine == "torch" and not plan.gpu_names:
        return "float32"
    return resolve_checkpoint(str(plan.model_path)).dtype


def widest_dtype(*dtypes: str | None) -> str | None:
    """The one that rounds most; None where one is not known, or not of those whose rounding is."""
    known = [one for one in dtypes if one in EPSILON]
    return max(known, key=lambda one: EPSILON[one]) if len(known) == len(dtypes) else None
