"""The frame of every run: what is left of its directory, and what is written however it ends."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from trtx.bench import read_journal
from trtx.bench.journal import RunEnded, RunFailed, RunResumed
from trtx.bench.judge.judgement import Verdict
from trtx.errors import LaunchError, UsageError
from trtx.experiment.evaluation_spec import EvaluationSpec, evaluation_of, read_evaluation
from trtx.experiment.lifecycle import OpenRun, new_run, resumed_run
from trtx.experiment.listener import RunListener
from trtx.experiment.provenance import provenance_with
from trtx.runs.forms import PLAN, VERDICT, RunVerdict

ARGV = ["trtx", "eval"]
SPEC = evaluation_of({"tasks": ["a"], "topology": {"engine": "paced", "model": "synthetic:tiny", "port": 0}})


class Announced(RunListener):
    def __init__(self) -> None:
        self.run_dirs: list[Path] = []

    def on_start(self, run_dir: Path) -> None:
        self.run_dirs.append(run_dir)


@contextmanager
def planned(parent: Path, listener: RunListener | None = None) -> Iterator[OpenRun[EvaluationSpec]]:
    with new_run(SPEC, parent, ARGV, listener) as run:
        run.plan()
        run.write_plans()
        with run.held(provenance_with(run.environment, run.plans, None)):
            yield run


@contextmanager
def measured(run: OpenRun[EvaluationSpec]) -> Iterator[None]:
    """Measures with a judge and a report that only say that they were called."""

    def judge() -> None:
        VERDICT.write(run.run_dir, RunVerdict(Verdict.PASS, 0, None, None, ()))

    with run.measuring(judge, lambda run_dir: (run_dir / "report.html").write_text("a page")):
        yield


@pytest.mark.parametrize("error", [UsageError("no such task"), LaunchError("no GPU"), KeyboardInterrupt()])
def test_a_run_that_measured_nothing_leaves_no_directory(tmp_path: Path, error: BaseException) -> None:
    with pytest.raises(type(error)), planned(tmp_path) as run:
        (run.run_dir / "eval").mkdir()
        raise error
    assert list(tmp_path.iterdir()) == []


def test_a_failure_while_measuring_is_recorded_rendered_and_raised_without_a_verdict(tmp_path: Path) -> None:
    told = Announced()
    with pytest.raises(LaunchError, match="it died"), planned(tmp_path, told) as run, measured(run):
        raise LaunchError("it died")
    (run_dir,) = told.run_dirs
    assert (run_dir / "report.html").read_text() == "a page"
    failed = read_journal(run_dir)[-1]
    assert isinstance(failed, RunFailed) and "it died" in failed.error
    assert VERDICT.find(run_dir, RunVerdict) is None


def test_a_directory_that_was_removed_meanwhile_is_not_made_again(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="was removed"), planned(tmp_path) as run, measured(run):
        (run.run_dir / "run.lock.yaml").unlink()
        run.check()
    assert not (run.run_dir / "report.html").exists() and not (run.run_dir / "journal.jsonl").exists()


def test_a_resumed_run_keeps_the_plans_that_it_does_not_replace_and_loses_its_verdict(tmp_path: Path) -> None:
    with planned(tmp_path) as run, measured(run):
        pass
    run_dir = run.run_dir
    assert run.finished().error is None and isinstance(read_journal(run_dir)[-1], RunEnded)
    first = json.loads((run_dir / PLAN.file).read_text())["topologies"]["agg"]
    (run_dir / "agg").mkdir()  # the first start
    with resumed_run(run_dir, read_evaluation, ARGV, None) as (again, recorded):
        assert recorded.plans["agg"].run_dir == Path(first["run_dir"]) == run_dir / "agg"
        again.go_on(kept=["agg"], missing=[])
        assert json.loads((run_dir / PLAN.file).read_text())["topologies"]["agg"] == first
        assert VERDICT.find(run_dir, RunVerdict) is None
        again.plan()
        assert again.plans["agg"].run_dir == run_dir / "agg" / "start-02"
        with pytest.raises(UsageError, match="another trtx"), resumed_run(run_dir, read_evaluation, ARGV, None):
            pass
    assert isinstance(read_journal(run_dir)[-1], RunResumed)


def test_a_run_of_another_model_is_not_resumed(tmp_path: Path) -> None:
    with planned(tmp_path) as run, measured(run):
        pass
    with resumed_run(run.run_dir, read_evaluation, ARGV, None) as (again, recorded):
        recorded.checkpoints["agg"] = "other files"
        with pytest.raises(UsageError, match="the files under .* have changed"):
            again.plan()
