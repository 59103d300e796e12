"""Renders a run directory for people and machines: tables, JSON, CSV, Markdown, JUnit and one HTML page.

This package owns the presentation of all metrics, and ``summary.*``, ``junit.xml`` and ``report.html`` in a run
directory. It doesn't measure, serve or judge: ``bench`` creates the cells, and ``experiment`` decides how a run ends.
Call :func:`render` for a directory, and :func:`console_table` for a terminal. Invariants: equal directories give equal
files; the page needs no network; failures and missing data are visible.
"""

from trtx.report.render import REPORT_FILE, render
from trtx.report.table import console_table
from trtx.report.view import RunView, read_run

__all__ = ["REPORT_FILE", "RunView", "console_table", "read_run", "render"]
