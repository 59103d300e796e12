"""The specification of a ``trtx eval`` run, and its form in the manifest."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pydantic import Field, ValidationError, field_validator

from trtx.bench.documents import problem
from trtx.config import Mode, TopologySpec
from trtx.config.topology import Name
from trtx.errors import UsageError
from trtx.experiment.bench.axes import NamedTopology, expand
from trtx.experiment.bench.spec import ATTACHED, Attach
from trtx.experiment.directory import PROVENANCE
from trtx.experiment.scoring_spec import ScoringSpec, as_option, refuse_twice
from trtx.runs.forms import LOCK


class EvaluationSpec(ScoringSpec):
    """The tasks to score and the topologies or deployment to score them on."""

    name: str = "eval"
    baseline: Name | None = None  # a run directory
    modes: tuple[Mode, ...] = Field(default=("agg",), min_length=1)
    topology: TopologySpec = Field(default_factory=lambda: TopologySpec.model_validate({"port": 0}))
    attach: Attach | None = None

    @field_validator("modes")
    @classmethod
    def _distinct(cls, value: tuple[Mode, ...]) -> tuple[Mode, ...]:
        refuse_twice("--mode", value)
        return value

    @field_validator("baseline")
    @classmethod
    def _found_from_anywhere(cls, value: str | None) -> str | None:
        return None if value is None else str(Path(value).absolute())  # a run may be resumed from another directory

    def worded(self, sentence: str) -> str:
        """Returns the sentence unchanged, since the fields were typed as options."""
        return sentence

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


def evaluation_of(fields: dict[str, Any]) -> EvaluationSpec:
    """Validates typed values. Raises UsageError that names the option."""
    try:
        return EvaluationSpec.model_validate(fields)
    except ValidationError as error:
        raise UsageError(as_option(problem(error), EvaluationSpec)) from error


def read_evaluation(run_dir: Path) -> EvaluationSpec:
    """Reads the spec from a run's manifest. Raises UsageError if it isn't a run of ``trtx eval``, or is unreadable."""
    if not (run_dir / LOCK.file).exists():
        raise UsageError(f"{run_dir} is no run directory, it has no {LOCK.file}; expected one of trtx eval")
    fields = LOCK.load(run_dir)
    if "tasks" not in fields:
        raise UsageError(f"{run_dir} is no run of trtx eval: its {LOCK.file} names no tasks; expected one that does")
    asked = {name: value for name, value in fields.items() if name not in (PROVENANCE, "topologies")}
    return LOCK.restored(asked, EvaluationSpec, str(run_dir / LOCK.file))
