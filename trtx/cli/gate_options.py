"""The options of a run's gate, and their conversion to the ``gate`` section of a sweep file."""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

_PANEL = "Verdict"


def _option(name: str, help: str, **more: Any) -> Any:
    return typer.Option(name, help=help, rich_help_panel=_PANEL, show_default=False, **more)


MaxRegressionOption = Annotated[
    str | None,
    _option("--max-regression", "How much worse than the baseline a metric may be, beyond chance.", metavar="5%"),
]
MetricsOption = Annotated[
    str | None,
    _option(
        "--metrics",
        "What is compared. Default: output_token_throughput, time_to_first_token:p50, inter_token_latency:p50.",
        metavar="A,B:p50",
    ),
]
WindowOption = Annotated[
    Literal["whole", "steady"] | None,
    _option(
        "--window",
        "What of each trial is judged, on both sides: whole, or its steady part alone. Default: whole.",
    ),
]
AllowDifferentOption = Annotated[
    list[str] | None,
    _option(
        "--allow-different",
        "A condition in which the baseline may be another, such as machine.cpu or load.seed. Repeatable.",
        metavar="KEY",
    ),
]
BaselineDirOption = Annotated[
    Path | None, _option("--baseline-dir", "Where baselines are kept by name. Default: baselines.", metavar="DIR")
]
MaxErrorRateOption = Annotated[
    str | None,
    _option("--max-error-rate", "Failed requests of all in a cell, at most. Default: 0%.", metavar="P%"),
]


@dataclass(frozen=True, slots=True, kw_only=True)
class GateOptions:
    """The options of the gate. Each corresponds to a field of ``gate`` in a sweep file."""

    slo: Annotated[
        list[str] | None,
        _option(
            "--slo",
            "A bound of each cell, such as time_to_first_token:p99:le:500 (ms). Repeatable.",
            metavar="METRIC:STAT:OP:X",
        ),
    ] = None
    min_goodput: Annotated[
        float | None,
        _option("--min-goodput", "Requests/s of each cell that keep the bounds of --slo, at least.", metavar="X"),
    ] = None
    max_error_rate: MaxErrorRateOption = None
    baseline: Annotated[
        str | None,
        _option(
            "--baseline",
            "Compare with it: a run directory, a file, a name, or a directory to pick from by machine, model and load.",
            metavar="BASELINE",
        ),
    ] = None
    max_regression: MaxRegressionOption = None
    metrics: MetricsOption = None
    window: WindowOption = None
    allow_different: AllowDifferentOption = None
    baseline_dir: BaselineDirOption = None
    save_baseline: Annotated[
        str | None,
        _option("--save-baseline", "Keep the figures of this run under a name, to be promoted.", metavar="NAME"),
    ] = None


def gate_overlay(given: dict[str, Any]) -> dict[str, Any]:
    """Converts the given options to the ``gate`` section of a sweep file; empty if there are none."""
    names = [field.name for field in fields(GateOptions) if field.name in given]
    said = {name: str(given[name]) if isinstance(given[name], Path) else given[name] for name in names}
    return {"gate": said} if said else {}
