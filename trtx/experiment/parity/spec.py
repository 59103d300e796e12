"""The specification of a ``trtx eval parity`` run, its form in the manifest, and the topology of each route."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, Literal, get_args

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from trtx.bench.documents import problem
from trtx.checkpoint import read_model_config, resolve_checkpoint
from trtx.config import TopologySpec
from trtx.engine import KV_FAULT_VARIABLE, MODEL_ENGINES, parse_kv_fault
from trtx.errors import UsageError
from trtx.evals.parity import RequestShape
from trtx.evals.parity.gate import EPSILON
from trtx.experiment.bench.axes import NamedTopology
from trtx.experiment.bench.spec import Attach
from trtx.experiment.directory import read_manifest
from trtx.experiment.scoring_spec import MOST_CONCURRENT
from trtx.topology import Plan

Route = Literal["agg", "disagg", "kv", "migrated", "chunked", "speculating"]
SPECULATING: Route = "speculating"
ROUTES: tuple[Route, ...] = tuple(route for route in get_args(Route) if route != SPECULATING)  # needs a config with it
REFERENCE: Route = "agg"
AGAINST, URL = "against", "url"  # labels with --url: the reference, and the compared server
AGAIN = "-again"  # suffix of the reference's label for its second pass
Dtype = Literal["float32", "bfloat16", "float16"]


class ParitySpec(BaseModel):
    """The typed options, with defaults resolved."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str = "parity"
    routes: tuple[Route, ...] = ROUTES  # includes the reference, which comes first; empty with ``attach``
    prompts: int = Field(default=64, ge=10, le=100_000)  # number to compare; with fewer than 10 there is no interval
    isl: int = Field(default=256, ge=4)  # tokens of the longest prompt
    osl: int = Field(default=32, ge=2)  # tokens of every answer
    concurrency: int = Field(default=8, ge=1, le=MOST_CONCURRENT)  # requests in flight
    seed: int = Field(default=0, ge=0)  # for the prompts
    max_num_tokens: int | None = Field(default=None, ge=1)  # for the route chunked; None: see chunk_tokens
    fault: str | None = None  # TRTX_FAULT, which corrupts KV for tests
    topology: TopologySpec = Field(default_factory=lambda: TopologySpec.model_validate({"port": 0}))
    attach: Attach | None = None  # a server that is compared instead of routes
    against: Attach | None = None  # the reference server; None with ``attach``: ``topology``, served aggregated
    dtype: Dtype | None = None  # compute dtype of both sides, with ``attach``; None: unknown

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
            raise ValueError("either routes or an attached server is compared; expected exactly one of them")
        if self.attach is None and (self.against or self.dtype):
            raise ValueError(
                "against and dtype have no effect without an attached server; add attach, or leave them out"
            )
        if self.attach is not None and self.max_num_tokens is not None:
            raise ValueError("max_num_tokens belongs to the route chunked, but a server is attached; leave it out")
        if self.attach is not None and self.fault is not None:
            raise ValueError(
                f"{KV_FAULT_VARIABLE} is set, but a fault can't be injected into a running server; unset it"
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
        """``max_num_tokens`` of the route chunked: the given value, or twice the number of concurrent requests, but at
        least 32.

        The default leaves room for chunks next to the decoding requests.
        """
        return self.max_num_tokens or max(32, 2 * self.concurrency)

    @property
    def promises_bits(self) -> bool:
        """Whether every route must reproduce the reference bitwise. This can't be expected of an attached server."""
        return self.topology.deterministic and self.attach is None

    @property
    def shape(self) -> RequestShape:
        return RequestShape(self.prompts, self.isl, self.osl, self.seed)

    @property
    def labels(self) -> tuple[str, ...]:
        """Labels of routes or servers, starting with the reference."""
        return self.routes if self.attach is None else (AGAINST, URL)

    @property
    def passes(self) -> dict[str, str]:
        """Each pass in order, with the label of its route or server. The reference has two passes."""
        reference, *others = self.labels
        return {reference: reference, f"{reference}{AGAIN}": reference, **{label: label for label in others}}

    @property
    def attached(self) -> dict[str, Attach]:
        """The attached servers by label."""
        found = {AGAINST: self.against, URL: self.attach}
        return {label: one for label, one in found.items() if one is not None}

    @property
    def topologies(self) -> tuple[NamedTopology, ...]:
        """The topologies, in the order in which trtx serves them."""
        served = [label for label in self.labels if label not in self.attached]
        return tuple(NamedTopology(label, self._topology(label)) for label in served)

    def _topology(self, label: str) -> TopologySpec:
        several = max(2, self.topology.workers)
        chunks = ("enable_chunked_prefill=true", f"max_num_tokens={self.chunk_tokens}")
        plain = ("speculative_config=null",) if SPECULATING in self.routes else ()
        own: dict[str, dict[str, Any]] = {
            "agg": {"mode": "agg", "workers": 1, "overrides": (*self.topology.overrides, *plain)},
            AGAINST: {"mode": "agg", "workers": 1},
            "disagg": {"mode": "disagg", "workers": 1},
            "kv": {"mode": "agg", "workers": several, "router_mode": "kv"},
            "migrated": {"mode": "agg", "workers": several},
            "chunked": {"mode": "agg", "workers": 1, "overrides": (*self.topology.overrides, *chunks)},
            SPECULATING: {"mode": "agg", "workers": 1},
        }
        return self.topology.model_copy(update=own[label])

    def to_json(self) -> dict[str, Any]:
        """Plain values, including the labels that result from the routes."""
        return {**self.model_dump(mode="json"), "topologies": list(self.labels)}


def parity_of(fields: dict[str, Any]) -> ParitySpec:
    """Validates typed values. Raises UsageError that names the option."""
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


_OPTIONS = {"attach": URL}  # for fields whose option has a different name


def read_parity_spec(run_dir: Path) -> ParitySpec:
    """Reads the spec from a run's manifest. Raises UsageError if it isn't a run of ``trtx eval parity``, or is
    unreadable.
    """
    return read_manifest(run_dir, "trtx eval parity", ParitySpec)


def planted_fault() -> str | None:
    """The fault that the environment requests for tests. Only ``trtx eval parity`` accepts and reports it."""
    return os.environ.get(KV_FAULT_VARIABLE)


def check_speculation(plan: Plan) -> None:
    """Raises UsageError if ``plan``, of the route speculating, has an engine config that does not speculate."""
    if not any(one.get("speculative_config") for one in plan.engine_configs.values()):
        raise UsageError(
            "the route speculating needs an engine config with speculative_config; name one with --recipe, --config or "
            "--set, or leave the route out"
        )


def check_fault(fault: str, plan: Plan) -> None:
    """Raises UsageError if no worker of ``plan`` can inject ``fault``."""
    asked = parse_kv_fault(fault)
    if plan.engine != "torch":
        raise UsageError(f"{KV_FAULT_VARIABLE} is {fault}, but engine {plan.engine} can't inject a fault; use torch")
    layers = read_model_config(plan.model_path).num_layers
    if asked.layer >= layers:
        raise UsageError(
            f"{KV_FAULT_VARIABLE} is {fault}, and {plan.model} has {layers} layers; expected a layer from 0 to "
            f"{layers - 1}"
        )


def check_lengths(spec: ParitySpec, plan: Plan) -> None:
    """Raises UsageError if prompt and answer exceed the limit of the model or of a worker of ``plan``."""
    asked = spec.isl + spec.osl
    context = resolve_checkpoint(str(plan.model_path)).context_by(plan.engine)
    bounds = [(f"the context length of {plan.model}", context)]
    bounds += [(f"max_seq_len of {role} workers", one.get("max_seq_len")) for role, one in plan.engine_configs.items()]
    for name, most in bounds:
        if most is not None and asked > most:
            raise UsageError(
                f"--isl {spec.isl} and --osl {spec.osl} make {asked} tokens, but {name} is {most}; lower them"
            )


def dtype_of(plan: Plan) -> str | None:
    """The compute dtype of a plan; None for an engine that computes nothing.

    It is the configured one, else float32 for the torch engine without a GPU, else the checkpoint's.
    """
    if plan.engine not in MODEL_ENGINES:
        return None
    asked = str(plan.engine_configs["agg"].get("dtype") or "auto")
    if asked != "auto":
        return asked
    if plan.engine == "torch" and not plan.gpu_names:
        return "float32"
    return resolve_checkpoint(str(plan.model_path)).dtype


def widest_dtype(*dtypes: str | None) -> str | None:
    """The dtype with the largest rounding error; None if one is unknown or has no known rounding error."""
    known = [one for one in dtypes if one in EPSILON]
    return max(known, key=lambda one: EPSILON[one]) if len(known) == len(dtypes) else None
