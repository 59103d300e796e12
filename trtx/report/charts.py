"""The charts of the page, as Plotly's own JSON: data and layout, nothing computed in the browser."""

from __future__ import annotations

import itertools
from typing import Any

from trtx.bench.figures import Spread
from trtx.bench.metrics import (
    inter_token_latency,
    output_token_throughput,
    output_token_throughput_per_device,
    output_token_throughput_per_user,
    time_to_first_token,
)
from trtx.report.columns import number
from trtx.report.view import Row, RunView

Chart = dict[str, Any]

# Okabe and Ito's colours, told apart by people who see red and green alike. The two modes always have theirs.
_OF_MODES = {"agg": ("#0072B2", "circle"), "disagg": ("#D55E00", "diamond")}
_OTHERS = (
    ("#009E73", "square"), ("#CC79A7", "triangle-up"), ("#8A6D00", "triangle-down"), ("#56B4E9", "star"),
    ("#7B4FA3", "pentagon"), ("#5b6b7c", "hexagon"), ("#0072B2", "circle-dot"), ("#D55E00", "diamond-dot"),
)  # fmt: skip

_INK, _GRID, _SOFT = "#1d2733", "#e6eaef", "#5b6b7c"
_FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, 'Helvetica Neue', Arial, sans-serif"


def _marks(view: RunView) -> dict[str, tuple[str, str]]:
    """Colour and symbol of each series, in the order of the table; past the tenth they come again."""
    others = itertools.cycle(_OTHERS)
    return {series: _OF_MODES.get(series) or next(others) for series in view.all_series}


def colors(view: RunView) -> dict[str, str]:
    """Of each series."""
    return {series: color for series, (color, _) in _marks(view).items()}


def charts(view: RunView) -> dict[str, Chart]:
    """Chart id → figure. A chart without a single point is left out."""
    built = {
        "pareto": _pareto(view),
        "throughput": _throughput(view),
        "ttft": _latency(view, time_to_first_token),
        "itl": _latency(view, inter_token_latency),
    }
    return {name: figure for name, figure in built.items() if figure["data"]}


def pareto_front(points: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """The points that no other beats in both coordinates, by rising first one. Larger is better in both."""
    front: list[tuple[float, float]] = []
    for x, y in sorted(set(points), key=lambda point: (-point[0], -point[1])):
        if not front or y > front[-1][1]:
            front.append((x, y))
    return front[::-1]


def _pareto(view: RunView) -> Chart:
    data: list[dict[str, Any]] = []
    per_user, per_device = output_token_throughput_per_user, output_token_throughput_per_device
    x_unit, y_unit = (figure.unit.format(device=view.device) for figure in (per_user, per_device))
    most = max((rate for row in view.rows if (rate := row.value(per_user))), default=0.0)
    for series, (color, symbol) in _marks(view).items():
        points = [
            (x, y, row)
            for row in view.rows
            if view.series(row) == series and (x := row.value(per_user)) and (y := row.value(per_device))
        ]
        if not points:
            continue
        # Failed requests leave the others more room: a cell that has any competes with none that has not.
        front = pareto_front([(x, y) for x, y, row in points if row.status == "ok"])
        data.append(
            {
                "type": "scatter", "mode": "lines", "name": f"{series} front", "showlegend": False, "hoverinfo": "skip",
                "x": [x for x, _ in front], "y": [y for _, y in front],
                "line": {"color": color, "width": 2, "shape": "linear"},
            }
        )  # fmt: skip
        on_front = [row.status == "ok" and (x, y) in front for x, y, row in points]
        data.append(
            {
                "type": "scatter", "mode": "markers+text", "name": series,
                "x": [x for x, _, _ in points], "y": [y for _, y, _ in points],
                "text": [_label(row) for _, _, row in points],
                "texttemplate": "\u2002%{text}\u2002",
                "textposition": [_label_side(series, x / most) for x, _, _ in points],
                "textfont": {"color": color, "size": 12, "shadow": "0 0 3px white, 0 0 3px white, 0 0 3px white"},
                "marker": {
                    "size": 11, "symbol": symbol,
                    "color": [color if best else "#ffffff" for best in on_front],
                    "line": {"color": color, "width": 2},
                },
                "cliponaxis": False,
                "hovertemplate": f"{series}, %{{text}}<br>%{{x:.4g}} {x_unit}<br>%{{y:.4g}} {y_unit}<extra></extra>",
            }
        )  # fmt: skip
    layout = _layout(x_unit, y_unit)
    layout["xaxis"]["rangemode"] = layout["yaxis"]["rangemode"] = "tozero"
    return {"data": data, "layout": layout}


def _label_side(series: str, x: float) -> str:
    """Away from an edge that would cut the label; between, agg's left and the others' right. x: 0 to 1."""
    side = "right" if x < 0.2 else "left" if x > 0.8 else "left" if series == "agg" else "right"
    return f"middle {side}"


def _label(row: Row) -> str:
    return row.load.label.partition("-")[0] + (f", {row.failed_text}" if row.failed_text else "")


def _throughput(view: RunView) -> Chart:
    data, figure = [], output_token_throughput
    for series, marks in _marks(view).items():
        points = [(row, found) for row in view.rows if view.series(row) == series and (found := row.value(figure))]
        if points:
            data.append(_line(marks, series, points, figure.unit))
    return {"data": data, "layout": _load_layout(view, figure.unit, data)}


def _latency(view: RunView, figure: Spread) -> Chart:
    """p50 as a line, and dotted the highest percentile that every cell of the series has the samples for."""
    data = []
    for series, marks in _marks(view).items():
        found = [(row, spread) for row in view.rows if view.series(row) == series and (spread := row.value(figure))]
        if not found:
            continue
        stated = [
            q for q in figure.percentiles if all(spread.supports(q) and spread[q] is not None for _, spread in found)
        ]
        for q in dict.fromkeys((50, max(stated, default=50))):
            line = _line(
                marks,
                f"{series} p{q}",
                [(row, at) for row, spread in found if (at := spread[q]) is not None],
                figure.unit,
            )
            if q != 50:
                line["line"] |= {"dash": "dot", "width": 1.5}
                line["marker"] |= {"size": 6}
            data.append(line)
    return {"data": data, "layout": _load_layout(view, f"{figure.title}, {figure.unit}", data)}


def _line(marks: tuple[str, str], name: str, points: list[tuple[Row, float]], unit: str) -> dict[str, Any]:
    """A cell with failed requests is a cross."""
    color, symbol = marks
    return {
        "type": "scatter", "mode": "lines+markers", "name": name,
        "x": [row.load.intensity for row, _ in points], "y": [y for _, y in points],
        "text": [number(y) for _, y in points],
        "customdata": [f"<br>{row.failed_text}" if row.failed_text else "" for row, _ in points],
        "line": {"color": color, "width": 2},
        "marker": {
            "size": 8, "symbol": ["x" if row.failed_text else symbol for row, _ in points], "color": color,
        },
        "cliponaxis": False,
        "hovertemplate": f"{name}, %{{x}}<br>%{{text}} {unit}%{{customdata}}<extra></extra>",
    }  # fmt: skip


def _load_layout(view: RunView, title: str, data: list[dict[str, Any]]) -> dict[str, Any]:
    layout = _layout(view.intensity, title)
    ticks = sorted({row.load.intensity for row in view.rows})
    layout["xaxis"] |= {"type": "log", "tickvals": ticks, "ticktext": [f"{tick:g}" for tick in ticks]}
    values = [y for line in data for y in line["y"] if y > 0]
    if values and max(values) / min(values) > 30:  # one line would lie flat on the axis
        layout["yaxis"] |= {"type": "log", "dtick": 1}
    else:
        layout["yaxis"]["rangemode"] = "tozero"
    return layout


def _layout(x: str, y: str) -> dict[str, Any]:
    def axis(title: str) -> dict[str, Any]:
        return {
            "title": {"text": title, "font": {"size": 12, "color": _SOFT}, "standoff": 8},
            "gridcolor": _GRID, "zeroline": False, "linecolor": "#c3ccd6", "automargin": True,
            "tickfont": {"size": 11, "color": _SOFT}, "fixedrange": True,
        }  # fmt: skip

    return {
        "font": {"family": _FONT, "color": _INK}, "paper_bgcolor": "#ffffff", "plot_bgcolor": "#ffffff",
        "margin": {"l": 56, "r": 28, "t": 12, "b": 48}, "xaxis": axis(x), "yaxis": axis(y),
        "legend": {"orientation": "h", "y": 1.02, "yanchor": "bottom", "x": 0, "font": {"size": 12}},
        "hoverlabel": {"font": {"family": _FONT}}, "autosize": True,
    }  # fmt: skip
