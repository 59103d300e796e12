"""The charts of the page as Plotly JSON: data and layout, with nothing computed in the browser."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from trtx.bench.judge.checks import ValidityLevel
from trtx.bench.metric_types import Metric, Spread
from trtx.bench.metrics import (
    inter_token_latency,
    output_token_throughput,
    output_token_throughput_per_device,
    output_token_throughput_per_user,
    time_to_first_token,
)
from trtx.report.columns import Column, number
from trtx.report.labels import Point, place
from trtx.report.series import Mark, marks
from trtx.report.validity import MARKS
from trtx.report.view import Row, RunView

Chart = dict[str, Any]

INK, _GRID, SOFT = "#1d2733", "#e6eaef", "#5b6b7c"
_FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, 'Helvetica Neue', Arial, sans-serif"
_TICK_SHARE = 0.08  # minimum distance of two ticks, as a share of the axis
_FEW_DECADES = 3
_WITH_TAILS = 5  # number of topologies up to which tails are drawn; with more, their second lines become unreadable
_BAR_REACH = 1.5  # maximum length of an error bar, as a multiple of the largest value


@dataclass(frozen=True, slots=True)
class _Drawn:
    """One cell in a chart."""

    row: Row
    value: float
    low: float | None  # of the interval over its trials
    high: float | None


def charts(view: RunView, lengths: tuple[int | None, int | None]) -> dict[str, Chart]:
    """Chart by id, for the cells with these ISL and OSL; others aren't comparable. Charts without points are left
    out.
    """
    rows = [row for row in view.rows if (row.load.isl, row.load.osl) == lengths]
    built = {
        "pareto": _pareto(view, rows),
        "throughput": _throughput(view, rows),
        "ttft": _latency(view, rows, time_to_first_token),
        "itl": _latency(view, rows, inter_token_latency),
    }
    return {name: chart for name, chart in built.items() if chart["data"]}


def shows_tails(view: RunView) -> bool:
    """Whether latency charts show a tail percentile in addition to the median."""
    return len(view.labels) <= _WITH_TAILS


def pareto_front(points: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """The points that no other point beats in both coordinates, in ascending order. Larger is better in both."""
    front: list[tuple[float, float]] = []
    for x, y in sorted(set(points), key=lambda point: (-point[0], -point[1])):
        if not front or y > front[-1][1]:
            front.append((x, y))
    return front[::-1]


def _pareto(view: RunView, rows: Sequence[Row]) -> Chart:
    per_user, per_device = (
        Column(metric, None, view.device)
        for metric in (output_token_throughput_per_user, output_token_throughput_per_device)
    )
    x_unit, y_unit = (column.metric.unit.format(device=view.device) for column in (per_user, per_device))
    points = [(x, y) for row in rows for x in _drawn([row], per_user) for y in _drawn([row], per_device)]
    layout = axes_layout(x_unit, y_unit)
    if not points:
        return {"data": [], "layout": layout}
    x_range = _linear_range([x for x, _ in points])
    y_range = _linear_range([y for _, y in points], room=1.13)  # leaves room for a label above the highest point
    layout["xaxis"]["range"], layout["yaxis"]["range"] = x_range, y_range
    fronts = {
        label: pareto_front([(x.value, y.value) for x, y in points if x.row.topology == label and x.row.can_be_best])
        for label in view.labels
    }
    labels = place(
        [Point(x.value / x_range[1], y.value / y_range[1], x.row.load_text) for x, y in points],
        [[(x / x_range[1], y / y_range[1]) for x, y in front] for front in fronts.values()],
    )
    data: list[dict[str, Any]] = []
    for label, mark in marks(view).items():
        chosen = [(x, y, at) for (x, y), at in zip(points, labels, strict=True) if x.row.topology == label]
        if not chosen:
            continue
        front = fronts[label]
        data.append(
            {
                "type": "scatter", "mode": "lines", "name": f"{label} front", "legendgroup": label, "hoverinfo": "skip",
                "x": [x for x, _ in front], "y": [y for _, y in front],
                "line": {"color": mark.color, "width": 2, "shape": "linear"},
            }
        )  # fmt: skip
        on_front = [x.row.can_be_best and (x.value, y.value) in front for x, y, _ in chosen]
        data.append(
            {
                "type": "scatter", "mode": "markers+text", "name": label, "legendgroup": label,
                "x": [x.value for x, _, _ in chosen], "y": [y.value for _, y, _ in chosen],
                **_bars("error_x", mark, [x for x, _, _ in chosen]),
                **_bars("error_y", mark, [y for _, y, _ in chosen]),
                "text": [at.text for _, _, at in chosen],
                "customdata": [x.row.load_text + _remark(x.row) for x, _, _ in chosen],
                "texttemplate": "\u2002%{text}\u2002",
                "textposition": [at.side for _, _, at in chosen],
                "cliponaxis": False,  # labels may extend into the margin, as trtx/report/labels.py assumes
                "textfont": {"color": mark.color, "size": 12, "shadow": "0 0 3px white, 0 0 3px white, 0 0 3px white"},
                "marker": {
                    "size": 10, "symbol": mark.symbol,
                    "color": [mark.color if best else "#ffffff" for best in on_front],
                    "line": {"color": mark.color, "width": 2},
                },
                "hovertemplate": (
                    f"{label}, %{{customdata}}<br>%{{x:.4g}} {x_unit}<br>%{{y:.4g}} {y_unit}<extra></extra>"
                ),
            }
        )  # fmt: skip
    return {"data": data, "layout": layout}


def _remark(row: Row) -> str:
    """Remarks on a point for its hover text."""
    level = f"{row.level.value} cell" if row.level in MARKS and row.level else None
    return "".join(f"<br>{text}" for text in (row.failed_text, level) if text)


def _throughput(view: RunView, rows: Sequence[Row]) -> Chart:
    column = Column(output_token_throughput, None, view.device)
    lines = [
        (_line(label, mark, label, found, column), found)
        for label, mark in marks(view).items()
        if (found := _drawn([row for row in rows if row.topology == label], column))
    ]
    return _over_load(view, rows, column.metric.unit, lines)


def _latency(view: RunView, rows: Sequence[Row], metric: Spread) -> Chart:
    """p50 as a line, and the highest percentile with enough samples in every cell of the topology as a dotted line."""
    lines, has_tails = [], shows_tails(view)
    for label, mark in marks(view).items():
        measured = [row for row in rows if row.topology == label and row.value(metric) is not None]
        columns = [Column(metric, q, view.device) for q in metric.percentiles]
        stated = [column for column in columns if has_tails and all(_is_stated(column, row) for row in measured)]
        for q in dict.fromkeys((50, max((column.percentile or 0 for column in stated), default=50))):
            column = Column(metric, q, view.device)
            if not (found := _drawn(measured, column)):
                continue
            line = _line(label, mark, f"{label} p{q}", found, column)
            if q != 50:
                line["line"] |= {"dash": "dot", "width": 1.5}
                line["marker"] |= {"size": 5}
            lines.append((line, found))
    return _over_load(view, rows, f"{metric.title}, {metric.unit}", lines)


def _is_stated(column: Column, row: Row) -> bool:
    return column.is_sure(row) and _number(row, column) is not None


def _drawn(rows: Sequence[Row], column: Column) -> list[_Drawn]:
    """The cells that have the number, with its interval if there is one."""
    found = []
    for row in rows:
        if (value := _number(row, column)) is not None:
            interval = column.interval(row)
            ends = (None, None) if interval is None else (interval.low, interval.high)
            found.append(_Drawn(row, value, *ends))
    return found


def _number(row: Row, column: Column) -> float | None:
    metric: Metric[Any] = column.metric
    value = row.value(metric)
    return None if value is None else metric.number(value, column.percentile)


def _line(label: str, mark: Mark, name: str, points: Sequence[_Drawn], column: Column) -> dict[str, Any]:
    """One line of a chart. Cells with failed requests and INVALID cells are drawn as crosses."""
    crossed = [bool(point.row.failed_text) or point.row.level is ValidityLevel.INVALID for point in points]
    return {
        "type": "scatter", "mode": "lines+markers", "name": name, "legendgroup": label,
        "x": [point.row.load.intensity for point in points], "y": [point.value for point in points],
        **_bars("error_y", mark, points),
        "text": [f"{number(point.value)} {column.margin(point.row)}".rstrip() for point in points],
        "customdata": [_remark(point.row) for point in points],
        "line": {"color": mark.color, "width": 2},
        "marker": {"size": 8, "symbol": ["x" if cross else mark.symbol for cross in crossed], "color": mark.color},
        "hovertemplate": f"{name}, %{{x}}<br>%{{text}} {column.metric.unit}%{{customdata}}<extra></extra>",
    }  # fmt: skip


def _bars(axis: str, mark: Mark, points: Sequence[_Drawn]) -> dict[str, Any]:
    """Error bars for the intervals over trials; empty if no cell has two trials."""
    if all(point.high is None for point in points):
        return {}
    return {
        axis: {
            "type": "data", "symmetric": False, "thickness": 1, "width": 3, "color": f"{mark.color}66",
            "array": [None if point.high is None else max(0.0, point.high - point.value) for point in points],
            # Throughput and latency can't be negative, although an interval from few trials may extend below 0.
            "arrayminus": [
                None if point.low is None else max(0.0, point.value - max(0.0, point.low)) for point in points
            ],
        }
    }  # fmt: skip


def _linear_range(points: Sequence[_Drawn], room: float = 1.06) -> tuple[float, float]:
    """From 0 to above the largest value and its error bar; much longer bars are cut off."""
    most = max(point.value for point in points)
    reach = max((point.high for point in points if point.high is not None), default=most)
    return (0.0, max(most, min(reach, _BAR_REACH * most)) * room)


def _over_load(
    view: RunView, rows: Sequence[Row], title: str, lines: Sequence[tuple[dict[str, Any], list[_Drawn]]]
) -> Chart:
    layout = axes_layout(f"{view.intensity}{', requests/s' if view.intensity == 'request rate' else ''}", title)
    loads = sorted({row.load.intensity for row in rows})
    shown = ticks(loads)
    layout["xaxis"] |= {"type": "log", "tickvals": shown, "ticktext": [f"{tick:g}" for tick in shown]}
    if loads:
        aside = max(0.05, 0.04 * math.log10(loads[-1] / loads[0]))  # keeps points off the edge
        layout["xaxis"]["range"] = (math.log10(loads[0]) - aside, math.log10(loads[-1]) + aside)
    points = [point for _, found in lines for point in found]
    above_zero = [point.value for point in points if point.value > 0]
    if above_zero and max(above_zero) / min(above_zero) > 30:  # otherwise one line would coincide with the axis
        low, high = math.log10(min(above_zero)) - 0.15, math.log10(max(above_zero)) + 0.15
        layout["yaxis"] |= {"type": "log", "range": (low, high), **_log_ticks(low, high)}
    elif above_zero:
        layout["yaxis"]["range"] = _linear_range(points)
    return {"data": [line for line, _ in lines], "layout": layout}


def _log_ticks(low: float, high: float) -> dict[str, Any]:
    """Ticks of a logarithmic vertical axis: powers of ten, and if these are few, also 2 and 5 times them."""
    digits = (1, 2, 5) if high - low < _FEW_DECADES else (1,)
    values = [digit * 10.0**power for power in range(math.floor(low), math.ceil(high) + 1) for digit in digits]
    return {"tickvals": values, "ticktext": [f"{value:,g}" for value in values]}


def ticks(loads: Sequence[float]) -> list[float]:
    """Ticks of a logarithmic axis: the loads, from the largest down, that are far enough apart to be readable."""
    if len(loads) < 2:
        return list(loads)
    least = _TICK_SHARE * math.log(loads[-1] / loads[0])
    kept = [loads[-1]]
    for load in reversed(loads[:-1]):
        if math.log(kept[-1] / load) >= least:
            kept.append(load)
    return kept[::-1]


def axes_layout(x: str, y: str) -> dict[str, Any]:
    """Layout shared by all charts. ``x``, ``y``: axis titles."""

    def axis(title: str) -> dict[str, Any]:
        return {
            "title": {"text": title, "font": {"size": 12, "color": SOFT}, "standoff": 8},
            "gridcolor": _GRID, "zeroline": False, "linecolor": "#c3ccd6", "automargin": True,
            "tickfont": {"size": 11, "color": SOFT}, "fixedrange": True,
        }  # fmt: skip

    return {
        "font": {"family": _FONT, "color": INK}, "paper_bgcolor": "#ffffff", "plot_bgcolor": "#ffffff",
        "margin": {"l": 56, "r": 20, "t": 12, "b": 48}, "xaxis": axis(x), "yaxis": axis(y), "showlegend": False,
        "hoverlabel": {"font": {"family": _FONT}}, "autosize": True,
    }  # fmt: skip
