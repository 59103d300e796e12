"""The criteria of a run: the ``gate`` of a sweep file and the options of the same names. See docs/verdicts.md."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from trtx.bench.judge.goodput import request_bounds
from trtx.bench.judge.regression import DEFAULT_METRICS, GateLimit, parse_limit, parse_metrics
from trtx.bench.judge.sample import MetricColumn, Window, parse_percent
from trtx.bench.judge.slo import Objective, parse_objective
from trtx.config.option_field import OptionField
from trtx.config.topology import Name
from trtx.config.wording import quoted
from trtx.errors import UsageError

_BASELINE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")


def check_baseline_name(name: str) -> None:
    """Raises UsageError for a text that can't be the name of a baseline, which is also a file name."""
    if not _BASELINE_NAME.fullmatch(name):
        raise UsageError(
            f"{quoted(name)} can't be the name of a baseline; use letters, digits, '.', '_' and '-', such as main-h100"
        )


def listed(value: Any) -> Any:
    """Splits a text at commas into a tuple. No listed value contains a comma."""
    if isinstance(value, str):
        return tuple(part.strip() for part in value.split(","))
    return tuple(value) if isinstance(value, list) else value


Texts = Annotated[tuple[str, ...], BeforeValidator(listed)]


class GateSpec(BaseModel):
    """The validated gate options. Without any, a run is judged only by its failed requests."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    slo: Texts = ()  # metric:statistic:operator:value
    min_goodput: float | None = Field(default=None, gt=0, allow_inf_nan=False)  # requests/s
    max_error_rate: str = "0%"  # share of failed requests in each cell
    baseline: Name | None = None  # directory, run, file, or a name in baseline_dir
    max_regression: str | None = None  # in % of the baseline
    metrics: Texts = ()  # metrics to compare; empty: DEFAULT_METRICS
    # The judged part of each trial, on both sides; failed requests always count over all of it.
    window: Annotated[Window, OptionField(since=3, before="whole")] = "whole"
    allow_different: Texts = ()  # conditions in which the baseline may differ
    baseline_dir: Name = "baselines"
    save_baseline: str | None = None  # name of the candidate saved from the run

    @model_validator(mode="after")
    def _can_be_judged(self) -> GateSpec:
        """Raises UsageError, naming the option, if the gate can't be applied."""
        _ = self.limit, self.error_rate_limit, self.compared
        if self.save_baseline is not None:
            check_baseline_name(self.save_baseline)
        if self.min_goodput is not None:
            request_bounds(self.objectives)
        _refuse_twice("--slo", [objective.name for objective in self.objectives])
        if (self.baseline is None) != (self.max_regression is None):
            given, lacking = ("--max-regression", "--baseline") if self.baseline is None else (
                "--baseline", "--max-regression",
            )  # fmt: skip
            raise UsageError(f"{given} has no effect without {lacking}; expected both, or neither")
        if self.window != "whole" and not self.slo and self.baseline is None:
            raise UsageError(
                f"--window {self.window} has no effect if no metric is judged; add --slo or --baseline, or leave it out"
            )
        for option, value in (("--metrics", self.metrics), ("--allow-different", self.allow_different)):
            if value and self.baseline is None:
                raise UsageError(f"{option} has no effect without --baseline; leave it out, or name a baseline")
        return self

    @property
    def objectives(self) -> tuple[Objective, ...]:
        return tuple(parse_objective(text) for text in self.slo)

    @property
    def limit(self) -> GateLimit | None:
        """The limit of ``max_regression``; None if the run is not compared."""
        return None if self.max_regression is None else parse_limit(self.max_regression)

    @property
    def compared(self) -> tuple[MetricColumn, ...]:
        return parse_metrics(self.metrics) if self.metrics else DEFAULT_METRICS

    @property
    def error_rate_limit(self) -> float:
        """The permitted share of failed requests, in %."""
        return parse_percent("--max-error-rate", self.max_error_rate)

    @property
    def criteria(self) -> tuple[str, ...]:
        """The criteria for each cell, as text for users."""
        criteria = [f"failed requests: at most {self.max_error_rate}"]
        criteria += [f"{objective.metric.name}: {objective.bound}" for objective in self.objectives]
        if self.min_goodput is not None:
            criteria.append(f"goodput: at least {self.min_goodput:.10g} requests/s")
        if self.limit is not None:
            metrics = ", ".join(metric.name for metric in self.compared)
            criteria.append(f"against {self.baseline}: {metrics}, at most {self.limit.percent:g}% worse")
        if self.window != "whole":
            criteria.append("all but failed requests: over the steady part of each trial")
        return tuple(criteria)


def _refuse_twice(option: str, names: Sequence[str]) -> None:
    for place, name in enumerate(names):
        if name in names[:place]:
            raise UsageError(f"{option} {name} is listed twice; list it once")
