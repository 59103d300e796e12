"""Turns a run directory into what people and machines read: tables, JSON, CSV, Markdown, JUnit and one HTML page.

Owns the form of every figure that is shown, and ``summary.*``, ``junit.xml`` and ``report.html`` in a run directory.
Does not measure, serve or judge: ``bench`` makes the cells, ``experiment`` decides how a run ends.
Enter through :func:`render` for a directory and :func:`console_table` for a terminal.
Always holds: the same directory gives the same files, the page needs no network, and what failed or is missing shows.
"""

from trtx.report.render import REPORT_FILE, render
from trtx.report.table import console_table
from trtx.report.view import RunView, read_run

__all__ = ["REPORT_FILE", "RunView", "console_table", "read_run", "render"]
