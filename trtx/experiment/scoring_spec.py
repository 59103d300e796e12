"""What to score: ``eval`` of a sweep file, and the options of ``trtx eval`` with the same names. See docs/eval.md."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationInfo, field_validator, model_validator

from trtx.config.topology import Name
from trtx.evals.gate import DEFAULT_MAX_DROP, MinScore, parse_min_score
from trtx.evals.messages import REQUEST_TIMEOUT_S, EndpointType, NeedleAsked, StructuredOutput
from trtx.evals.needle import TASK as NEEDLE_TASK
from trtx.evals.schemas import TASK as SCHEMAS_TASK
from trtx.evals.texts import TASK as TEXT_TASK
from trtx.experiment.gate_spec import listed

Whole = Annotated[int, Field(strict=True)]  # refuses true and 1.0
Length = Annotated[Whole, Field(ge=1, le=2**31)]
Depth = Annotated[Whole, Field(ge=0, le=100)]
MOST_CONCURRENT = 4096  # number of sockets that fits into the usual limit of open files, with room for others


def _several(value: Any) -> Any:
    """Turns a single text into a tuple. It isn't split at commas, because a metric's name may contain some."""
    return (value,) if isinstance(value, str) else listed(value)


def in_keys(sentence: str) -> str:
    """Replaces option names in a sentence, or a field at its beginning, with the keys of a sweep file."""
    head = sentence.partition(" ")[0]
    sentence = f"eval.{sentence}" if head in ScoringSpec.model_fields else sentence
    return _OPTION.sub(lambda found: _KEYS.get(found[1].replace("-", "_"), found[0]), sentence)


def as_option(sentence: str, asked: type[BaseModel]) -> str:
    """Replaces the field name at the beginning of a sentence with the command-line option of the same name.

    ``asked``: the model whose fields are options. The options of a topology and of a deployment are replaced too.
    """
    field, space, rest = sentence.partition(" ")
    name = field.partition(".")[0]
    if name in ("attach", "topology"):
        name = field.split(".")[1] if "." in field else name
    return f"--{name.replace('_', '-')}{space}{rest}" if name in {*asked.model_fields, *_TYPED} else sentence


_TYPED = ("url", "tokenizer", "model", "engine")  # options of an attached deployment, and of a topology


def refuse_twice(option: str, values: Sequence[Any]) -> None:
    """Raises ValueError for a repeated value."""
    for place, one in enumerate(values):
        if one in values[:place]:
            raise ValueError(f"{option} names {one} twice; expected each once")


class ScoringSpec(BaseModel):
    """The typed options, with defaults resolved."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    tasks: Annotated[tuple[Name, ...], BeforeValidator(listed)] = Field(min_length=1)
    limit: Whole | None = Field(default=None, ge=1, le=10**9)  # samples per task
    num_fewshot: Whole | None = Field(default=None, ge=0, le=10_000)  # None: as each task defines
    task_dir: Name | None = None
    endpoint_type: EndpointType = "completions"
    concurrency: Whole = Field(default=8, ge=1, le=MOST_CONCURRENT)  # requests in flight
    request_timeout: float = Field(default=REQUEST_TIMEOUT_S, gt=0, le=7 * 86_400, allow_inf_nan=False)  # seconds
    # In tokens; None: depends on the context length.
    needle_lengths: tuple[Length, ...] | None = Field(default=None, min_length=1)
    needle_depths: tuple[Depth, ...] = Field(default=NeedleAsked().depths, min_length=1)  # in %
    needle_samples: Whole = Field(default=NeedleAsked().samples, ge=1, le=10_000)  # per length and depth
    text: Name | None = None  # file for the task perplexity
    schemas: Name | None = None  # file for the task schemas
    structured_output: StructuredOutput | None = None  # None: as each task defines
    min_score: Annotated[tuple[str, ...], BeforeValidator(_several)] = ()  # task:metric:value
    max_drop: float = Field(default=DEFAULT_MAX_DROP, gt=0, le=10**9, allow_inf_nan=False)  # in the metric's own unit

    @field_validator("tasks", "needle_lengths", "needle_depths")
    @classmethod
    def _each_once(cls, value: tuple[Any, ...] | None, info: ValidationInfo) -> tuple[Any, ...] | None:
        refuse_twice(f"--{str(info.field_name).replace('_', '-')}", value or ())
        return value

    @model_validator(mode="after")
    def _can_be_judged(self) -> ScoringSpec:
        _ = self.least_scores
        return self

    @model_validator(mode="after")
    def _files_are_scored(self) -> ScoringSpec:
        for name, task in (("text", TEXT_TASK), ("schemas", SCHEMAS_TASK)):
            file = getattr(self, name)
            if (file is None) == (task in self.tasks):
                problem = "is needed" if file is None else "has no effect"
                beside = "with" if file is None else "without"
                raise ValueError(
                    f"--{name} {problem} {beside} {task} in --tasks, which scores it; give both or neither"
                )
        return self

    @model_validator(mode="after")
    def _needle_is_asked(self) -> ScoringSpec:
        for name in ("needle_lengths", "needle_depths", "needle_samples"):
            if NEEDLE_TASK not in self.tasks and getattr(self, name) != type(self).model_fields[name].default:
                raise ValueError(
                    f"--{name.replace('_', '-')} has no effect without {NEEDLE_TASK} in --tasks, "
                    "whose prompts it configures; give both or neither"
                )
        return self

    def worded(self, sentence: str) -> str:
        """Replaces option names in a sentence with the keys of a sweep file."""
        return in_keys(sentence)

    @property
    def least_scores(self) -> tuple[MinScore, ...]:
        """The parsed minimum scores. Raises UsageError."""
        return tuple(parse_min_score(text) for text in self.min_score)

    def criteria(self, *, has_baseline: bool) -> tuple[str, ...]:
        """The criteria for the scores of each topology, as text for users."""
        criteria = ["every sample has its answer"]
        criteria += [f"{least.name}: kept by the whole interval" for least in self.least_scores]
        if has_baseline:
            criteria.append(f"each task's first metric, sample by sample: at most {self.max_drop:g} worse")
        return tuple(criteria)


_OPTION = re.compile(r"--([a-z][a-z-]*[a-z])")
_KEYS = {name: f"eval.{name}" for name in ScoringSpec.model_fields} | {"tokenizer": "attach.tokenizer"}
