"""The options of a run's gate, and their conversion to the ``gate`` section of a sweep file."""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

from trtx.cli.command import optional

_PANEL = "Verdict"
_option = partial(optional, _PANEL)


MaxRegressionOption = Annotated[
    str | None,
    _option("--max-regression", "Largest permitted regression from the baseline, beyond chance.", metavar="5%"),
]
MetricsOption = Annotated[
    str | None,
    _option(
        "--metrics",
        "Metrics to compare. Default: output_token_throughput, time_to_first_token:p50, inter_token_latency:p50.",
        metavar="A,B:p50",
    ),
]
WindowOption = Annotated[
    Literal["whole", "steady"] | None,
    _option(
        "--window",
        "Part of each trial that is judged, on both sides: whole, or steady (its steady part only). Default: whole.",
    ),
]
AllowDifferentOption = Annotated[
    list[str] | None,
    _option(
        "--allow-different",
        "Condition in which the baseline may differ, such as machine.cpu or load.seed. Repeatable.",
        metavar="KEY",
    ),
]
BaselineDirOption = Annotated[
    Path | None, _option("--baseline-dir", "Directory of the named baselines. Default: baselines.", metavar="DIR")
]
MaxErrorRateOption = Annotated[
    str | None,
    _option("--max-error-rate", "Largest permitted share of failed requests in a cell. Default: 0%.", metavar="P%"),
]


@dataclass(frozen=True, slots=True, kw_only=True)
class GateOptions:
    """The options of the gate. Each corresponds to a field of ``gate`` in a sweep file."""

    slo: Annotated[
        list[str] | None,
        _option(
            "--slo",
            "Objective for each cell, such as time_to_first_token:p99:le:500 (ms). Repeatable.",
            metavar="METRIC:STAT:OP:X",
        ),
    ] = None
    min_goodput: Annotated[
        float | None,
        _option("--min-goodput", "Smallest permitted rate of requests that meet --slo, in requests/s.", metavar="X"),
    ] = None
    max_error_rate: MaxErrorRateOption = None
    baseline: Annotated[
        str | None,
        _option(
            "--baseline",
            "Baseline to compare with: a run directory, a file, a name, or a directory of baselines.",
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
        _option(
            "--save-baseline", "Save the metrics of this run as a candidate baseline with this name.", metavar="NAME"
        ),
    ] = None


def gate_overlay(given: dict[str, Any]) -> dict[str, Any]:
    """Converts the given options to the ``gate`` section of a sweep file; empty if there are none."""
    names = [field.name for field in fields(GateOptions) if field.name in given]
    section = {name: str(given[name]) if isinstance(given[name], Path) else given[name] for name in names}
    return {"gate": section} if section else {}
