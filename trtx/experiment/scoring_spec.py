"""What is scored: ``eval`` of a sweep file, and the options of ``trtx eval`` of the same names. docs/eval.md."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, field_validator, model_validator

from trtx.config.topology import Name
from trtx.evals.gate import DEFAULT_MAX_DROP, MinScore, parse_min_score
from trtx.evals.messages import EndpointType
from trtx.experiment.gate_spec import listed

MOST_CONCURRENT = 4096  # sockets below the open files that most systems allow, with room for the rest


def _several(value: Any) -> Any:
    """One text for a list of one. Its commas stay: the name of a metric may hold some."""
    return (value,) if isinstance(value, str) else listed(value)


class ScoringSpec(BaseModel):
    """Field by field what was typed, defaults resolved."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    tasks: Annotated[tuple[Name, ...], BeforeValidator(listed)] = Field(min_length=1)
    limit: int | None = Field(default=None, ge=1)  # samples of each task
    num_fewshot: int | None = Field(default=None, ge=0)  # None: as each task says
    task_dir: Name | None = None
    endpoint_type: EndpointType = "completions"
    concurrency: int = Field(default=8, ge=1, le=MOST_CONCURRENT)  # requests in flight
    min_score: Annotated[tuple[str, ...], BeforeValidator(_several)] = ()  # task:metric:value
    max_drop: float = Field(default=DEFAULT_MAX_DROP, gt=0, allow_inf_nan=False)  # in the metric's own unit

    @field_validator("tasks")
    @classmethod
    def _each_once(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        if len(set(value)) != len(value):
            twice = next(one for place, one in enumerate(value) if one in value[:place])
            raise ValueError(f"{twice} is named twice; expected each once")
        return value

    @model_validator(mode="after")
    def _can_be_judged(self) -> ScoringSpec:
        _ = self.least_scores
        return self

    @property
    def least_scores(self) -> tuple[MinScore, ...]:
        """Raises UsageError."""
        return tuple(parse_min_score(text) for text in self.min_score)

    def criteria(self, *, has_baseline: bool) -> tuple[str, ...]:
        """What the scores of each topology are judged by, for people."""
        told = ["every sample has its answer"]
        told += [f"{least.name}: kept by the whole interval" for least in self.least_scores]
        if has_baseline:
            told.append(f"each task's first metric, sample by sample: at most {self.max_drop:g} worse")
        return tuple(told)
