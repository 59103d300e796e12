"""What one run of ``trtx eval`` is asked to do, and its record in the lock."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from trtx.bench.documents import problem
from trtx.config import Mode, TopologySpec
from trtx.config.topology import Name
from trtx.errors import UsageError
from trtx.evals.gate import DEFAULT_MAX_DROP, MinScore, parse_min_score
from trtx.evals.messages import REQUEST_TIMEOUT_S, EndpointType, NeedleAsked
from trtx.evals.needle import TASK as NEEDLE_TASK
from trtx.evals.texts import TASK as TEXT_TASK
from trtx.experiment.axes import NamedTopology, expand
from trtx.experiment.directory import PROVENANCE
from trtx.experiment.spec import ATTACHED, Attach
from trtx.report.forms import LOCK

Length = Annotated[int, Field(ge=1)]
Depth = Annotated[int, Field(ge=0, le=100)]
MOST_CONCURRENT = 4096  # sockets below the open files that most systems allow, with room for the rest


class EvaluationSpec(BaseModel):
    """Field by field what was typed, defaults resolved."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str = "eval"
    tasks: tuple[Name, ...] = Field(min_length=1)
    limit: int | None = Field(default=None, ge=1)  # samples of each task
    num_fewshot: int | None = Field(default=None, ge=0)  # None: as each task says
    task_dir: Name | None = None
    endpoint_type: EndpointType = "completions"
    concurrency: int = Field(default=8, ge=1, le=MOST_CONCURRENT)  # requests in flight
    request_timeout: float = Field(default=REQUEST_TIMEOUT_S, gt=0, allow_inf_nan=False)  # seconds
    needle_lengths: tuple[Length, ...] | None = Field(default=None, min_length=1)  # tokens; None: by the context
    needle_depths: tuple[Depth, ...] = Field(default=NeedleAsked().depths, min_length=1)  # per cent
    needle_samples: int = Field(default=NeedleAsked().samples, ge=1)  # of each length and depth
    text: Name | None = None  # file that task perplexity scores
    min_score: tuple[str, ...] = ()  # task:metric:value
    baseline: Name | None = None  # directory of a run
    max_drop: float = Field(default=DEFAULT_MAX_DROP, gt=0, allow_inf_nan=False)  # in the metric's own unit
    modes: tuple[Mode, ...] = Field(default=("agg",), min_length=1)
    topology: TopologySpec = Field(default_factory=lambda: TopologySpec.model_validate({"port": 0}))
    attach: Attach | None = None

    @field_validator("tasks", "modes", "needle_lengths", "needle_depths")
    @classmethod
    def _distinct(cls, value: tuple[Any, ...] | None) -> tuple[Any, ...] | None:
        if value is not None and len(set(value)) != len(value):
            twice = next(one for place, one in enumerate(value) if one in value[:place])
            raise ValueError(f"{twice} is named twice; expected each once")
        return value

    @model_validator(mode="after")
    def _can_be_judged(self) -> EvaluationSpec:
        _ = self.least_scores
        return self

    @model_validator(mode="after")
    def _text_is_scored(self) -> EvaluationSpec:
        if (self.text is None) == (TEXT_TASK in self.tasks):
            told = "is needed" if self.text is None else "means nothing"
            beside = "with" if self.text is None else "without"
            raise ValueError(f"--text {told} {beside} {TEXT_TASK} in --tasks, which scores it; name both, or neither")
        return self

    @model_validator(mode="after")
    def _needle_is_asked(self) -> EvaluationSpec:
        for name in ("needle_lengths", "needle_depths", "needle_samples"):
            if NEEDLE_TASK not in self.tasks and getattr(self, name) != type(self).model_fields[name].default:
                raise ValueError(
                    f"--{name.replace('_', '-')} means nothing without {NEEDLE_TASK} in --tasks, whose prompts it "
                    "shapes; name both, or neither"
                )
        return self

    @property
    def least_scores(self) -> tuple[MinScore, ...]:
        """Raises UsageError."""
        return tuple(parse_min_score(text) for text in self.min_score)

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


def evaluation_of(fields: dict[str, Any]) -> EvaluationSpec:
    """Of typed values. Raises UsageError naming the option."""
    try:
        return EvaluationSpec.model_validate(fields)
    except ValidationError as error:
        raise UsageError(_named(problem(error))) from error


def read_evaluation(run_dir: Path) -> EvaluationSpec:
    """Of a run's lock. Raises UsageError where it is none of ``trtx eval``, or can't be read."""
    if not (run_dir / LOCK.file).exists():
        raise UsageError(f"{run_dir} is no run directory, it has no {LOCK.file}; expected one of trtx eval")
    fields = LOCK.load(run_dir)
    if "tasks" not in fields:
        raise UsageError(f"{run_dir} is no run of trtx eval: its {LOCK.file} names no tasks; expected one that does")
    asked = {name: value for name, value in fields.items() if name not in (PROVENANCE, "topologies")}
    return LOCK.restored(asked, EvaluationSpec, str(run_dir / LOCK.file))


def _named(sentence: str) -> str:
    """A field at the head of a sentence as the option that it was typed as."""
    field, space, rest = sentence.partition(" ")
    name = field.partition(".")[0]
    return f"--{name.replace('_', '-')}{space}{rest}" if name in EvaluationSpec.model_fields else sentence
