"""Acceptance of drafts as a reader sees it: the terminal at 80 columns, summary.md, summary.json and the page."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from itertools import product
from pathlib import Path

from tests.unit.report.shown_forms import rendered
from trtx.bench import cell_directory, cell_name, trial_directory
from trtx.bench.cells import CELL, measure_cell
from trtx.bench.draft_counters import ACCEPTED, DRAFTED, STEPS, DraftCounts
from trtx.bench.readings import ServerReading, write_readings
from trtx.bench.records import RECORDS_FILE, read_trial
from trtx.experiment.bench.resumption import read_recorded
from trtx.experiment.directory import read_lock

SECOND = 10**9
EVERY_NS = SECOND // 5
LENGTH = "spec_decode_token_weighted_acceptance_length"


def _reading(at_ns: int, place: int) -> ServerReading:
    """After each reading, 10 more drafts of 2 tokens, of which 8 and 4 are accepted; 20 decodes."""
    counts = DraftCounts(
        10 * place, 20 * place, 12 * place, (10 * place, 10 * place), (8 * place, 4 * place), 20 * place,
        0.01 * place, 0.2 * place,
    )  # fmt: skip
    return ServerReading(at_ns, (), None, drafts={"agg": {"agg-0": counts}})


def _measure(run: Path, speculates: Callable[[str], bool]) -> None:
    """The golden run with readings of the cells that ``speculates`` names."""
    spec = read_lock(run)
    recorded = read_recorded(run, spec)
    for label, load in product(spec.labels, spec.load.loads):
        name = cell_name(label, load)
        directory = cell_directory(run, name)
        trial = trial_directory(directory, 1)
        if speculates(name):
            measured = read_trial(trial / RECORDS_FILE).measured
            start_ns, end_ns = min(one.start_ns for one in measured), max(one.end_ns for one in measured)
            times = range(start_ns - EVERY_NS, end_ns + 2 * EVERY_NS, EVERY_NS)
            write_readings(trial, [_reading(at_ns, place) for place, at_ns in enumerate(times)])
        target = replace(recorded.target(label), gpu_count=0)
        cell = measure_cell(directory, target, spec.load, load, (1,), restarted=())
        CELL.write(directory, cell.to_json())


def _row(text: str, name: str) -> list[str]:
    """The cells of the last line about a cell of the run."""
    line = [line for line in text.splitlines() if re.match(rf"\|? ?{name}\b", line)][-1]
    return [part.strip() for part in re.split(r"\s\|\s|\s{2,}|^\| | \|$", line) if part.strip()]


def test_every_form_has_the_acceptance_and_a_dash_where_a_topology_does_not_speculate(golden_run: Path) -> None:
    _measure(golden_run, lambda name: name.startswith("agg"))
    terminal, markdown, page = rendered(golden_run)
    assert max(map(len, terminal.splitlines())) <= 80
    section = markdown[markdown.index("## Speculation") : markdown.index("## Validity")]
    for text in (terminal, section):
        _, drafts, *numbers = _row(text, "agg-c1")
        assert int(drafts.replace(",", "")) % 10 == 0 and numbers == [
            "50.0", "1.60", "2.20", "60.0", "80.0, 40.0", "5.00",
        ]  # fmt: skip
        assert _row(text, "disagg-c1")[1:] == ["–"] * 7
    assert 'aria-label="Speculation"' in page and "<td>80.0, 40.0</td>" in page
    rows = json.loads((golden_run / "summary.json").read_text())["rows"]
    assert [row[LENGTH] for row in rows] == [2.2, 2.2, None, None]
    assert [row[f"steady_{LENGTH}"] for row in rows] == [2.2, 2.2, None, None]


def test_what_a_server_reports_with_its_answers_stands_in_for_counters(golden_run: Path) -> None:
    """As vLLM does: aiperf has it in its records."""
    file = trial_directory(cell_directory(golden_run, "agg-c1"), 1) / RECORDS_FILE
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    for entry in lines[::2]:  # a request whose steps had no draft has no such metrics
        entry["metrics"] |= {name: {"value": value} for name, value in ((STEPS, 4), (DRAFTED, 12), (ACCEPTED, 6))}
    file.write_text("".join(f"{json.dumps(entry)}\n" for entry in lines))
    _measure(golden_run, lambda name: False)
    _, markdown, _ = rendered(golden_run)
    row = _row(markdown[markdown.index("## Speculation") : markdown.index("## Validity")], "agg-c1")
    assert row[2:] == ["–", "–", "2.50", "50.0", "–", "–"]


def test_a_run_without_speculation_says_nothing_of_it(golden_run: Path) -> None:
    _measure(golden_run, lambda name: False)
    for text in rendered(golden_run):
        assert "Speculation" not in text and "acceptance" not in text
