"""Scores beside speed: a sweep's ``eval``, from what may be asked to what it is judged by and how it is shown."""

from __future__ import annotations

import json
import re
import shutil
import xml.etree.ElementTree as ElementTree
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from judged_runs import GOLDEN, a_run, an_ab_run, prepare, provenance
from test_evaluation_verdict import HALF, RIGHT, of_task, sample, scored

from trtx.bench.judge.judgement import Verdict
from trtx.cli.app import run as trtx
from trtx.errors import UsageError
from trtx.evals import EVAL, TopologyScores, eval_directory
from trtx.evals.forms import SampleWriter
from trtx.experiment import gate, load_sweep
from trtx.experiment.baselines.baseline import of_run, of_scored_run, read_baseline
from trtx.experiment.baselines.conditions import differences
from trtx.experiment.bench import ab
from trtx.experiment.bench.resumption import read_recorded
from trtx.experiment.directory import read_lock, write_lock
from trtx.experiment.evaluation_spec import read_evaluation
from trtx.experiment.evaluation_verdict import judge_evaluation
from trtx.experiment.gate_spec import GateSpec
from trtx.experiment.scoring import common_tokenizer
from trtx.experiment.scoring_spec import ScoringSpec
from trtx.report import render
from trtx.runs.forms import LOCK, RunVerdict

pytestmark = pytest.mark.slow

WRONG = [0] * 200


def with_scores(run: Path, tasks: dict[str, Sequence[int]], labels: Sequence[str] = ("agg", "disagg")) -> Path:
    """As if each of its topologies had been scored so, after its cells."""
    write_lock(run, read_lock(run).model_copy(update={"eval": ScoringSpec(tasks=tuple(tasks))}), provenance(run))
    for label in labels:
        for name, values in tasks.items():
            writer = SampleWriter(eval_directory(run, label) / name)
            writer.replace(sample(name, number, value) for number, value in enumerate(values))
        found = tuple(of_task(name, values) for name, values in tasks.items())
        EVAL.write(eval_directory(run, label), TopologyScores(label, "0.4.13", "completions", None, None, found))
    return run


def judged(run: Path, scoring: dict[str, Any] | None = None, **said: Any) -> RunVerdict:
    """With this gate, and with this in place of some of what ``eval`` says."""
    spec = read_lock(run)
    assert spec.eval is not None
    asked = spec.eval.model_copy(update=scoring or {})
    spec = spec.model_copy(update={"gate": GateSpec.model_validate(said), "eval": asked})
    prepare(run, spec)
    return gate.judge(run, spec)


def verdicts(verdict: RunVerdict, word: str) -> dict[str, Verdict]:
    return {one.cell: one.verdict for one in verdict.judgements if word in one.criterion}


@pytest.mark.parametrize(
    ("said", "words"),
    [
        ({}, "eval.tasks is missing"),
        ({"tasks": []}, "eval.tasks is []; expected at least one value"),
        ({"tasks": ["sums"], "min_score": ["sums:acc:x"]}, "eval.min_score 'sums:acc:x': 'x' is not a number"),
        ({"tasks": ["sums"], "text": "a.txt"}, "eval.text has no effect without perplexity in eval.tasks"),
        ({"tasks": ["schemas"]}, "eval.schemas is needed with schemas in eval.tasks"),
        ({"tasks": ["sums"], "structured_output": "some"}, 'eval.structured_output is "some"'),
        ({"tasks": ["sums"], "needle_samples": 2}, "eval.needle_samples has no effect without needle in eval.tasks"),
        ([1], "eval is [1]; expected a map"),
        ({"tasks": [""]}, "sweep.yaml: eval.tasks '' is empty"),
        ({"tasks": ["sums"], "limit": "5"}, 'eval.limit is "5"; expected a whole number'),
        (
            {"tasks": ["sums"], "concurrency": [True]},
            "eval.concurrency is [true]; expected a value that is not a boolean",
        ),
        ({"tasks": "sums,sums"}, "eval.tasks names sums twice; expected each once"),
        ({"tasks": ["sums"], "limit": 0}, "eval.limit is 0; expected greater than or equal to 1"),
        (
            {"tasks": ["sums"], "min_score": ["sums:0.5"]},
            "sweep.yaml: eval.min_score 'sums:0.5': expected task:metric:value",
        ),
        ({"tasks": ["sums"], "limits": 5}, "eval.limits is not a field of a sweep; did you mean limit?"),
        ({"tasks": ["sums"], "baseline": "runs/x"}, "eval.baseline is not a field of a sweep"),
        ({"tasks": ["sums"], "max_drop": 0.1}, "eval.max_drop has no effect without a baseline"),
    ],
)
def test_what_can_not_be_asked_is_refused_with_its_field(said: dict[str, Any], words: str, tmp_path: Path) -> None:
    file = tmp_path / "sweep.yaml"
    file.write_text(json.dumps({"eval": said}))
    with pytest.raises(UsageError) as refused:
        load_sweep(file, {})
    assert words in str(refused.value)


def test_tasks_may_be_one_text_and_a_least_score_keeps_its_comma() -> None:
    spec = load_sweep(None, {"eval": {"tasks": "gsm8k, mmlu", "min_score": "gsm8k:exact_match,strict-match:0.6"}})
    assert spec.eval is not None and spec.eval.tasks == ("gsm8k", "mmlu")
    assert [one.metric for one in spec.eval.least_scores] == ["exact_match,strict-match"]


def test_a_lock_from_before_scored_nothing(tmp_path: Path) -> None:
    write_lock(tmp_path, read_lock(GOLDEN), provenance(GOLDEN))
    lock = tmp_path / "run.lock.yaml"
    text = lock.read_text()
    assert "\neval: null\n" in text
    lock.write_text(re.sub(r"schema_version: \d+", "schema_version: 3", text.replace("\neval: null\n", "\n")))
    assert read_lock(tmp_path) == read_lock(GOLDEN)


def test_cells_and_scores_make_one_verdict(tmp_path: Path) -> None:
    run = with_scores(a_run(tmp_path / "run"), {"sums": HALF})
    passed = judged(run, {"min_score": ("sums:acc:0.3",)})
    assert (passed.verdict, passed.exit_code) == (Verdict.PASS, 0)
    missed = judged(run, {"min_score": ("sums:acc:0.9",)})
    assert (missed.verdict, missed.exit_code) == (Verdict.MISSED, 1)
    assert verdicts(missed, "acc:score") == {"agg-sums": Verdict.MISSED, "disagg-sums": Verdict.MISSED}
    assert {"agg-c1", "disagg-c2", "agg-sums"} <= {one.cell for one in missed.judgements}


def test_a_topology_that_was_not_scored_fails_and_is_told(tmp_path: Path) -> None:
    run = with_scores(a_run(tmp_path / "run"), {"sums": RIGHT}, labels=["agg"])
    verdict = judged(run)
    assert verdict.exit_code == 1 and verdicts(verdict, "scored") == {"disagg": Verdict.FAILED}
    assert "disagg: the scoring is incomplete; samples answered: 0" in render(run).notes
    (run / "verdict.json").unlink()  # as of a run that ended early
    render(run)
    assert "4 cells measured, and disagg not scored" in (run / "report.html").read_text()
    (error,) = ElementTree.fromstring((run / "junit.xml").read_text()).findall("testcase[@classname='trtx.eval']/error")
    assert error.get("message") == "the run ended early"


def test_speed_and_scores_are_both_held_against_the_baseline(tmp_path: Path) -> None:
    base = with_scores(a_run(tmp_path / "base"), {"sums": RIGHT})
    gate_of = {"baseline": str(base), "max_regression": "5%"}
    run = with_scores(a_run(tmp_path / "run"), {"sums": HALF})
    found = judged(run, **gate_of)
    assert found.verdict is Verdict.REGRESSED
    assert verdicts(found, ":drop:") == {"agg-sums": Verdict.REGRESSED, "disagg-sums": Verdict.REGRESSED}
    assert set(verdicts(found, "time_to_first_token").values()) == {Verdict.PASS}
    equal = judged(with_scores(a_run(tmp_path / "equal"), {"sums": RIGHT}), {"max_drop": 0.05}, **gate_of)
    assert equal.exit_code == 0 and set(verdicts(equal, ":drop:").values()) == {Verdict.PASS}
    slower = judged(with_scores(a_run(tmp_path / "slow", slower=1.3), {"sums": RIGHT}), {"max_drop": 0.05}, **gate_of)
    assert slower.exit_code == 1 and set(verdicts(slower, ":drop:").values()) == {Verdict.PASS}


def test_a_baseline_keeps_what_each_sample_is_worth_and_one_without_scores_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    base = with_scores(a_run(tmp_path / "base"), {"sums": RIGHT})
    judged(base)
    assert trtx(["baseline", "save", str(base), "main", "--baseline-dir", str(tmp_path)]) == 0
    assert read_baseline(tmp_path / "main.json").scores == of_run(base).scores != ()
    assert trtx(["baseline", "show", "main", "--baseline-dir", str(tmp_path)]) == 0
    assert "scores of agg: sums acc 1 (200 samples)" in capsys.readouterr().out
    (tmp_path / "base").rename(tmp_path / "gone")
    run = with_scores(a_run(tmp_path / "run"), {"sums": HALF})
    found = judged(run, baseline=str(tmp_path / "main.json"), max_regression="5%")
    assert set(verdicts(found, ":drop:").values()) == {Verdict.REGRESSED}
    silent = judged(run, baseline=str(a_run(tmp_path / "silent")), max_regression="5%")
    assert not verdicts(silent, ":drop:") and silent.baseline is not None
    assert "it has no scores, so the scores of this run are not compared" in silent.baseline.differences


def test_other_questions_than_the_baselines_are_told_and_have_no_verdict(tmp_path: Path) -> None:
    base = with_scores(a_run(tmp_path / "base"), {"sums": RIGHT})
    run = with_scores(a_run(tmp_path / "run"), {"sums": RIGHT[:50]})
    found = judged(run, {"limit": 50, "max_drop": 0.5}, baseline=str(base), max_regression="5%")
    assert set(verdicts(found, ":drop:").values()) == {Verdict.NO_VERDICT} and found.exit_code == 3
    assert found.baseline is not None and "eval.limit was None and is 50" in found.baseline.differences


def test_every_form_shows_scores_beside_speed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = with_scores(a_run(tmp_path / "run"), {"sums": HALF, "words": RIGHT})
    judged(run, {"min_score": ("sums:acc:0.9",)})
    view = render(run)
    throughput = max(row.cell.figures.stored["output_token_throughput"] for row in view.rows if row.cell)  # type: ignore[union-attr]
    markdown = (run / "summary.md").read_text()
    (line,) = [line for line in markdown.splitlines() if line.startswith("| agg |") and "| sums |" in line]
    assert "at c2 | sums | acc | 0.5 | 0.4314–0.5686 | – | 200/200 |" in line and throughput > 0
    page = (run / "report.html").read_text()
    assert 'aria-label="Scores"' in page and "Speed and scores" in page and "0.4314–0.5686" in page
    suite = ElementTree.fromstring((run / "junit.xml").read_text())
    cases = [(case.get("classname"), case.get("name"), len(case)) for case in suite]
    assert ("trtx.eval.agg-sums", "acc:score:ge:0.9", 1) in cases
    assert ("trtx.eval.agg-words", "unanswered_sample_count:avg:le:0", 0) in cases
    assert not any(str(name).startswith("trtx.eval.agg-c") for name, *_ in cases) and len(set(cases)) == len(cases)
    assert json.loads((run / "summary.json").read_text())["scores"][1]["topology"] == "disagg"
    assert trtx(["report", str(run)]) == 0
    assert "agg sums acc 0.5 0.4314–0.5686 200/200" in " ".join(capsys.readouterr().out.split())


def test_arms_are_compared_by_the_same_samples(tmp_path: Path) -> None:
    run = with_scores(an_ab_run(tmp_path / "run", 1.1), {"sums": RIGHT})
    with_scores(run, {"sums": HALF}, labels=["disagg"])
    spec = read_lock(run)
    asked = spec.model_copy(update={"gate": GateSpec(baseline="agg", max_regression="5%")})
    prepare(run, asked)
    verdict = gate.judge(run, asked)
    assert verdicts(verdict, ":drop:") == {"disagg-sums": Verdict.REGRESSED}
    ab.keep_comparison(run, asked, verdict)
    arms = render(run).arms
    assert arms is not None
    (one,) = arms.comparisons[0].scores
    assert (one.topology, one.against, one.verdict, one.limit) == ("disagg", "agg", Verdict.REGRESSED, 0.02)
    assert one.difference is not None and one.difference.estimate == pytest.approx(-0.5)
    assert "| sums | acc | 1 | 0.5 | -0.5 (" in (run / "summary.md").read_text()


def test_two_files_of_an_ab_run_ask_the_same(tmp_path: Path) -> None:
    for name, asked in (("a", {"tasks": ["sums"], "max_drop": 0.1}), ("b", {"tasks": ["sums"]})):
        (tmp_path / f"{name}.yaml").write_text(json.dumps({"topology": {"engine": "paced"}, "eval": asked}))
    a, b = tmp_path / "a.yaml", tmp_path / "b.yaml"
    with pytest.raises(UsageError, match=r"eval differs between .*a.yaml and"):
        ab.ab_spec(a, b, 3, {"max_regression": "5%"})
    b.write_text(a.read_text())
    spec = ab.ab_spec(a, b, 3, {"max_regression": "5%"})
    assert spec.eval == ScoringSpec(tasks=("sums",), max_drop=0.1)
    with pytest.raises(UsageError, match="eval.max_drop has no effect without a baseline"):
        ab.ab_spec(a, b, 3, {})


def test_runs_are_compared_by_their_scores_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    with_scores(a_run(Path("base")), {"sums": RIGHT})
    with_scores(a_run(Path("worse")), {"sums": HALF})
    a_run(Path("silent"))
    scored(Path("before"), {"sums": RIGHT})
    scored(Path("after"), {"sums": HALF})

    def shown(*argv: str, code: int = 0) -> str:
        assert trtx(["compare", *argv]) == code
        said = capsys.readouterr()
        return " ".join((said.out + said.err).split())

    both = shown("base", "worse")
    assert "agg-c1 inter_token_latency:p50" in both and "agg sums acc 1 0.5 -0.5 (" in both
    alone = shown("before", "after")
    assert "agg sums acc 1 0.5 -0.5 (" in alone and "latency" not in alone and "No condition is known" in alone
    assert "regressed" in shown("before", "after", "--max-drop", "0.1", code=1)
    assert "pass" in shown("after", "before", "--max-drop", "0.1")
    scored(Path("more"), {"sums": RIGHT, "words": RIGHT})
    dropped = "Not judged: words was scored there but not in this run, so it is not compared."
    assert dropped in shown("more", "before", "--max-drop", "0.1")
    shutil.rmtree("worse/eval/disagg")
    ended_early = shown("base", "worse", "--max-drop", "0.9", code=2)
    assert "worse has no scores of disagg, because it ended early" in ended_early
    assert "Speed is not compared: after measured none." in shown("base", "after")
    assert "Scores are not compared: silent has none." in shown("base", "silent")
    assert "after has only scores and silent has only speed" in shown("silent", "after", code=2)
    assert "silent has no scores, but --max-drop judges scores" in shown("base", "silent", "--max-drop", "0.1", code=2)
    refused = shown("before", "after", "--max-regression", "5%", code=2)
    assert "before is a run of trtx eval, which measures no speed" in refused
    assert "--metrics has no effect for runs of trtx eval" in shown(
        "before", "after", "--metrics", "request_latency:p50", code=2
    )
    assert trtx(["bench", "--baseline", "after", "--max-regression", "5%", "--dry-run", "--engine", "paced"]) == 2
    assert "is a run of trtx eval, which measures no speed" in capsys.readouterr().err


# A value of each field that decides what is asked, another than its default.
OTHERWISE: dict[str, Any] = {
    "tasks": ["sums", "words"], "limit": 50, "num_fewshot": 3, "task_dir": "tasks", "endpoint_type": "chat",
    "concurrency": 4, "request_timeout": 9.0, "needle_lengths": [64], "needle_depths": [0], "needle_samples": 3,
    "text": "mine.txt", "schemas": "mine.jsonl", "structured_output": "both",
}  # fmt: skip
TASK_OF = {
    "text": "perplexity",
    "schemas": "schemas",
    **dict.fromkeys(("needle_lengths", "needle_depths", "needle_samples"), "needle"),
}


def test_every_field_that_decides_what_is_asked_is_tried() -> None:
    assert OTHERWISE.keys() == ScoringSpec.model_fields.keys() - {"min_score", "max_drop"}


@pytest.mark.slow
@pytest.mark.parametrize("field", OTHERWISE)
def test_what_was_asked_in_another_way_is_among_the_conditions_that_differ(
    field: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    before = {field: f"yours of {field}"} if field in ("text", "schemas") else {}
    tasks: dict[str, Sequence[int]] = {TASK_OF.get(field, "sums"): RIGHT}
    others = {**tasks, "words": RIGHT} if field == "tasks" else tasks
    scored(Path("before"), tasks, **before)
    scored(Path("after"), others, **({} if field == "tasks" else {field: OTHERWISE[field]}))
    assert trtx(["compare", "before", "after"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert f"eval.{field} was " in said and "No condition is known" not in said
    scored(Path("after"), others, baseline="before", **({} if field == "tasks" else {field: OTHERWISE[field]}))
    told = judge_evaluation(Path("after"), read_evaluation(Path("after"))).baseline
    assert told is not None and any(one.startswith(f"eval.{field} was ") for one in told.differences)


def test_a_run_without_scores_and_one_without_a_load_are_not_asked_for_them(tmp_path: Path) -> None:
    speed, both = of_run(a_run(tmp_path / "speed")), with_scores(a_run(tmp_path / "both"), {"sums": RIGHT})
    asked = read_lock(both)
    prepare(both, asked)
    groups = {one.group for one in differences(speed.conditions, of_run(both).conditions)}
    assert "eval" not in groups and of_run(both).conditions.eval["tasks"] == ["sums"]
    scores = of_scored_run(scored(tmp_path / "scores", {"sums": RIGHT}, limit=9))
    found = {one.name for one in differences(of_run(both).conditions, scores.conditions)}
    assert "eval.limit" in found and not any(name.startswith("load.") for name in found)


def test_scores_that_nobody_asks_for_any_more_are_told(tmp_path: Path) -> None:
    base = with_scores(a_run(tmp_path / "base"), {"sums": RIGHT})
    run = a_run(tmp_path / "run")
    spec = read_lock(run).model_copy(update={"gate": GateSpec(baseline=str(base), max_regression="5%")})
    prepare(run, spec)
    told = gate.judge(run, spec).baseline
    assert told is not None and "it has scores but this run has none, so they are not compared" in told.differences


def test_topologies_of_different_tokenizers_are_not_asked_the_same(tmp_path: Path) -> None:
    recorded = read_recorded(GOLDEN, read_lock(GOLDEN)).plans
    plans = {}
    for label, text in (("agg", "{}"), ("copy", "{}"), ("disagg", '{"other": 1}')):
        (tmp_path / label).mkdir()
        (tmp_path / label / "tokenizer.json").write_text(text)
        (tmp_path / label / "config.json").write_text(label)  # of the model, which may be another
        plans[label] = replace(recorded["agg"], model_path=tmp_path / label)
    assert common_tokenizer({label: plans[label] for label in ("agg", "copy")}) == tmp_path / "agg"
    with pytest.raises(UsageError, match="agg and disagg serve models with different tokenizers"):
        common_tokenizer(plans)


@pytest.mark.parametrize(("fields", "check"), [({"check": "fidelity"}, "fidelity"), ({"routes": ["agg"]}, "parity")])
def test_a_check_has_neither_speed_nor_scores_to_compare(
    fields: dict[str, Any], check: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / LOCK.file).write_text(yaml.safe_dump({"schema_version": LOCK.version, **fields}))
    assert trtx(["compare", str(tmp_path), str(tmp_path)]) == 2
    assert f"is a run of trtx eval {check}, which has neither speed nor scores" in capsys.readouterr().err
