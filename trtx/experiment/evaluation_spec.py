"""The specification of a ``trtx eval`` run, and its form in the manifest."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from pydantic import field_validator

from trtx.config.topology import Name
from trtx.experiment.directory import read_manifest
from trtx.experiment.scoring_spec import ScoringSpec
from trtx.experiment.topologies_spec import TopologiesSpec, spec_of_options


class EvaluationSpec(TopologiesSpec, ScoringSpec):
    """The tasks to score and the topologies or deployment to score them on."""

    name: str = "eval"
    baseline: Name | None = None  # a run directory

    @field_validator("baseline")
    @classmethod
    def _found_from_anywhere(cls, value: str | None) -> str | None:
        return None if value is None else str(Path(value).absolute())  # a run may be resumed from another directory

    def worded(self, sentence: str) -> str:
        """Returns the sentence unchanged, since the fields were typed as options."""
        return sentence


def read_evaluation(run_dir: Path) -> EvaluationSpec:
    """Reads the spec from a run's manifest. Raises UsageError if it isn't a run of ``trtx eval``, or is unreadable."""
    return read_manifest(run_dir, "trtx eval", EvaluationSpec)


evaluation_of = partial(spec_of_options, EvaluationSpec)
