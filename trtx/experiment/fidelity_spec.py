"""The specification of a ``trtx eval fidelity`` run, and its form in the manifest."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from trtx.bench.documents import problem
from trtx.config import Mode, TopologySpec
from trtx.config.topology import Name
from trtx.errors import UsageError
from trtx.evals.fidelity.prompts import DEFAULT_COUNT, MOST
from trtx.experiment.bench.axes import NamedTopology, expand
from trtx.experiment.bench.spec import ATTACHED, Attach
from trtx.experiment.directory import PROVENANCE
from trtx.experiment.scoring_spec import MOST_CONCURRENT, as_option, refuse_twice
from trtx.runs.forms import LOCK

_NO_PROBABILITIES = ("simulated", "paced")


class FidelitySpec(BaseModel):
    """The typed options, with defaults resolved."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str = "fidelity"
    check: Literal["fidelity"] = "fidelity"  # the trtx eval check that the run performs
    reference: Name | None = None  # None: the checkpoint from which the engine was built, else the model itself
    # Number of prompts to generate; None: those of the file.
    prompts: Annotated[int, Field(ge=1, le=MOST)] | None = DEFAULT_COUNT
    prompt_file: Path | None = None
    osl: int = Field(default=64, ge=1, le=32_768)  # maximum tokens of the reference's text after each prompt
    concurrency: int = Field(default=8, ge=1, le=MOST_CONCURRENT)  # requests in flight
    max_kl: float | None = Field(default=None, gt=0, allow_inf_nan=False)  # nats per token
    min_agreement: float | None = Field(default=None, gt=0, le=1, allow_inf_nan=False)  # share of tokens
    modes: tuple[Mode, ...] = Field(default=("agg",), min_length=1)
    topology: TopologySpec = Field(default_factory=lambda: TopologySpec.model_validate({"port": 0}))
    attach: Attach | None = None

    @field_validator("modes")
    @classmethod
    def _distinct(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        refuse_twice("--mode", value)
        return value

    @field_validator("prompt_file")
    @classmethod
    def _found_from_anywhere(cls, value: Path | None) -> Path | None:
        return None if value is None else value.absolute()  # a run may be resumed from another directory

    @model_validator(mode="after")
    def _has_probabilities(self) -> FidelitySpec:
        if self.attach is not None and self.reference is None:
            raise ValueError(
                "reference is needed with --url: what checkpoint is served there is not known here; name it"
            )
        if self.topology.engine in _NO_PROBABILITIES:
            raise ValueError(
                f"engine is {self.topology.engine}, which computes no probabilities; expected torch, tensorrt-llm or "
                "auto"
            )
        return self

    @property
    def topologies(self) -> tuple[NamedTopology, ...]:
        """The topologies that trtx serves in turn; empty for an attached run."""
        return () if self.attach is not None else expand(self.modes, self.topology, {})

    @property
    def labels(self) -> tuple[str, ...]:
        return (ATTACHED,) if self.attach is not None else tuple(one.label for one in self.topologies)

    def to_json(self) -> dict[str, Any]:
        """Plain values, including the labels that result from the modes."""
        return {**self.model_dump(mode="json"), "topologies": list(self.labels)}


def fidelity_of(fields: dict[str, Any]) -> FidelitySpec:
    """Validates typed values. Raises UsageError that names the option."""
    try:
        return FidelitySpec.model_validate(fields)
    except ValidationError as error:
        raise UsageError(as_option(problem(error), FidelitySpec)) from error


def read_fidelity_spec(run_dir: Path) -> FidelitySpec:
    """Reads the spec from a run's manifest. Raises UsageError if it isn't a run of ``trtx eval fidelity``, or is
    unreadable.
    """
    if not (run_dir / LOCK.file).exists():
        raise UsageError(f"{run_dir} is no run directory, it has no {LOCK.file}; expected one of trtx eval fidelity")
    fields = LOCK.load(run_dir)
    if fields.get("check") != "fidelity":
        raise UsageError(f"{run_dir} is no run of trtx eval fidelity; go on with it by the verb that began it")
    asked = {name: value for name, value in fields.items() if name not in (PROVENANCE, "topologies")}
    return LOCK.restored(asked, FidelitySpec, str(run_dir / LOCK.file))
