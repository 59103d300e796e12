"""The summary files: JSON for programs, CSV for spreadsheets, Markdown for pull requests."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from trtx.bench.documents import plain
from trtx.bench.metric_types import all_figures
from trtx.report.columns import MISSING, UNSURE, interval_columns, intervals_text, markdown_columns, requests_text
from trtx.report.comparison import arms_markdown, comparison_json
from trtx.report.gpus import gpus_markdown
from trtx.report.handoffs import handoffs_markdown
from trtx.report.images import images_markdown
from trtx.report.speculation import drafts_markdown
from trtx.report.speed_and_quality import scores_markdown
from trtx.report.tables import markdown_line, table_cell
from trtx.report.validity import (
    doubtful,
    level_text,
    not_checked,
    not_checked_in,
    reason_text,
    reasons,
    reasons_text,
    validity_json,
)
from trtx.report.verdict import verdict_json, verdict_markdown
from trtx.report.view import Part, Row, RunView
from trtx.runs.forms import SUMMARY

PREFIXES: dict[Part, str] = {"whole": "", "steady": "steady_"}
# Load fields whose name is also a metric's: the field is the request per trial, the metric the successes over all
# trials.
ASKED = {"request_count": "request_count_asked"}


def summary_rows(view: RunView) -> list[dict[str, Any]]:
    """One flat dict per cell. Keys are aiperf's metric names; units are ms, s and tokens/s; missing metrics are
    None.
    """
    return [summary_row(view, row) for row in view.rows]


def summary_json(view: RunView) -> dict[str, Any]:
    """The versioned document ``summary.json``."""
    return SUMMARY.versioned(summary_fields(view))


def summary_fields(view: RunView) -> dict[str, Any]:
    return {
        "run": view.name,
        "model": view.model,
        "conditions": {condition.name: condition.value for condition in view.conditions},
        "topologies": dict(view.topologies),
        "notes": list(view.notes),
        "failures": {
            row.name: [{"reason": text, "count": count} for text, count in row.failures]
            for row in view.rows
            if row.failures
        },
        "verdict": verdict_json(view.verdict),
        "comparison": comparison_json(view.arms),
        "scores": None if view.scores is None else [plain(one) for one in view.scores.scored],
        "validity": validity_json(view),
        "files": view.documents.state,
        "rows": summary_rows(view),
    }


def summary_csv(view: RunView) -> str:
    import pandas as pd

    rows = summary_rows(view)
    return pd.DataFrame(rows, dtype=object).to_csv(index=False, lineterminator="\n") if rows else ""


def summary_markdown(view: RunView) -> str:
    lines = [
        f"# {markdown_line(view.model)}: {view.labels_text}",
        "",
        f"{view.subtitle}. Latencies in ms; {UNSURE} marks a percentile with fewer samples than it needs. "
        f"{intervals_text(view)}",
        "",
        *_markdown_table(view),
        *gpus_markdown(view),
        *images_markdown(view),
        *handoffs_markdown(view),
        *drafts_markdown(view),
        *_markdown_validity(view),
        *scores_markdown(view),
    ]
    problems = [*view.notes, *(f"{row.name}: {row.problem}" for row in view.rows if row.problem)]
    if problems:
        lines += ["", "## What went wrong", "", *(f"- {markdown_line(problem)}" for problem in problems)]
    lines += [*verdict_markdown(view.verdict), *arms_markdown(view)]
    lines += ["", "## Conditions", "", "| | |", "|---|---|"]
    lines += [f"| {c.name} | {table_cell(c.value)} |" for c in view.conditions]
    lines += [f"| {label} | {served} |" for label, served in view.topologies]
    return "\n".join(lines) + "\n"


def _markdown_table(view: RunView) -> list[str]:
    columns = markdown_columns(view)
    lines = [
        f"| topology | load | validity | requests | {' | '.join(column.title for column in columns)} |",
        f"|---|---|---|--:|{'--:|' * len(columns)}",
    ]
    for row in view.rows:
        figures = " | ".join(f"{column.text(row)} {column.margin(row)}".rstrip() for column in columns)
        level = level_text(row) or MISSING
        lines.append(f"| {row.topology} | {row.load.label} | {level} | {requests_text(row)} | {figures} |")
    return lines


def _markdown_validity(view: RunView) -> list[str]:
    """Reasons against cells, and checks that were not made; empty without any."""
    lines = [
        f"- {reason.level.value} {row.name}: {markdown_line(reason_text(reason))}"
        for row in doubtful(view)
        for reason in reasons(row)
    ]
    lines += [f"- not checked: {markdown_line(str(one))}" for one in not_checked(view)]
    return ["", "## Validity", "", *lines] if lines else []


def summary_row(view: RunView, row: Row) -> dict[str, Any]:
    """Metrics over all measured requests under their own keys, and over the steady part with the prefix ``steady_``."""
    asked = {ASKED.get(name, name): value for name, value in asdict(row.load).items()}
    flat: dict[str, Any] = {"topology": row.topology, **asked, "load": row.load.label, "status": row.status}
    del flat["label"]
    flat |= {
        "validity": level_text(row),
        "validity_reasons": reasons_text(row),
        "not_checked": ", ".join(not_checked_in(row)),
    }
    for part, prefix in PREFIXES.items():
        for metric in all_figures():
            flat |= metric.flat(row.value(metric, part), prefix + metric.key(view.device))
        for column in interval_columns(view, part):
            found = column.interval(row)
            flat |= {
                f"{prefix}{column.key}_low": found and found.low,
                f"{prefix}{column.key}_high": found and found.high,
            }
    trials = {"trials": len(row.cell.trials), "trials_asked": row.cell.trials_asked} if row.cell else {}
    return {**flat, "trials": 0, "trials_asked": None, **trials, "problem": row.problem}
