"""``report.html``: a self-contained file that includes Plotly and all data."""

from __future__ import annotations

from typing import Any

from trtx.bench.judge.checks import ValidityLevel
from trtx.bench.judge.judgement import Verdict
from trtx.bench.metrics import (
    GPU_HEADINGS,
    error_request_count,
    output_token_throughput_per_device,
    time_to_first_token,
)
from trtx.report.charts import charts, shows_tails
from trtx.report.columns import (
    MISSING,
    UNSURE,
    Column,
    intervals_text,
    needed,
    number,
    page_columns,
    requests_text,
    shown_metrics,
)
from trtx.report.comparison import arms_shown, difference_text, score_text
from trtx.report.explanation import NO_CAUSE
from trtx.report.forest import forest, forest_height_px
from trtx.report.gpus import GPU_MEANING, gpu_reasons
from trtx.report.handoffs import HANDOFF_HEADINGS, HANDOFF_MEANING, handoff_rows
from trtx.report.images import HEADINGS, MEANING, image_rows
from trtx.report.series import marks
from trtx.report.speculation import DRAFT_HEADINGS, DRAFT_MEANING, draft_rows
from trtx.report.speed_and_quality import speed_and_quality, throughput_title
from trtx.report.stage_bars import MEANING as STAGE_MEANING
from trtx.report.stage_bars import TITLE as STAGE_TITLE
from trtx.report.stage_bars import stage_bars, stage_bars_height_px
from trtx.report.templates import in_script, plotly_source, rendered
from trtx.report.validity import by_level, doubtful, level_text, not_checked, reason_text, reasons, records_text
from trtx.report.verdict import against_baseline, compared_with, lines
from trtx.report.verdict import headline as verdict_headline
from trtx.report.view import Part, Row, RunView

_HEADLINED = 4  # maximum number of cells in a headline
_CROSS = "A cross marks a cell that is INVALID or has failed requests."
_PARTS: dict[Part, str] = {"whole": "Whole trials", "steady": "Steady part"}

# Functions that the template calls.
_FUNCTIONS = {
    one.__name__: one
    for one in (
        against_baseline, by_level, compared_with, difference_text, doubtful, forest_height_px, intervals_text,
        level_text, not_checked, reason_text, reasons, records_text, requests_text, score_text, stage_bars_height_px,
    )
} | {"UNSURE": UNSURE, "MISSING": MISSING, "verdict_headline": verdict_headline}  # fmt: skip


def page(view: RunView) -> str:
    """The complete page."""
    drawn = [charts(view, lengths) for lengths in view.length_pairs]
    headings = page_columns(view)
    judged = () if view.verdict is None else lines(view.verdict)
    bars = stage_bars(view.explanations)
    arms = {f"forest-{place}": shown for place, shown in enumerate(arms_shown(view))}
    content = {
        "view": view,
        "needed": needed(column for _, columns in headings for column in columns),
        "failed": error_request_count,
        "metrics": [metric for metric in shown_metrics(view) if metric.heading],
        "parts": [(part, name, _groups(view, part, of_gpus=False)) for part, name in _PARTS.items()],
        "gpu_groups": _groups(view, "steady", of_gpus=True),
        "gpu_reasons": gpu_reasons(view),
        "gpu_meaning": GPU_MEANING,
        "images": image_rows(view),
        "image_headings": HEADINGS,
        "image_meaning": MEANING,
        "handoffs": handoff_rows(view),
        "handoff_headings": HANDOFF_HEADINGS,
        "handoff_meaning": HANDOFF_MEANING,
        "drafts": draft_rows(view),
        "draft_headings": DRAFT_HEADINGS,
        "draft_meaning": DRAFT_MEANING,
        "charts": [
            (name, *captions) for name, captions in _captions(view).items() if any(name in one for one in drawn)
        ],
        "marks": marks(view),
        "pill": _pill(view),
        "drawn": in_script(drawn),
        "arms": arms,
        "forests": in_script({**{name: forest(shown) for name, shown in arms.items()}, **bars}),
        "stage_bars": bars,
        "stage_title": STAGE_TITLE,
        "stage_meaning": STAGE_MEANING,
        "no_cause": NO_CAUSE,
        "plotly": plotly_source(),
        "headline": _headline(view),
        "best": _best(view),
        "speed_and_quality": speed_and_quality(view),
        "throughput_title": throughput_title(view),
        "not_passed": [line for line in judged if line.judgement.verdict is not Verdict.PASS],
        "passed": [line for line in judged if line.judgement.verdict is Verdict.PASS],
        "baseline": view.verdict and view.verdict.baseline,
    }
    return rendered("page.html.j2", {**_FUNCTIONS, **content})


def _groups(view: RunView, part: Part, *, of_gpus: bool) -> list[tuple[str, tuple[Column, ...]]]:
    """The column groups of the page's table of GPU metrics, or of its table of all other metrics."""
    gpus = {heading.value for heading in GPU_HEADINGS}
    return [(heading, columns) for heading, columns in page_columns(view, part) if (heading in gpus) == of_gpus]


def _captions(view: RunView) -> dict[str, tuple[str, str]]:
    """Title and explanation of each chart."""
    bars = " Bars: intervals over the trials." if view.trials > 1 else ""
    tails = "; the dotted line is the highest percentile with enough samples" if shows_tails(view) else ""
    return {
        "pareto": (
            "Pareto front",
            "Up and to the right is better; c is concurrency, r is requests/s. Hollow points are not on the front. A "
            f"cell that is INVALID, lacks trials or has failed requests is never on it.{bars}",
        ),
        "throughput": ("Throughput against load", f"Output tokens of all users together. {_CROSS}{bars}"),
        "ttft": ("Time to first token against load", f"Median{tails}. {_CROSS}{bars}"),
        "itl": ("Inter-token latency against load", f"Median{tails}. {_CROSS}{bars}"),
    }


def _pill(view: RunView) -> str:
    """CSS class of the headline."""
    return "bad" if not view.is_clean else "doubt" if doubtful(view) else ""


def _headline(view: RunView) -> str:
    cells = f"{len(view.rows)} cell{'s' if len(view.rows) != 1 else ''}"
    without = [row.name for row in view.rows if row.figures is None]
    if without:
        return f"{len(without)} of {cells} have no result{_named(without)}"
    if view.requests_failed:
        return f"{view.requests_failed:,} of {view.requests_sent:,} requests failed"
    if view.answers_uncounted:
        return f"{view.answers_uncounted:,} of {view.requests_sent:,} answers carry no usage"
    if view.verdict is not None and view.verdict.exit_code:
        return verdict_headline(view.verdict)
    if invalid := [row.name for row in view.rows if row.level is ValidityLevel.INVALID]:
        return f"{len(invalid)} of {cells} INVALID{_named(invalid)}"
    if incomplete := sum(row.incomplete_text is not None for row in view.rows):
        return f"{incomplete} of {cells} lack trials"
    if unlike := sum(row.isl_text is not None for row in view.rows):
        return f"{unlike} of {cells} had prompts of another length than asked"
    suspect = f"; {len(doubtful(view))} SUSPECT" if doubtful(view) else ""
    # Only for a run that ended early, since a completed run is judged.
    if view.scores is not None and view.scores.missing:
        return f"{cells} measured, and {', '.join(view.scores.missing)} not scored"
    scored = "; answers scored" if view.scores else ""
    return f"{cells}, {view.requests_sent:,} requests, none failed{suspect}{scored}"


def _named(cells: list[str]) -> str:
    return f": {', '.join(cells)}" if len(cells) <= _HEADLINED else ""


def _best(view: RunView) -> list[dict[str, Any]]:
    """The best throughput and TTFT of each series, over valid cells without failures."""
    cards: list[dict[str, Any]] = []
    for series in view.all_series:
        rows = [row for row in view.rows if view.series(row) == series and row.can_be_best]
        rates = [(rate, row) for row in rows if (rate := row.value(output_token_throughput_per_device))]
        waits = [(at, row) for row in rows if (ttft := row.value(time_to_first_token)) and (at := ttft[50])]
        if not rates or not waits:
            continue
        (throughput, most), (wait, least) = max(rates, key=_first), min(waits, key=_first)
        cards.append(
            {
                "series": series,
                "topology": most.topology,
                "lengths": view.length_pairs.index((most.load.isl, most.load.osl)),
                "throughput": number(throughput),
                "throughput_at": most.load.asked,
                "ttft": number(wait),
                "ttft_at": least.load.asked,
            }
        )
    return cards


def _first(pair: tuple[float, Row]) -> float:
    return pair[0]
