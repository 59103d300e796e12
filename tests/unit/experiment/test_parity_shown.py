"""What a report of parity says first: of a fault, of kills, and of what was not compared or not checked."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from trtx.bench import Journal
from trtx.bench.journal import RunFailed, RunResumed, TopologyReady, WorkerKilled
from trtx.evals.parity import PARITY, Parity, ParityAnswer, compare_route, parity_directory
from trtx.evals.parity.forms import RouteEvidence
from trtx.experiment.directory import write_lock
from trtx.experiment.environment import environment
from trtx.experiment.parity.spec import parity_of
from trtx.report.parity import render_parity
from trtx.runs.forms import Provenance

FAULT = "swap-block:every=100,layer=0"


def run_of(path: Path, **fields: Any) -> Path:
    write_lock(path, parity_of(fields), Provenance(environment(["trtx"], datetime.now(UTC)), {}))
    parity_directory(path).mkdir()
    return path


def compared(run_dir: Path, route: str, **of: Any) -> None:
    one = ParityAnswer(0, (7,), (-0.5,), ({"7": -0.5},), (), "length", 1, None, {}, None, 1, None)
    found = compare_route(route, [one], [one], model="m", cancelled=0, evidence=RouteEvidence((), None, **of))
    PARITY.write(parity_directory(run_dir), Parity(None, None, (found,)))


@pytest.mark.parametrize(
    ("corrupted", "said"),
    [
        (3, f"KV WAS CORRUPTED ON PURPOSE in 3 handoffs (TRTX_FAULT={FAULT}): this run tests the check"),
        (0, f"TRTX_FAULT={FAULT} corrupted no handoff: this run tests nothing"),
        (None, f"KV MAY HAVE BEEN CORRUPTED ON PURPOSE (TRTX_FAULT={FAULT}): in how many handoffs was not counted"),
    ],
)
def test_a_fault_is_told_by_what_it_did(corrupted: int | None, said: str, tmp_path: Path) -> None:
    run_dir = run_of(tmp_path, routes=["disagg"], fault=FAULT)
    compared(run_dir, "disagg", corrupted=corrupted)
    assert render_parity(run_dir).notes == (said,)
    for form in ("summary.md", "summary.json", "report.html"):
        text = (run_dir / form).read_text()
        assert said in text and ("KV WAS" in text) == bool(corrupted), form


def test_a_fault_without_a_route_that_hands_off_did_nothing(tmp_path: Path) -> None:
    run_dir = run_of(tmp_path, routes=["chunked"], fault=FAULT)
    assert render_parity(run_dir).notes[0] == f"TRTX_FAULT={FAULT} corrupted no handoff: this run tests nothing"


def test_the_kill_of_a_pass_that_was_made_again_is_told_once(tmp_path: Path) -> None:
    run_dir = run_of(tmp_path, routes=["migrated"])
    journal = Journal(run_dir)
    for worker in ("agg-0", "agg-1"):
        journal.note(TopologyReady(topology="migrated", load_seconds=1.0, warm_up_seconds=1.0))
        journal.note(WorkerKilled(topology="migrated", worker=worker, open_requests=3))
        if worker == "agg-0":
            journal.note(RunFailed(error="interrupted by SIGINT"))
            journal.note(RunResumed(command="trtx", kept=("agg", "agg-again"), missing=("migrated",)))
    compared(run_dir, "migrated")
    assert render_parity(run_dir).notes == ("migrated: this run killed agg-1 while 3 streams were open there",)


def test_what_nobody_said_is_none_and_what_nobody_looked_into_is_not_checked(tmp_path: Path) -> None:
    urls = ({"url": "http://127.0.0.1:8"}, {"url": "http://127.0.0.1:9"})
    run_dir = run_of(tmp_path, routes=(), attach=urls[0], against=urls[1])
    assert render_parity(run_dir).notes == ("url: it was not compared",)
    compared(run_dir, "url", is_checked=False)
    (line,) = render_parity(run_dir).lines
    assert "handoffs, migrations, prompts in several steps: not checked" in line.counted
    told = json.loads((run_dir / "summary.json").read_text())
    assert told["notes"] == [] and told["routes"][0]["evidence"]["is_checked"] is False
