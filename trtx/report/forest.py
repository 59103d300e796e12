"""The forest plot of an A/B run: each metric's ratio with its interval, the blocks' ratios, and the gate's limit."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from trtx.bench.judge.judgement import Verdict
from trtx.report.charts import INK, SOFT, Chart, axes_layout
from trtx.report.comparison import ArmsShown, ComparedLine

_BAD = "#b3261e"
# Colour, symbol and name by verdict. Symbols differ too, because some people can't tell red from green.
_MARKS: dict[Verdict | None, tuple[str, str, str]] = {
    None: (INK, "circle", "not judged"),
    Verdict.PASS: ("#1b6e3c", "circle", "pass"),
    Verdict.NO_VERDICT: ("#8a5a00", "circle-open", "no verdict"),
    Verdict.REGRESSED: (_BAD, "x", "regressed"),
    Verdict.FAILED: (_BAD, "x", "failed"),
}
_ROW_PX, _AROUND_PX = 34, 76
_REACH = 1.0  # intervals are drawn up to this multiple of the span of estimates and limits beyond that span
_LEAST_SPAN = math.log(1.04)
_TICKS_AT_MOST = 7
_STEPS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5)
# Ratio of the axis ends up to which ticks are linear; above it they are 1, 2 and 5 times powers of ten.
_LINEAR_UP_TO = 3.0


def forest(shown: ArmsShown) -> Chart:
    """One row per metric and cell, in table order. The x axis is logarithmic, so half and twice are equally far
    from 1.
    """
    low, high = _range(shown.lines)
    layout = axes_layout(f"{shown.ratio_name}: {shown.comparison.candidate} / {shown.comparison.baseline}", "")
    layout["xaxis"] |= {"type": "log", "range": [math.log10(low), math.log10(high)], **_ticks(low, high)}
    count = len(shown.lines)
    layout["yaxis"] |= {
        "range": [count - 0.5, -0.5], "tickvals": list(range(count)), "ticktext": [one.label for one in shown.lines],
        "showgrid": False,
    }  # fmt: skip
    layout["shapes"] = [_line(1.0, -0.5, count - 0.5, SOFT, "dot"), *_limits(shown.lines, low, high)]
    layout["annotations"] = [
        {"xref": "paper", "x": 0, "y": row, "text": "– no ratio", "showarrow": False, "xanchor": "left", "xshift": 6,
         "font": {"size": 12, "color": SOFT}}
        for row, line in enumerate(shown.lines) if line.metric.ratio is None
    ]  # fmt: skip
    verdicts = dict.fromkeys(line.metric.verdict for line in shown.lines if line.metric.ratio)
    data = [_rounds(shown.lines, low, high), *(_ratios(shown.lines, verdict, low, high) for verdict in verdicts)]
    return {"data": [trace for trace in data if trace["x"]], "layout": layout}


def forest_height_px(shown: ArmsShown) -> int:
    return _AROUND_PX + _ROW_PX * max(2, len(shown.lines))


def _ratios(lines: Sequence[ComparedLine], verdict: Verdict | None, low: float, high: float) -> dict[str, Any]:
    """The ratios with one verdict. Interval ends outside the axis are drawn slightly beyond it."""
    color, symbol, name = _MARKS.get(verdict, _MARKS[Verdict.FAILED])
    rows = [
        (row, line, line.metric.ratio)
        for row, line in enumerate(lines)
        if line.metric.ratio and line.metric.verdict is verdict
    ]
    return {
        "type": "scatter", "mode": "markers", "name": name,
        "x": [ratio.estimate for _, _, ratio in rows], "y": [row for row, _, _ in rows],
        "error_x": {
            "type": "data", "symmetric": False, "thickness": 2, "width": 5, "color": color,
            "array": [max(0.0, min(ratio.high, 2 * high) - ratio.estimate) for _, _, ratio in rows],
            "arrayminus": [max(0.0, ratio.estimate - max(ratio.low, low / 2)) for _, _, ratio in rows],
        },
        "marker": {"size": 10, "symbol": symbol, "color": color, "line": {"width": 2 if "open" in symbol else 0}},
        "text": [f"{line.label}<br>{line.ratio}<br>{name}" for _, line, _ in rows],
        "hovertemplate": "%{text}<extra></extra>",
    }  # fmt: skip


def _rounds(lines: Sequence[ComparedLine], low: float, high: float) -> dict[str, Any]:
    """The ratio of each block as a small dot slightly below its row."""
    dots = [
        (row, line, one, one.ratio)
        for row, line in enumerate(lines)
        for one in line.rounds
        if one.ratio is not None and low <= one.ratio <= high
    ]
    return {
        "type": "scatter", "mode": "markers", "name": "rounds",
        "x": [ratio for *_, ratio in dots], "y": [row + 0.27 for row, *_ in dots],
        "marker": {"size": 5, "color": SOFT, "opacity": 0.55},
        "text": [f"{line.label}<br>round {one.number}: {one.ratio_text}" for _, line, one, _ in dots],
        "hovertemplate": "%{text}<extra></extra>",
    }  # fmt: skip


def _limits(lines: Sequence[ComparedLine], low: float, high: float) -> list[dict[str, Any]]:
    """Each row's limit, and the area beyond it: to the right for a latency, to the left for a throughput."""
    shapes: list[dict[str, Any]] = []
    for row, line in enumerate(lines):
        if (limit := line.metric.limit) is None:
            continue
        start, end = (limit, high) if limit > 1 else (low, limit)
        shapes.append(
            {"type": "rect", "layer": "below", "x0": start, "x1": end, "y0": row - 0.45, "y1": row + 0.45,
             "fillcolor": _BAD, "opacity": 0.07, "line": {"width": 0}}
        )  # fmt: skip
        shapes.append(_line(limit, row - 0.45, row + 0.45, _BAD, "solid"))
    return shapes


def _line(x: float, start: float, end: float, color: str, dash: str) -> dict[str, Any]:
    return {
        "type": "line", "layer": "below", "x0": x, "x1": x, "y0": start, "y1": end,
        "line": {"color": color, "width": 1.5, "dash": dash},
    }  # fmt: skip


def _range(lines: Sequence[ComparedLine]) -> tuple[float, float]:
    """The range of the x axis: 1, all estimates, limits and block ratios, and interval ends that aren't far beyond
    these.
    """
    metrics = [line.metric for line in lines]
    inner = [0.0, *(math.log(one.ratio.estimate) for one in metrics if one.ratio and one.ratio.estimate > 0)]
    inner += [math.log(one.limit) for one in metrics if one.limit]
    inner += [math.log(one.ratio) for line in lines for one in line.rounds if one.ratio]
    least, most = min(inner), max(inner)
    room = max(most - least, _LEAST_SPAN) * _REACH
    ends = [math.log(end) for one in metrics if one.ratio for end in (one.ratio.low, one.ratio.high) if end > 0]
    low, high = (
        max(least - room, min([least, *ends])),
        min(most + room, max([most, *ends])),
    )
    aside = 0.06 * max(high - low, _LEAST_SPAN)
    return math.exp(low - aside), math.exp(high + aside)


def _ticks(low: float, high: float) -> dict[str, Any]:
    if high / low > _LINEAR_UP_TO:
        powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
        digits = (1, 2, 5) if len(powers) <= 3 else (1,)
        values = [digit * 10.0**power for power in powers for digit in digits]
    else:
        step = next((one for one in _STEPS if (high - low) / one <= _TICKS_AT_MOST), _STEPS[-1])
        values = [round(number * step, 3) for number in range(math.ceil(low / step), math.floor(high / step) + 1)]
    return {"tickvals": values, "ticktext": [f"{value:g}" for value in values]}
