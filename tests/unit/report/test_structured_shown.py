"""Tasks with JSON schemas as they are shown: both arms side by side, and a dash for what is not known."""

from __future__ import annotations

import json
from pathlib import Path

from judged_runs import GOLDEN, provenance
from rich.console import Console

from trtx.evals.forms import EVAL, Arm, ArmDifference, Score, ScoredTask, TopologyScores, Unanswered, eval_directory
from trtx.evals.statistics import share_interval
from trtx.evals.structured import METRICS, OUTCOMES
from trtx.experiment.directory import write_lock
from trtx.experiment.evaluation_spec import evaluation_of, read_evaluation
from trtx.report.evaluation import read_evaluation_view, render_evaluation

REASON = 'HTTP 400: it has "if", which guided decoding does not support'


def a_task(name: str, arm: Arm, ones: dict[str, int], **more: object) -> ScoredTask:
    scores = []
    for metric in ones:
        found = share_interval([1] * ones[metric] + [0] * (20 - ones[metric]))
        assert found is not None
        better = metric not in OUTCOMES
        scores.append(Score(metric, "none", found, found.estimate, "binomial", higher_is_better=better))
    fields = {"arm": arm, "answered": 20, "unanswered": (), **more}
    return ScoredTask(
        task=name, output_type="generate_until", version="1", num_fewshot=0, samples=20, scores=tuple(scores), **fields
    )  # type: ignore[arg-type]


def a_run(directory: Path, *tasks: ScoredTask, differences: tuple[ArmDifference, ...] = ()) -> Path:
    directory.mkdir(exist_ok=True)
    write_lock(directory, evaluation_of({"tasks": ["trtx_schemas"]}), provenance(GOLDEN))
    scores = TopologyScores("agg", "0.4.13", "chat", None, None, tasks, differences)
    EVAL.write(eval_directory(directory, "agg"), scores)
    return directory


def on_terminal(run: Path) -> str:
    console = Console(width=80, no_color=True)
    with console.capture() as captured:
        console.print(read_evaluation_view(run).on_terminal)
    return captured.get()


def test_both_arms_stand_side_by_side_in_every_form_with_refused_schemas_apart(tmp_path: Path) -> None:
    free = dict(zip(METRICS, (12, 4, 2, 13, 3, 0), strict=True))
    constrained = dict(zip(METRICS, (18, 18, 5, 0, 1, 1), strict=True))
    gain = share_interval([1] * 14 + [0] * 6)
    run = a_run(
        tmp_path / "run",
        a_task("trtx_schemas", "free", free),
        a_task("trtx_schemas-constrained", "constrained", constrained, refused=(Unanswered(REASON, 1, 7),)),
        differences=(ArmDifference("trtx_schemas", "schema_compliance", 19, gain, None),),
    )
    render_evaluation(run)
    told = (run / "summary.md").read_text()
    assert "## Structured output: agg, trtx_schemas\n" in told and "## Refused schemas: agg, trtx_schemas\n" in told
    assert "| valid by its schema | 0.20 (0.08–0.42) | 0.90 (0.70–0.97) | +0.70 (+0.48 to +0.85) |" in told
    assert "| complete but invalid | 0.65 (0.43–0.82) | 0.00 (0.00–0.16) | – |" in told
    assert "The difference covers 19 of 20 samples, which both arms answered." in told
    assert f"| 1 | 7 | {REASON} |" in told
    assert "schema_broken" not in told, "the shares of outcomes are in their own table alone"
    page = (run / "report.html").read_text()
    assert "Structured output: agg, trtx_schemas" in page and "+0.70 (+0.48 to +0.85)" in page
    shown = on_terminal(run)
    assert "valid by its schema  0.20 (0.08–0.42) 0.90 (0.70–0.97) +0.70 (+0.48 to +0.85)" in shown
    assert all(len(line) <= 80 for line in shown.splitlines())
    (kept,) = json.loads((run / "summary.json").read_text())["scores"]
    assert kept["arm_differences"][0]["pairs"] == 19
    assert [task["arm"] for task in kept["tasks"]] == ["free", "constrained"]
    assert kept["tasks"][1]["refused"] == [{"reason": REASON, "count": 1, "first": 7}]


def test_an_arm_that_was_not_asked_or_has_no_score_is_a_dash(tmp_path: Path) -> None:
    ones = dict.fromkeys([name for name in METRICS if name != "exact_match"], 10)
    run = a_run(tmp_path / "one", a_task("own-constrained", "constrained", ones))
    shown = " ".join(on_terminal(run).split())
    assert "agg, own:" in shown and "valid JSON – 0.50 (0.30–0.70) – valid by" in shown
    assert "equals its reference" not in shown, "its samples have none"
    note = "the server refused the schema of each of 20 samples"
    run = a_run(tmp_path / "none", a_task("own", "free", ones), a_task("own-constrained", "constrained", {}, note=note))
    shown = " ".join(on_terminal(run).split())
    assert "valid JSON 0.50 (0.30–0.70) – – valid by" in shown and note in shown


def test_a_run_from_before_there_were_arms_is_read_as_one_without_schemas(tmp_path: Path) -> None:
    run = a_run(tmp_path / "run", a_task("trtx_json", "free", {"schema_compliance": 10}))
    kept = eval_directory(run, "agg") / EVAL.file
    scores = json.loads(kept.read_text())
    del scores["arm_differences"], scores["tasks"][0]["arm"], scores["tasks"][0]["refused"]
    kept.write_text(json.dumps(scores))
    lock = run / "run.lock.yaml"
    fields = ("schemas:", "structured_output:")
    lock.write_text("".join(line for line in lock.open() if not line.startswith(fields)))
    assert read_evaluation(run).structured_output is None
    view = render_evaluation(run)
    assert view.structured == () and view.scores.scored[0].tasks[0].arm is None
    assert "Structured output" not in (run / "summary.md").read_text()
