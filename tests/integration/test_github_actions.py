"""docs/github-actions.yml by its own commands: what a push measures and promotes, a pull request is held against.

A push and a pull request are run step by step as a runner runs them: bash, GitHub's variables, a summary for each step.
What is measured is another sweep than the file's, which is named in one place: a paced engine, whose speed is known.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from trtx.experiment.bench.sweep_file import load_sweep

ROOT = Path(__file__).parents[2]
SHA = "0123456789abcdef0123456789abcdef01234567"
BASELINE = f"main-{SHA[:8]}"
# Long beside what a busy machine adds to them. Three trials of 16 requests: a median takes 11.
SWEEP = """
topology: {model: synthetic:tiny, engine: paced, overrides: [paced_ttft_ms=100, paced_itl_ms=20]}
load: {concurrency: [2], isl: 32, osl: 6, request_count: 16, warmup_request_count: 2, prompt_corpus: random}
"""
# Of a pull request: what the paced engine alone decides. In TTFT and tokens/s is what others leave of a busy core.
METRICS = 'gate: {metrics: ["inter_token_latency:p50"]}'
REPLACED = {"SWEEP": "sweeps/paced.yaml", "TRIALS": "3", "LIMIT": "40%"}


@dataclass(frozen=True)
class Step:
    """One that was run."""

    name: str
    exit_code: int
    output: str
    summary: str


def job() -> dict[str, Any]:
    (found,) = yaml.safe_load((ROOT / "docs" / "github-actions.yml").read_text(encoding="utf-8"))["jobs"].values()
    assert isinstance(found, dict)
    return found


def runs_on(step: dict[str, Any], event: str) -> bool:
    condition = re.fullmatch(r"github\.event_name == '(\w+)'", step.get("if", f"github.event_name == '{event}'"))
    assert condition is not None, f"this test does not know {step['if']}"
    return condition.group(1) == event


def run_steps(workspace: Path, event: str) -> Iterator[Step]:
    """The commands of the job for one event, until one fails."""
    steps = [
        step for step in job()["steps"] if "run" in step and step["run"] != "pip install ." and runs_on(step, event)
    ]
    for number, step in enumerate(steps):
        summary, script = (workspace.parent / f"{event}-{number}.{kind}" for kind in ("md", "sh"))
        summary.touch()
        script.write_text(step["run"], encoding="utf-8")
        done = subprocess.run(
            ["bash", "-e", str(script)],
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=240,
            cwd=workspace,
            env={
                **os.environ, **job()["env"], **REPLACED,
                "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "OMP_NUM_THREADS": "1",
                "CI": "true", "GITHUB_ACTIONS": "true", "GITHUB_EVENT_NAME": event, "GITHUB_SHA": SHA,
                "GITHUB_WORKSPACE": str(workspace), "GITHUB_STEP_SUMMARY": str(summary),
            },
        )  # fmt: skip
        yield Step(step["name"], done.returncode, done.stdout, summary.read_text(encoding="utf-8"))
        if done.returncode:
            return


@pytest.fixture(scope="module")
def workspace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkout, of which the job reads the sweeps alone."""
    found = tmp_path_factory.mktemp("runner") / "workspace"
    shutil.copytree(ROOT / "sweeps", found / "sweeps")
    (found / REPLACED["SWEEP"]).write_text(SWEEP, encoding="utf-8")
    return found


@pytest.fixture(scope="module")
def pushed(workspace: Path) -> list[Step]:
    return list(run_steps(workspace, "push"))


def test_the_sweep_and_its_gate_are_named_in_one_place(workspace: Path) -> None:
    assert set(job()["env"]) == set(REPLACED)
    commands = "\n".join(step.get("run", "") for step in job()["steps"])
    assert all(f'"${name}"' in commands for name in REPLACED) and ".yaml" not in commands
    asked = {"load": {"trials": int(job()["env"]["TRIALS"])}}
    limit = {"gate": {"baseline": "baselines", "max_regression": job()["env"]["LIMIT"]}}
    assert load_sweep(workspace / job()["env"]["SWEEP"], {**asked, **limit}).load.trials == 5


@pytest.mark.proof  # both of the example's jobs, whole
def test_a_push_promotes_the_baseline_that_it_measured(workspace: Path, pushed: list[Step]) -> None:
    assert [(step.name, step.exit_code) for step in pushed] == [
        ("Candidate for the next baseline", 0), ("Promote it", 0),
    ], "\n".join(step.output for step in pushed)  # fmt: skip
    assert pushed[0].summary.startswith("# tiny: agg\n") and "## Verdict" in pushed[0].summary
    (kept,) = (workspace / "baselines").iterdir()
    baseline = json.loads(kept.read_text())
    assert kept.stem == BASELINE and baseline["promoted_at"] is not None and baseline["verdict"] == "pass"


@pytest.mark.proof  # as above
def test_a_pull_request_is_held_against_it_and_its_summary_says_so(workspace: Path, pushed: list[Step]) -> None:
    assert len(pushed) == 2
    (workspace / REPLACED["SWEEP"]).write_text(SWEEP + METRICS, encoding="utf-8")
    before = set((workspace / "runs").iterdir())
    (gate,) = run_steps(workspace, "pull_request")
    assert gate.exit_code == 0, gate.output
    (run,) = set((workspace / "runs").iterdir()) - before
    verdict = json.loads((run / "verdict.json").read_text())
    assert (verdict["verdict"], verdict["baseline"]["name"]) == ("pass", BASELINE)
    compared = [one for one in verdict["judgements"] if one["interval"] and one["limit"] in (1.4, 0.6)]
    assert len(compared) == 1, "ITL is compared"
    assert gate.summary == (run / "summary.md").read_text() + "\n"
    assert f"aseline {BASELINE}" in gate.summary and "inter_token_latency:p50" in gate.summary
