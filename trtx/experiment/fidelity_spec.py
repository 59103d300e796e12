"""What one run of ``trtx eval fidelity`` is asked to do, and its record in the lock."""

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
    """Field by field what was typed, defaults resolved."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str = "fidelity"
    check: Literal["fidelity"] = "fidelity"  # which of trtx eval's checks the run is
    reference: Name | None = None  # None: what the build was made from, else the model itself
    prompts: Annotated[int, Field(ge=1, le=MOST)] | None = DEFAULT_COUNT  # how many to make; None: those of the file
    prompt_file: Path | None = None
    osl: int = Field(default=64, ge=1, le=32_768)  # tokens of the reference's text after each prompt, at most
    concurrency: int = Field(default=8, ge=1, le=MOST_CONCURRENT)  # requests in flight
    max_kl: float | None = Field(default=None, gt=0, allow_inf_nan=False)  # nats a token
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
        """What trtx serves, one after the other; none where the run is attached."""
        return () if self.attach is not None else expand(self.modes, self.topology, {})

    @property
    def labels(self) -> tuple[str, ...]:
        return (ATTACHED,) if self.attach is not None else tuple(one.label for one in self.topologies)

    def to_json(self) -> dict[str, Any]:
        """Plain values, with the labels that modes led to."""
        return {**self.model_dump(mode="json"), "topologies": list(self.labels)}


def fidelity_of(fields: dict[str, Any]) -> FidelitySpec:
    """Of typed values. Raises UsageError naming the option."""
    try:
        return FidelitySpec.model_validate(fields)
    except ValidationError as error:
        raise UsageError(as_option(problem(error), FidelitySpec)) from error


def read_fidelity_spec(run_dir: Path) -> FidelitySpec:
    """Of a run's lock. Raises UsageError where it is none of ``trtx eval fidelity``, or can't be read."""
    if not (run_dir / LOCK.file).exists():
        raise UsageError(f"{run_dir} is no run directory, it has no {LOCK.file}; expected one of trtx eval fidelity")
    fields = LOCK.load(run_dir)
    if fields.get("check") != "fidelity":
        raise UsageError(f"{run_dir} is no run of trtx eval fidelity; go on with it by the verb that began it")
    asked = {name: value for name, value in fields.items() if name not in (PROVENANCE, "topologies")}
    return LOCK.restored(asked, FidelitySpec, str(run_dir / LOCK.file))
