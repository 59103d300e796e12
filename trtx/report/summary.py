"""The summary files: JSON for programs, CSV for spreadsheets, Markdown for a pull request, JUnit for a CI job."""

from __future__ import annotations

import csv
import io
import xml.etree.ElementTree as ElementTree
from dataclasses import asdict
from typing import Any

from trtx.bench.figures import all_figures
from trtx.bench.metrics import benchmark_duration
from trtx.report.columns import UNSURE, markdown_columns, requests_text
from trtx.report.forms import SUMMARY
from trtx.report.verdict import verdict_cases, verdict_json, verdict_markdown, xml_safe
from trtx.report.view import Row, RunView


def summary_rows(view: RunView) -> list[dict[str, Any]]:
    """One flat dict a cell, keys named as aiperf names the metrics; ms, s, tokens/s; None where there is no figure."""
    return [_flat(view, row) for row in view.rows]


def summary_json(view: RunView) -> dict[str, Any]:
    """``summary.json``."""
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
        "rows": summary_rows(view),
    }


def summary_csv(view: RunView) -> str:
    out = io.StringIO()
    rows = summary_rows(view)
    if rows:
        writer = csv.DictWriter(out, fieldnames=list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    return out.getvalue()


def summary_markdown(view: RunView) -> str:
    columns = markdown_columns(view)
    lines = [
        f"# {view.model}: {' and '.join(view.labels)}",
        "",
        f"{view.subtitle}. Latencies in ms; {UNSURE} marks a percentile with fewer samples than it needs.",
        "",
        f"| topology | load | requests | {' | '.join(column.title for column in columns)} |",
        f"|---|---|--:|{'--:|' * len(columns)}",
    ]
    for row in view.rows:
        figures = " | ".join(column.text(row) for column in columns)
        lines.append(f"| {row.topology} | {row.load.label} | {requests_text(row)} | {figures} |")
    problems = [*view.notes, *(f"{row.name}: {row.problem}" for row in view.rows if row.problem)]
    if problems:
        lines += ["", "## What went wrong", "", *(f"- {_one_line(problem)}" for problem in problems)]
    lines += verdict_markdown(view.verdict)
    lines += ["", "## Conditions", "", "| | |", "|---|---|"]
    lines += [f"| {c.name} | {_one_line(c.value).replace('|', chr(92) + '|')} |" for c in view.conditions]
    lines += [f"| {label} | {served} |" for label, served in view.topologies]
    return "\n".join(lines) + "\n"


def junit_xml(view: RunView) -> str:
    """One test case a judgement; of a run that was not judged, one a cell."""
    suite = ElementTree.Element("testsuite", name=f"trtx bench {view.name}")
    if view.verdict is not None:
        verdict_cases(suite, view.verdict, {row.name: _seconds(row) for row in view.rows})
    else:
        _cell_cases(suite, view)
    ElementTree.indent(suite)
    return '<?xml version="1.0" encoding="UTF-8"?>\n' + ElementTree.tostring(suite, encoding="unicode") + "\n"


def _cell_cases(suite: ElementTree.Element, view: RunView) -> None:
    """Failed requests are a failure, a cell without a result or uncounted is an error."""
    broken = [row for row in view.rows if row.status in ("failed", "missing", "uncounted")]
    failing = [row for row in view.rows if row.status == "errors"]
    for name, found in (("tests", view.rows), ("failures", failing), ("errors", broken)):
        suite.set(name, str(len(found)))
    for row in view.rows:
        case = ElementTree.SubElement(
            suite, "testcase", classname=f"trtx.bench.{row.topology}", name=row.name, time=f"{_seconds(row):.3f}"
        )
        if row in broken or row in failing:
            kind = "error" if row in broken else "failure"
            ElementTree.SubElement(case, kind, message=xml_safe(row.problem or row.status))


def _seconds(row: Row) -> float:
    return row.value(benchmark_duration) or 0.0


def _flat(view: RunView, row: Row) -> dict[str, Any]:
    flat: dict[str, Any] = {"topology": row.topology, **asdict(row.load), "load": row.load.label, "status": row.status}
    del flat["label"]
    for figure in all_figures():
        flat |= figure.flat(row.value(figure), figure.key(view.device))
    return {**flat, "trials": len(row.cell.trials) if row.cell else 0, "problem": row.problem}


def _one_line(text: str) -> str:
    return " ".join(text.split())
