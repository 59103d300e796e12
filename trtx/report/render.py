"""Renders a run directory into its summary files and its page."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from trtx.bench.files import write_text
from trtx.report.frames import write_tables
from trtx.report.junit import junit_xml
from trtx.report.page import page
from trtx.report.stage_bars import explanations_of
from trtx.report.summary import summary_csv, summary_fields, summary_markdown
from trtx.report.view import RunView, read_run
from trtx.runs.forms import SUMMARY

REPORT_FILE = "report.html"


def render(run_dir: Path) -> RunView:
    """Writes ``summary.{json,csv,md,parquet}``, ``records.parquet``, ``junit.xml`` and ``report.html``.

    Returns the data that they show. Uses only the directory's content (no clock, machine or network), so rendering
    again gives identical bytes.
    """
    view = read_run(run_dir)
    view = replace(view, explanations=explanations_of(run_dir, [row.cell for row in view.rows if row.cell]))
    SUMMARY.write(run_dir, summary_fields(view))
    write_text(run_dir / "summary.csv", summary_csv(view))
    write_text(run_dir / "summary.md", summary_markdown(view))
    write_tables(run_dir, view)
    write_text(run_dir / "junit.xml", junit_xml(view))
    write_text(run_dir / REPORT_FILE, page(view))
    return view
