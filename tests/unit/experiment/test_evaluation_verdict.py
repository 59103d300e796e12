"""What the scores of a run are judged to be, and how they are shown: over directories as ``trtx eval`` leaves them."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from judged_runs import GOLDEN, provenance

from trtx.bench.journal import Journal, ProcessRestart, RunFailed, TopologyStopping
from trtx.bench.judge.judgement import CheckResult, Verdict
from trtx.cli.app import run as trtx
from trtx.errors import UsageError
from trtx.evals import EVAL, Score, ScoredTask, TopologyScores, eval_directory, statistics
from trtx.evals.forms import Judged, Sample, SampleRequest, SampleWriter
from trtx.experiment import EvaluationSpec, evaluation_of
from trtx.experiment.directory import write_lock
from trtx.experiment.evaluation_spec import read_evaluation
from trtx.experiment.evaluation_verdict import judge_evaluation, read_scored_baseline
from trtx.report.evaluation import render_evaluation
from trtx.runs.forms import LOCK

pytestmark = pytest.mark.slow

RIGHT, HALF = [1] * 200, [1, 0] * 100


def scored(
    directory: Path,
    tasks: dict[str, Sequence[int]],
    *,
    topology: str = "agg",
    groups: dict[str, tuple[str, ...]] | None = None,
    lm_eval: str = "0.4.13",
    **said: Any,
) -> Path:
    """A run that scored each of ``tasks`` with those zeros and ones."""
    modes = [topology] if topology in ("agg", "disagg") else ["agg"]
    spec = evaluation_of({"tasks": list(tasks), "modes": modes, **said})
    directory.mkdir(exist_ok=True)
    write_lock(directory, spec, provenance(GOLDEN))
    found = []
    for name, values in tasks.items():
        writer = SampleWriter(eval_directory(directory, topology) / name)
        writer.replace(sample(name, number, value) for number, value in enumerate(values))
        found.append(of_task(name, values))
    for name, members in (groups or {}).items():
        found.append(of_task(name, [value for member in members for value in tasks[member]], members))
    scores = TopologyScores(topology, lm_eval, "completions", None, None, tuple(found))
    EVAL.write(eval_directory(directory, topology), scores)
    return directory


def sample(task: str, number: int, value: int) -> Sample:
    asked = SampleRequest("generate_until", "7 + 5 =", None, {}, "12", None, None, "stop")
    return Sample(task, number, f"key-{number}", {}, "12", (asked,), (Judged("none", ("12",), {"acc": value}),))


def of_task(name: str, values: Sequence[int], members: tuple[str, ...] = ()) -> ScoredTask:
    interval = statistics.share_interval(values)
    score = Score("acc", "none", interval, sum(values) / len(values), "binomial", True)
    return ScoredTask(name, "generate_until", "1", 0, len(values), len(values), (score,), (), None, members)


def judge(run: Path) -> dict[str, CheckResult]:
    return {f"{one.cell} {one.criterion}": one for one in judge_evaluation(run, read_evaluation(run)).judgements}


def test_a_run_is_read_back_as_it_was_asked(tmp_path: Path) -> None:
    run = scored(tmp_path, {"sums": RIGHT}, min_score=["sums:acc:0.5"], limit=200)
    spec = read_evaluation(run)
    assert isinstance(spec, EvaluationSpec) and (spec.tasks, spec.limit) == (("sums",), 200)
    assert spec.to_json().items() <= LOCK.load(run).items()


def test_answers_least_scores_and_differences_are_judged_together(tmp_path: Path) -> None:
    before = scored(tmp_path / "before", {"sums": RIGHT, "words": RIGHT})
    asked = {"min_score": ["sums:acc:0.3", "sums:acc:0.9"], "baseline": str(before)}
    found = judge(scored(tmp_path / "now", {"sums": HALF, "words": RIGHT}, **asked))
    assert {name: one.verdict for name, one in found.items()} == {
        "agg-sums unanswered_sample_count:avg:le:0": Verdict.PASS,
        "agg-words unanswered_sample_count:avg:le:0": Verdict.PASS,
        "agg-sums acc:score:ge:0.3": Verdict.PASS,
        "agg-sums acc:score:ge:0.9": Verdict.MISSED,
        "agg-sums acc:drop:le:0.02": Verdict.REGRESSED,
        "agg-words acc:drop:le:0.02": Verdict.NO_VERDICT,  # 200 equal pairs leave more than 0.02 open
    }
    assert "against agg of the baseline" in found["agg-sums acc:drop:le:0.02"].reason


def test_a_baseline_is_found_by_its_run_from_any_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    scored(tmp_path / "before", {"words": RIGHT})
    run = scored(tmp_path / "now", {"words": RIGHT}, baseline="before", max_drop=0.05)
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert judge(run)["agg-words acc:drop:le:0.05"].verdict is Verdict.PASS


def test_a_larger_drop_is_allowed_where_it_is_said(tmp_path: Path) -> None:
    before = scored(tmp_path / "before", {"words": RIGHT})
    run = scored(tmp_path / "now", {"words": RIGHT}, baseline=str(before), max_drop=0.05)
    assert judge(run)["agg-words acc:drop:le:0.05"].verdict is Verdict.PASS


def test_a_group_is_compared_over_the_samples_of_its_tasks_and_they_are_not_by_themselves(tmp_path: Path) -> None:
    groups = {"all": ("sums", "words")}
    before = scored(tmp_path / "before", {"sums": RIGHT, "words": RIGHT}, groups=groups)
    run = scored(tmp_path / "now", {"sums": HALF, "words": RIGHT}, groups=groups, baseline=str(before))
    compared = {name: one for name, one in judge(run).items() if ":drop:" in name}
    assert list(compared) == ["agg-all acc:drop:le:0.02"]
    assert compared["agg-all acc:drop:le:0.02"].value == pytest.approx(-0.25)


def test_another_topology_or_an_older_lm_eval_of_the_baseline_is_told(tmp_path: Path) -> None:
    before = scored(tmp_path / "before", {"words": RIGHT}, topology="disagg")
    run = scored(tmp_path / "now", {"words": RIGHT}, baseline=str(before), max_drop=0.05)
    assert "against disagg of the baseline" in judge(run)["agg-words acc:drop:le:0.05"].reason
    scored(tmp_path / "before", {"words": RIGHT}, lm_eval="0.4.10")
    found = judge(run)["agg-words acc:drop:le:0.05"]
    assert found.verdict is Verdict.NO_VERDICT and "scored by lm-eval 0.4.10" in found.reason


def test_a_topology_that_was_not_scored_fails(tmp_path: Path) -> None:
    run = scored(tmp_path, {"sums": RIGHT}, topology="agg")
    write_lock(run, evaluation_of({"tasks": ["sums"], "modes": ["agg", "disagg"]}), provenance(GOLDEN))
    SampleWriter(eval_directory(run, "disagg") / "sums").add(sample("sums", 0, 1))
    assert judge(run)["disagg scored"].verdict is Verdict.FAILED
    assert render_evaluation(run).notes == ("disagg: the scoring is incomplete; samples answered: 1",)


def test_a_restart_and_an_early_end_are_told_in_every_form(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = scored(tmp_path / "run", {"sums": RIGHT})
    died = ProcessRestart(name="worker-0", at=1.0, exit="signal 9")
    Journal(run).note(TopologyStopping(topology="agg", restarts=(died,)))
    Journal(run).note(RunFailed(error="nobody answers"))
    judge(run)
    render_evaluation(run)
    told = "agg: 1 restart while it was measured: worker-0 (signal 9)."
    assert told in (run / "summary.md").read_text() and told in (run / "report.html").read_text()
    assert "1 check, all passed" in (run / "summary.md").read_text()
    notes = json.loads((run / "summary.json").read_text())["notes"]
    assert notes[0].startswith(told) and notes[1:] == ["The run ended early: nobody answers"]
    assert trtx(["report", str(run)]) == 0
    assert told in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize(("path", "words"), [("none", "not a run directory"), (str(GOLDEN), "has no scores")])
def test_a_baseline_that_is_none_is_refused(path: str, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        read_scored_baseline(Path(path))


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"tasks": ["a"], "limit": 0}, "--limit is 0"),
        ({"tasks": ["a"], "concurrency": 9999}, "--concurrency is 9999"),
        ({"tasks": ["a", "a"]}, "--tasks names a twice"),
        ({"tasks": ["a"], "min_score": ["a"]}, "--min-score 'a'"),
        ({"tasks": ["a"], "max_drop": float("inf")}, "--max-drop"),
        ({"tasks": ["a"], "request_timeout": 0}, "--request-timeout is 0"),
        ({"tasks": ["needle"], "needle_lengths": [0]}, "--needle-lengths is 0"),
        ({"tasks": ["needle"], "needle_lengths": [9, 9]}, "--needle-lengths names 9 twice"),
        ({"tasks": ["needle"], "needle_depths": [0, 101]}, "--needle-depths is 101"),
        ({"tasks": ["needle"], "needle_samples": 0}, "--needle-samples is 0"),
        ({"tasks": ["a"], "needle_samples": 3}, "--needle-samples has no effect without needle in --tasks"),
        ({"tasks": ["a"], "modes": ["agg", "agg"]}, "--mode names agg twice"),
        ({"tasks": ["a"], "attach": {"url": "nope"}}, "--url 'nope' is not an address"),
        ({"tasks": ["perplexity"]}, "--text is needed with perplexity in --tasks"),
        ({"tasks": ["schemas"]}, "--schemas is needed with schemas in --tasks"),
        ({"tasks": ["a"], "schemas": "b.jsonl"}, "--schemas has no effect without schemas in --tasks"),
        ({"tasks": ["a"], "structured_output": "some"}, '--structured-output is "some"'),
        ({"tasks": ["a"], "text": "b.txt"}, "--text has no effect without perplexity in --tasks"),
    ],
)
def test_what_can_not_be_asked_is_refused_with_its_option(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError) as refused:
        evaluation_of(fields)
    assert words in str(refused.value)


def test_every_form_of_a_run_shows_its_scores_and_rendering_again_gives_the_same(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = scored(tmp_path / "run", {"sums": HALF}, min_score=["sums:acc:0.9"])
    judge(run)
    render_evaluation(run)
    files = ("summary.json", "summary.md", "junit.xml", "report.html")
    before = {name: (run / name).read_bytes() for name in files}
    assert trtx(["report", str(run)]) == 0
    assert {name: (run / name).read_bytes() for name in files} == before
    shown = " ".join(capsys.readouterr().out.split())
    assert "agg sums acc 0.5 0.4314–0.5686 200/200" in shown
    suite = ElementTree.fromstring((run / "junit.xml").read_text())
    assert (suite.get("tests"), suite.get("failures"), suite.get("errors")) == ("2", "1", "0")
    assert [case.get("classname") for case in suite] == ["trtx.eval.agg-sums"] * 2
    assert "| agg | sums | acc | 0.5 | 0.4314–0.5686 |" in (run / "summary.md").read_text()
    assert json.loads((run / "summary.json").read_text())["scores"][0]["lm_eval"] == "0.4.13"
    assert "expected at least 0.9" in (run / "report.html").read_text()


def _cut(text: str) -> str:
    return text[:-20]


def _without_a_line(text: str) -> str:
    return "".join(text.splitlines(keepends=True)[:-1])


def _one_twice(text: str) -> str:
    return text + text.splitlines(keepends=True)[0]


def _no_number(text: str) -> str:
    lines = text.splitlines(keepends=True)
    return "".join([*lines[:6], lines[6].replace('"acc": 1', '"acc": "one"'), *lines[7:]])


def _equal_keys(text: str) -> str:
    lines = text.splitlines(keepends=True)
    return "".join([*lines[:6], lines[6].replace('"acc": 1', '"acc": 1, "acc": 0'), *lines[7:]])


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (_cut, "has 199 samples in whole lines, and line 200 is cut short; 200 were scored"),
        (_without_a_line, "has 199 samples in whole lines; 200 were scored"),
        (_one_twice, "has 201 samples in whole lines; 200 were scored"),
        (lambda text: "", "has 0 samples in whole lines; 200 were scored"),
        (_no_number, 'line 7: acc is "one"; expected a number, as it was scored'),
        (_equal_keys, "line 7 is not JSON ('acc' occurs twice in one object; keep one)"),
    ],
)
@pytest.mark.parametrize("side", ["before", "now"])
def test_a_damaged_file_of_samples_is_named_and_not_taken_for_other_questions(
    side: str, damage: Callable[[str], str], words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    runs = [scored(tmp_path / name, {"sums": RIGHT}) for name in ("before", "now")]
    path = eval_directory(tmp_path / side, "agg") / "sums" / "samples.jsonl"
    path.write_text(damage(path.read_text()))
    assert trtx(["compare", *map(str, runs)]) == 2
    said = capsys.readouterr().err
    assert f"{path}" in said and words in said and said.count("\n") == 1 and "--limit" not in said


def test_a_run_of_bench_and_one_of_eval_are_told_apart(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = scored(tmp_path, {"sums": HALF})
    assert trtx(["bench", "--resume", str(run)]) == 2
    assert "is a run of trtx eval, not of trtx bench; resume it with trtx eval --resume" in capsys.readouterr().err
    assert trtx(["eval", "--resume", str(GOLDEN)]) == 2
    assert "is a run of trtx bench, not of trtx eval" in capsys.readouterr().err
