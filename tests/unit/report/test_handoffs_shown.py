"""What became of the KV of a cell's prompts, as a reader sees it: summary.md and the page."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

from trtx.bench.cells import CELL
from trtx.bench.handoffs import NO_PREFILL, HandoffCounts
from trtx.report import read_run, render


def test_prompts_that_the_router_left_to_decode_workers_stand_beside_the_handoffs_and_are_not_lost(
    measured_run: Path,
) -> None:
    (row, *_) = (one for one in read_run(measured_run).rows if one.cell)
    assert row.cell is not None
    pairs = {
        NO_PREFILL: HandoffCounts(local=1500),
        "prefill-0": HandoffCounts(read=20, nothing=3, bytes=5 << 20, seconds=0.1),
    }
    CELL.write(measured_run / "cells" / row.name, replace(row.cell, handoffs={"decode-0": pairs}).to_json())
    render(measured_run)
    wanted = [row.name, "1,523", "20", "3", "0", "1,500", "0", "5.00", "5.00", "–"]
    summary = (measured_run / "summary.md").read_text(encoding="utf-8")
    _, _, section = summary.partition("## Handoffs")
    lines = [[cell.strip() for cell in line.strip("| ").split("|")] for line in section.splitlines() if "|" in line]
    assert lines[0][5:7] == ["local", "whole"] and wanted in lines
    page = (measured_run / "report.html").read_text(encoding="utf-8")
    cells = [re.sub(r"<[^>]+>", "", one) for one in re.findall(r"<td[^>]*>.*?</td>", page, re.DOTALL)]
    assert "1,500" in cells
