"""``report.html``: one file that opens anywhere, with Plotly and all figures inside."""

from __future__ import annotations

import json
from functools import cache
from importlib import resources

from jinja2 import Environment, StrictUndefined, Template
from markupsafe import Markup

from trtx.bench.figures import all_figures
from trtx.bench.judgement import Verdict
from trtx.bench.metrics import error_request_count, output_token_throughput_per_device, time_to_first_token
from trtx.report.charts import charts, colors
from trtx.report.columns import UNSURE, needed, number, page_columns, requests_text
from trtx.report.verdict import compared_with, lines
from trtx.report.verdict import headline as verdict_headline
from trtx.report.view import Row, RunView

_CHARTS = {
    "pareto": (
        "Pareto front",
        "Up and to the right is better; c is concurrency, r requests/s. Hollow: not on the front, or requests failed.",
    ),
    "throughput": (
        "Throughput against load",
        "Output tokens of all users together. A cross: requests failed.",
    ),
    "ttft": (
        "Time to first token against load",
        "Median, and dotted the highest percentile with enough samples.",
    ),
    "itl": (
        "Inter-token latency against load",
        "Median, and dotted the highest percentile with enough samples.",
    ),
}

_CLASSES = {Verdict.PASS: "good-text", Verdict.NO_VERDICT: "open-text"}


def page(view: RunView) -> str:
    """The whole page as text."""
    drawn = charts(view)
    headings = page_columns(view)
    judged = () if view.verdict is None else lines(view.verdict)
    return _template().render(
        view=view,
        headings=headings,
        needed=needed(column for _, columns in headings for column in columns),
        failed=error_request_count,
        figures=[figure for figure in all_figures() if figure.heading],
        charts=[(name, *_CHARTS[name]) for name in drawn],
        # "<" never appears raw inside the script, so no label can end it.
        drawn=Markup(json.dumps(drawn, sort_keys=True).replace("<", "\\u003c")),
        plotly=Markup(_plotly()),
        headline=_headline(view),
        best=_best(view),
        not_passed=[line for line in judged if line.judgement.verdict is not Verdict.PASS],
        passed=[line for line in judged if line.judgement.verdict is Verdict.PASS],
        baseline=view.verdict and view.verdict.baseline,
    )


def _headline(view: RunView) -> str:
    cells = f"{len(view.rows)} cell{'s' if len(view.rows) != 1 else ''}"
    without = [row.name for row in view.rows if row.figures is None]
    if without:
        return f"{len(without)} of {cells} have no result: {', '.join(without)}"
    if view.requests_failed:
        return f"{view.requests_failed:,} of {view.requests_sent:,} requests failed"
    if view.answers_uncounted:
        return f"{view.answers_uncounted:,} of {view.requests_sent:,} answers carry no usage"
    if view.verdict is not None and view.verdict.exit_code:
        return verdict_headline(view.verdict)
    if unlike := sum(row.isl_text is not None for row in view.rows):
        return f"{unlike} of {cells} had prompts of another length than asked"
    return f"{cells}, {view.requests_sent:,} requests, none failed"


def _best(view: RunView) -> list[dict[str, str]]:
    """For each series, what it did best where nothing failed: failed requests leave the others more room."""
    cards = []
    for series in view.all_series:
        rows = [row for row in view.rows if view.series(row) == series and row.status == "ok"]
        rates = [(rate, row) for row in rows if (rate := row.value(output_token_throughput_per_device))]
        waits = [(at, row) for row in rows if (ttft := row.value(time_to_first_token)) and (at := ttft[50])]
        if not rates or not waits:
            continue
        (throughput, most), (wait, least) = max(rates, key=_first), min(waits, key=_first)
        cards.append(
            {
                "series": series,
                "color": colors(view)[series],
                "throughput": number(throughput),
                "throughput_at": most.load.asked,
                "ttft": number(wait),
                "ttft_at": least.load.asked,
            }
        )
    return cards


def _first(pair: tuple[float, Row]) -> float:
    return pair[0]


@cache
def _plotly() -> str:
    from plotly.offline import get_plotlyjs

    return str(get_plotlyjs())


@cache
def _template() -> Template:
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    environment.globals |= {"colors": colors, "requests_text": requests_text, "UNSURE": UNSURE}
    environment.globals |= {"compared_with": compared_with, "verdict_headline": verdict_headline}
    environment.globals["verdict_class"] = {one.value: _CLASSES.get(one, "failed-text") for one in Verdict}
    return environment.from_string((resources.files("trtx.report") / "page.html.j2").read_text(encoding="utf-8"))
