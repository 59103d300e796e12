"""The page's section "Where the time goes": TTFT and ITL of each cell as bars of their stages."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from trtx.bench import Cell
from trtx.bench.explain import CellExplanation, explain_cell
from trtx.bench.stages import STAGES, UNACCOUNTED, SplitPercentile
from trtx.report.charts import Chart, axes_layout
from trtx.report.frames import UNREADABLE

TITLE = "Where the time goes"
MEANING = (
    "TTFT and ITL by stage, at the median and at p99: the mean of the requests nearest to the percentile, from the "
    "times that workers wrote. trtx explain prints them, for single requests too."
)
# Okabe and Ito's colours; a stage has the same one in both charts.
_COLORS = dict(
    zip(
        STAGES,
        ("#56B4E9", "#E69F00", "#CC79A7", "#0072B2", "#D55E00", "#7B4FA3", "#009E73", "#F0E442", "#c3ccd6"),
        strict=True,
    )
)
_BAR_PX, _AROUND_PX = 26, 120
_LEAST_SHARE = 0.001  # a stage below it in every bar is not drawn


def explanations_of(run_dir: Path, cells: Sequence[Cell]) -> tuple[CellExplanation, ...]:
    """Explanations of the cells with stage times. A cell whose files can't be read has none: its records say why."""
    found = []
    for cell in cells:
        try:
            one = explain_cell(run_dir, cell)
        except UNREADABLE:
            continue
        if one.has_stages:
            found.append(one)
    return tuple(found)


def stage_bars(explanations: Sequence[CellExplanation]) -> dict[str, Chart]:
    """Chart by id; charts without bars are left out."""
    charts = {
        "stages-ttft": _bars("TTFT, ms", [(one.cell, one.ttft) for one in explanations]),
        "stages-itl": _bars("ITL, ms", [(one.cell, one.itl) for one in explanations]),
    }
    return {name: chart for name, chart in charts.items() if chart["data"]}


def stage_bars_height_px(chart: Chart) -> int:
    return _AROUND_PX + _BAR_PX * len(chart["data"][0]["y"])


def _bars(title: str, cells: Sequence[tuple[str, Sequence[SplitPercentile]]]) -> Chart:
    bars = [(f"{name} p{split.percentile}", split) for name, splits in cells for split in splits]
    layout = axes_layout(title, "")
    layout |= {"barmode": "stack", "showlegend": True, "legend": {"orientation": "h", "y": 1.0, "yanchor": "bottom"}}
    layout["yaxis"] |= {"autorange": "reversed", "type": "category"}
    layout["margin"] = {**layout["margin"], "t": 44}
    layout["bargap"] = 0.3
    drawn = [stage for stage in STAGES if any(split.share(stage) > _LEAST_SHARE for _, split in bars)]
    data: list[dict[str, Any]] = [
        {
            "type": "bar", "orientation": "h", "name": stage, "legendgroup": f"stage {stage}",
            "y": [name for name, _ in bars], "x": [split.stages.get(stage, 0.0) for _, split in bars],
            "customdata": [f"{100 * split.share(stage):.3g} %" for _, split in bars],
            "marker": {
                "color": _COLORS[stage], "line": {"color": "#ffffff", "width": 1},
                **({"pattern": {"shape": "/", "fgcolor": "#5b6b7c"}} if stage == UNACCOUNTED else {}),
            },
            "hovertemplate": f"{stage}: %{{x:.4g}} ms, %{{customdata}}<extra>%{{y}}</extra>",
        }
        for stage in drawn
    ]  # fmt: skip
    return {"data": data, "layout": layout}
