"""``trtx compare``: compares runs and baselines, and applies a gate if a limit is given."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from trtx.cli.command import Verb
from trtx.cli.gate_options import (
    AllowDifferentOption,
    BaselineDirOption,
    MaxErrorRateOption,
    MaxRegressionOption,
    MetricsOption,
    WindowOption,
)
from trtx.cli.placement import refuse_ignored
from trtx.config.wording import quoted
from trtx.errors import UsageError

if TYPE_CHECKING:
    from trtx.experiment.baselines.baseline import Baseline
    from trtx.runs.forms import ComparedMetric, ComparedScore, Comparison

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@dataclass(frozen=True, slots=True)
class CompareRequest:
    """The parsed command line of ``trtx compare``."""

    measured: tuple[str, ...]
    metrics: tuple[str, ...]
    window: Literal["whole", "steady"]
    max_regression: str | None
    max_error_rate: str
    allow_different: tuple[str, ...]
    baseline_dir: Path
    max_drop: float | None = None


@app.command(
    cls=Verb,
    no_args_is_help=True,
    epilog="Exit codes: 0 compared, or every judgement passed; 1 a metric regressed; 2 usage; 3 no verdict.",
)
def compare(
    context: typer.Context,
    runs: Annotated[
        list[str], typer.Argument(metavar="RUN...", help="Run directories, baselines' files or names; two or more.")
    ],
    *,
    metrics: MetricsOption = None,
    window: WindowOption = None,
    max_regression: MaxRegressionOption = None,
    max_error_rate: MaxErrorRateOption = None,
    allow_different: AllowDifferentOption = None,
    max_drop: Annotated[
        float | None,
        typer.Option(
            "--max-drop", help="Largest allowed drop of a score; a larger one, beyond chance, is a regression."
        ),
    ] = None,
    baseline_dir: BaselineDirOption = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the comparison as one line of JSON on stdout.")
    ] = False,
) -> None:
    """Compare runs with the first: each metric's ratio, its interval, and which conditions differ.

    For runs with scores, such as those of `trtx eval`, shows the difference of each
    task over the same samples, with its interval.

    \b
    Examples:
      trtx compare before.json runs/20261122T081500Z-bench-9a1c6852
      trtx compare main runs/20261122T081500Z-bench-9a1c6852 --max-regression 5%
    """
    refuse_ignored(context, ["no gate"] if max_regression is None else [])
    from trtx.bench.documents import plain

    if len(runs) < 2:
        raise UsageError(f"{runs[0]!r} is one run, and there is nothing to compare it with; name two or more")
    request = CompareRequest(
        measured=tuple(runs),
        metrics=tuple(part.strip() for part in metrics.split(",")) if metrics else (),
        window=window or "whole",
        max_regression=max_regression,
        max_error_rate=max_error_rate or "0%",
        allow_different=tuple(allow_different or ()),
        baseline_dir=baseline_dir or Path("baselines"),
        max_drop=max_drop,
    )
    found = answer(request)
    if as_json:
        typer.echo(json.dumps({"comparisons": [plain(one) for one in found]}))
    else:
        _show(found)
    if (max_regression is not None or max_drop is not None) and (error := _outcome(found)) is not None:
        raise error


def answer(request: CompareRequest) -> tuple[Comparison, ...]:
    """Compares each other run with the first. Raises UsageError for runs that can't be read or compared."""
    from trtx.bench.judge.regression import DEFAULT_METRICS, parse_limit, parse_metrics
    from trtx.bench.judge.sample import parse_percent
    from trtx.experiment.baselines.baseline import check_window
    from trtx.experiment.baselines.comparison import compare_measured
    from trtx.experiment.baselines.store import Baselines, open_compared

    metrics = parse_metrics(request.metrics) if request.metrics else DEFAULT_METRICS
    limit = None if request.max_regression is None else parse_limit(request.max_regression)
    max_error_rate = parse_percent("--max-error-rate", request.max_error_rate)
    baselines = Baselines(request.baseline_dir)
    opened = [open_compared(text, baselines) for text in request.measured]
    for place, (text, one) in enumerate(zip(request.measured, opened, strict=True)):
        for before, other in zip(request.measured[:place], opened, strict=False):
            if _is_same(one, other):
                raise UsageError(
                    f"{quoted(text)} is the same run as {quoted(before)}, so there is nothing to compare; name "
                    "each run once"
                )
    first, *others = opened
    if not all(one.cells for one in opened) and (request.metrics or request.window != "whole"):
        raise UsageError(
            f"--{'metrics' if request.metrics else 'window'} has no effect for runs of trtx eval, which measure no "
            "speed; leave it out"
        )
    check_window(first, request.window)
    return tuple(
        compare_measured(
            first,
            other,
            metrics,
            max_error_rate=max_error_rate,
            limit=limit,
            allowed=request.allow_different,
            window=request.window,
            max_drop=request.max_drop,
        )
        for other in others
    )


def _is_same(one: Baseline, other: Baseline) -> bool:
    """Returns whether two entries are the same run: a run, a copy of it, or a baseline saved from it.

    They have the same run name and exactly the same metrics and scores.
    """
    return (
        one.run == other.run
        and [cell.figures for cell in one.cells] == [cell.figures for cell in other.cells]
        and (one.scores == other.scores)
    )


def _show(found: tuple[Comparison, ...]) -> None:
    from trtx.cli.console import ResultConsole
    from trtx.report.comparison import comparison_table

    console = ResultConsole()
    for one in found:
        console.print(comparison_table(one))
        console.print()


def _outcome(found: tuple[Comparison, ...]) -> Exception | None:
    """Returns the exception that the gate over all comparisons ends with, or None."""
    from trtx.bench.judge.judgement import CheckResult, outcome

    judged: list[tuple[str, ComparedMetric | ComparedScore]]
    judged = [(row.cell, row) for one in found for row in one.metrics]
    judged += [(f"{row.topology}-{row.task}", row) for one in found for row in one.scores]
    return outcome(
        [
            CheckResult(cell=cell, criterion=row.metric, verdict=row.verdict, reason=row.reason or "")
            for cell, row in judged
            if row.verdict is not None
        ]
    )
