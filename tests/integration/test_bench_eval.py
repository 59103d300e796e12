"""A sweep with ``eval``: one run that says whether a topology is as fast as before and still right, to its page."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import xml.etree.ElementTree as ElementTree
from dataclasses import dataclass
from pathlib import Path

import pytest
from called import only
from playwright.sync_api import Browser
from processes import TRTX
from test_report_browser import browser  # noqa: F401  # a fixture
from topology_clients import wait_until

from trtx.cli.app import run as trtx
from trtx.evals import eval_directory, marker
from trtx.evals.forms import read_samples
from trtx.experiment import load_sweep
from trtx.launch.processes import members

pytestmark = pytest.mark.proof

ROOT = Path(__file__).parents[2]
TASKS = ("trtx_copying", "trtx_arithmetic_choice")  # one that generates, one that scores log-probabilities
LIMIT = 6
SWEEP = f"""
topology: {{model: synthetic:tiny-trained}}
load: {{concurrency: [2], isl: 32, osl: 8, request_count: 12, warmup_request_count: 2, prompt_corpus: random}}
eval: {{tasks: "{", ".join(TASKS)}", limit: {LIMIT}, concurrency: 1, min_score: ["trtx_copying:exact_match:0.3"]}}
"""


@pytest.fixture
def sweep(tmp_path: Path) -> Path:
    file = tmp_path / "sweep.yaml"
    file.write_text(SWEEP, encoding="utf-8")
    return file


@dataclass(frozen=True)
class Measured:
    """A run that was started by a step of a CI job."""

    run: Path
    exit_code: int
    summary: str  # of the step


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Measured:
    home = tmp_path_factory.mktemp("job")
    (home / "sweep.yaml").write_text(SWEEP, encoding="utf-8")
    summary = home / "step.md"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GITHUB_STEP_SUMMARY", str(summary))
        code = trtx(["bench", str(home / "sweep.yaml"), "-o", str(home / "runs")])
    return Measured(only(home / "runs"), code, summary.read_text(encoding="utf-8"))


def test_one_run_measures_and_scores_and_every_form_has_both(measured: Measured) -> None:
    run = measured.run
    verdict = json.loads((run / "verdict.json").read_text())
    assert (measured.exit_code, verdict["verdict"]) == (0, "pass")
    judged = {(one["cell"], one["criterion"].partition(":")[0]) for one in verdict["judgements"]}
    assert {("agg-c2", "request_error_rate"), ("agg-trtx_copying", "exact_match")} <= judged
    events = [json.loads(line)["event"] for line in (run / "journal.jsonl").read_text().splitlines()]
    assert events.count("topology_ready") == 1, "it is scored on the start that was measured"
    trial = run / "cells" / "agg-c2" / "trial-01" / "profile_export.jsonl"
    for task in TASKS:
        samples = eval_directory(run, "agg") / task / "samples.jsonl"
        assert len(read_samples(samples.parent)) == LIMIT
        assert samples.stat().st_mtime_ns > trial.stat().st_mtime_ns, "speed is measured first"
    suite = ElementTree.parse(run / "junit.xml").getroot()
    assert {case.get("classname") for case in suite} >= {"trtx.bench.agg", "trtx.eval.agg-trtx_copying"}
    told = measured.summary
    assert "## Scores" in told and "| trtx_copying | exact_match |" in told and "lm-eval 0.4.13" in told


def test_its_page_shows_scores_beside_speed(measured: Measured, browser: Browser) -> None:  # noqa: F811
    page = browser.new_page(viewport={"width": 1280, "height": 900})
    complaints: list[str] = []
    page.on("console", lambda message: complaints.append(message.text))
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.goto((measured.run / "report.html").as_uri())
    section = page.get_by_role("region", name="Scores")
    shown = section.locator("table").first.inner_text().split()
    assert shown.index("agg") < shown.index("c2") and "trtx_copying" in shown and "acc" in shown
    row = section.locator("table.all-scores tbody tr").first
    assert not row.is_visible()
    section.get_by_text("All scores").click()
    assert row.is_visible() and f"{LIMIT}/{LIMIT}" in row.inner_text()
    for width in (1280, 390):
        page.set_viewport_size({"width": width, "height": 900})
        assert page.evaluate("document.documentElement.scrollWidth") <= width
    assert complaints == []
    page.close()


@pytest.mark.parametrize("more", [[], ["--dry-run"]], ids=["run", "dry run"])
def test_what_no_task_has_costs_no_start_and_leaves_nothing(
    more: list[str], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "sweep.yaml"
    asked = {"tasks": ["trtx_copying"], "min_score": ["trtx_copying:accuracy:0.5"]}
    file.write_text(json.dumps({"topology": {"model": "synthetic:tiny-trained"}, "eval": asked}))
    (tmp_path / "runs").mkdir()
    assert trtx(["bench", str(file), *more, "-o", str(tmp_path / "runs")]) == 2
    said = capfd.readouterr().err
    assert "accuracy is not a metric of trtx_copying; expected one of exact_match" in said
    assert "starting the topology" not in said
    assert list((tmp_path / "runs").iterdir()) == []


def test_a_task_that_is_called_as_a_load_is_refused(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"q": "7 + 5 =", "a": "12"}\n')
    (tmp_path / "tasks").mkdir()
    (tmp_path / "tasks" / "c1.yaml").write_text(
        f"task: c1\ndataset_path: json\ndataset_kwargs: {{data_files: {{test: {rows}}}}}\ntest_split: test\n"
        "output_type: generate_until\ndoc_to_text: q\ndoc_to_target: a\nmetric_list: [{metric: exact_match}]\n"
    )
    asked = {"tasks": ["c1"], "task_dir": str(tmp_path / "tasks")}
    sweep = {"topology": {"model": "synthetic:tiny-trained"}, "load": {"concurrency": [1]}, "eval": asked}
    (tmp_path / "sweep.yaml").write_text(json.dumps(sweep))
    assert trtx(["bench", str(tmp_path / "sweep.yaml"), "-o", str(tmp_path / "runs")]) == 2
    assert "the task c1 and a load of this sweep have the same name" in capfd.readouterr().err


@pytest.mark.parametrize("half", ["speed", "scores"])
def test_a_run_that_is_killed_in_either_half_goes_on_with_what_it_lacks(half: str, sweep: Path, tmp_path: Path) -> None:
    command = [*TRTX, "bench"]
    environment = dict(os.environ)
    bench = subprocess.Popen(
        [*command, str(sweep), "-o", str(tmp_path / "runs")],
        stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=environment,
    )  # fmt: skip
    begun = {
        "speed": "*/cells/agg-c2/trial-01/profile_export.jsonl", "scores": f"*/eval/agg/{TASKS[0]}/samples.jsonl",
    }[half]  # fmt: skip
    try:
        wait_until(lambda: any(path.stat().st_size for path in (tmp_path / "runs").glob(begun)), 180, half)
    finally:
        bench.send_signal(signal.SIGKILL)
        bench.wait()
    run = only(tmp_path / "runs")
    wait_until(lambda: not members(marker(run / "eval" / "session.log"), ()), 15, "its session's end")
    trial = run / "cells" / "agg-c2" / "trial-01" / "profile_export.jsonl"
    measured, kept = trial.read_bytes(), read_samples(eval_directory(run, "agg") / TASKS[0])
    assert not (run / "eval" / "agg" / "eval.json").exists() and len(kept) < LIMIT
    done = subprocess.run(
        [*command, "--resume", str(run), "--json"], capture_output=True, text=True, timeout=240, env=environment
    )
    assert done.returncode == 0, done.stderr
    assert (trial.read_bytes() == measured) == (half == "scores")
    resumed = next(one for one in map(json.loads, (run / "journal.jsonl").open()) if one["event"] == "run_resumed")
    assert resumed["missing"] == (["agg-c2"] if half == "speed" else []) + ["scores of agg"]
    for task in TASKS:
        found = read_samples(eval_directory(run, "agg") / task)
        assert [one.doc_id for one in found] == list(range(LIMIT))
        assert task != TASKS[0] or found[: len(kept)] == kept
    again = subprocess.run(
        [*command, "--resume", str(run)], capture_output=True, text=True, timeout=240, env=environment
    )
    assert again.returncode == 0 and "kept: agg-c2, scores of agg\nto measure: nothing" in again.stderr


def test_the_shipped_sweep_asks_for_what_this_model_has_learned() -> None:
    spec = load_sweep(ROOT / "sweeps" / "smoke-eval.yaml", {})
    assert spec.eval is not None and spec.eval.tasks == ("trtx",) and spec.topology.model == "synthetic:tiny-trained"
