"""A/B runs: what two sweep files make together, and B against A by their rounds."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from judged_runs import NOISY, ROUNDS, a_run, an_ab_run, change_cells, compared, gated, judged, provenance

from trtx.bench import Cell, Figures
from trtx.bench.journal import Journal, TrialEnded
from trtx.bench.judge.judgement import Verdict
from trtx.bench.judge.regression import DEFAULT_METRICS
from trtx.errors import UsageError
from trtx.experiment.bench.ab import ab_spec, keep_comparison
from trtx.experiment.directory import read_lock, write_lock
from trtx.experiment.lifecycle import forget_verdict
from trtx.runs.forms import COMPARISON, VERDICT, ComparedArms, RunVerdict

pytestmark = pytest.mark.slow

SLOW, FAST = "topology: {engine: paced, workers: 2}\n", "topology: {engine: paced}\n"
LOAD = "load: {concurrency: [1, 8], isl: 64}\n"


def _files(tmp_path: Path, a: str, b: str) -> tuple[Path, Path]:
    for name, text in (("a", a), ("b", b)):
        (tmp_path / f"{name}.yaml").write_text(text)
    return tmp_path / "a.yaml", tmp_path / "b.yaml"


def test_the_gate_of_both_files_is_that_of_the_run(tmp_path: Path) -> None:
    own = 'gate: {slo: ["time_to_first_token:p50:le:500"], max_error_rate: 2%}\n'
    a, b = _files(tmp_path, SLOW + own, FAST + own)
    spec = ab_spec(a, b, 3, {"max_regression": "5%", "max_error_rate": "1%"})
    assert (spec.gate.slo, spec.gate.max_error_rate) == (("time_to_first_token:p50:le:500",), "1%")
    assert spec.gate.baseline == "a" and ab_spec(a, b, 3, {}).gate.max_error_rate == "2%"
    b.write_text(FAST)
    with pytest.raises(
        UsageError, match=r"gate.slo is time_to_.*:500 in .*a.yaml and not there in .*b.yaml; use the same gate"
    ):
        ab_spec(a, b, 3, {})
    a, b = _files(tmp_path, SLOW, FAST + "gate: {baseline: main, max_regression: 5%}\n")
    with pytest.raises(
        UsageError,
        match=r"gate.baseline of .*b.yaml belongs to a comparison with another run, but an A/B run compares B",
    ):
        ab_spec(a, b, 3, {})


def test_two_files_make_one_run_of_two_arms_that_take_turns(tmp_path: Path) -> None:
    spec = ab_spec(*_files(tmp_path, SLOW + LOAD, FAST + LOAD), 4, {"max_regression": "5%"})
    assert (spec.name, spec.order, spec.load.trials, spec.gate.baseline) == ("ab-a-b", "abba", 4, "a")
    assert [(one.label, one.spec.workers, one.spec.engine) for one in spec.topologies] == [
        ("a", 2, "paced"), ("b", 1, "paced"),
    ]  # fmt: skip
    assert (spec.load.isl, spec.load.concurrency) == ((64,), (1, 8))
    price = "gpu_hour_price: 2.5\n"
    assert ab_spec(*_files(tmp_path, SLOW + price, FAST + price), 4, {}).gpu_hour_price == 2.5


@pytest.mark.parametrize(
    ("a", "b", "says"),
    [
        (
            SLOW + LOAD,
            FAST,
            "load.concurrency is [1, 8] in .*a.yaml and [1, 8, 64] in .*b.yaml; use the same load in both",
        ),
        (
            FAST + "gpu_hour_price: 2.5\n",
            FAST,
            "gpu_hour_price is 2.5 in .*a.yaml and not given in .*b.yaml; both run on the same GPUs, so use the same",
        ),
        ("modes: [agg, disagg]\n", FAST, "a.yaml has the topologies agg, disagg; expected exactly one"),
        (FAST, "attach: {url: http://127.0.0.1:9}\n", "b.yaml has the topologies attached; expected exactly one"),
    ],
)
def test_files_that_make_no_pair_are_one_sentence(tmp_path: Path, a: str, b: str, says: str) -> None:
    with pytest.raises(UsageError, match=says.replace("[", r"\[").replace("]", r"\]")):
        ab_spec(*_files(tmp_path, a, b), 2, {})
    same = _files(tmp_path, FAST, FAST)[0]
    with pytest.raises(UsageError, match="are both called 'a', but the files' names are the names of the topologies"):
        ab_spec(same, same, 2, {})


def test_one_round_is_compared_and_not_judged(tmp_path: Path) -> None:
    files = _files(tmp_path, SLOW + LOAD, FAST + LOAD)
    assert ab_spec(*files, 1, {}).load.trials == 1
    with pytest.raises(UsageError, match="--max-regression 5%: one round gives no interval; use --rounds 2 or more"):
        ab_spec(*files, 1, {"max_regression": "5%"})


@pytest.mark.parametrize(("slower", "verdict", "exit_code"), [(1.03, Verdict.PASS, 0), (1.1, Verdict.REGRESSED, 1)])
def test_rounds_that_differ_more_than_the_arms_still_tell_them_apart(
    tmp_path: Path, slower: float, verdict: Verdict, exit_code: int
) -> None:
    run = an_ab_run(tmp_path / "run", slower)
    said = judged(run, baseline="agg", max_regression="5%")
    ratios = [one for one in said.judgements if one.criterion.count(":") == 1]  # a bound has two more
    assert {one.cell for one in ratios} == {"disagg-c1", "disagg-c2"}, "an arm is not compared with itself"
    assert {one.verdict for one in ratios} == {verdict} and said.exit_code == exit_code
    assert said.baseline is None and not (run / "baseline.json").exists()


def test_the_second_is_told_against_the_first_by_loads(tmp_path: Path) -> None:
    (found,) = compared(an_ab_run(tmp_path / "run", 1.1)).comparisons
    assert (found.baseline, found.candidate) == ("agg", "disagg")
    assert {one.cell for one in found.metrics} == {"c1", "c2"}
    for one in found.metrics:
        expected = 1 / 1.1 if "throughput" in one.metric else 1.1
        assert one.ratio is not None and one.ratio.estimate == pytest.approx(expected)
        assert one.ratio.high / one.ratio.low < 1.001
        assert [b / a for a, b in one.rounds if a and b] == pytest.approx([expected] * len(ROUNDS))
        assert (one.verdict, one.limit, one.reason) == (None, None, None)
    assert any("workers" in difference.name for difference in found.differences)


@pytest.mark.parametrize("said", [{}, {"metrics": ["request_latency:p50"]}])
def test_what_is_shown_of_the_arms_is_what_was_judged(tmp_path: Path, said: dict[str, Any]) -> None:
    run = an_ab_run(tmp_path / "run", 1.1, rounds=NOISY)
    (found,) = compared(run, baseline="agg", max_regression="5%", **said).comparisons
    judgements = {(one.cell, one.criterion): one for one in VERDICT.read(run, RunVerdict).judgements}
    assert found.metrics and {one.metric for one in found.metrics} == set(
        said.get("metrics") or [metric.name for metric in DEFAULT_METRICS]
    )
    for one in found.metrics:
        judgement = judgements[f"disagg-{one.cell}", one.metric]
        assert (one.ratio, one.verdict, one.reason) == (judgement.interval, judgement.verdict, judgement.reason)
        assert one.limit == judgement.limit == pytest.approx(0.95 if "throughput" in one.metric else 1.05)


def test_acceptance_is_compared_where_an_arm_speculates(tmp_path: Path) -> None:
    run = an_ab_run(tmp_path / "run", 1.1)
    accepted = {"spec_decode_token_weighted_acceptance_length": 2.5, "spec_decode_overall_draft_acceptance_rate": 75.0}

    def speculating(figures: Figures | None) -> Figures | None:
        return figures and Figures({**figures.stored, **accepted})

    def change(cell: Cell) -> Cell:
        if cell.name != "disagg-c1":
            return cell
        trials = tuple(replace(trial, figures=speculating(trial.figures)) for trial in cell.trials)
        return replace(cell, figures=speculating(cell.figures), trials=trials)

    change_cells(run, change)
    (found,) = compared(run, baseline="agg", max_regression="5%").comparisons
    rows = {(one.cell, one.metric): one for one in found.metrics if one.metric.startswith("spec_")}
    assert set(rows) == {("c1", f"{name}:avg") for name in accepted}
    for one in rows.values():
        assert (one.baseline, one.candidate) == (None, accepted[one.metric.removesuffix(":avg")])
        assert one.ratio is one.verdict is None
        assert one.reason is not None and "no request had drafted tokens" in one.reason


def test_another_model_of_an_arm_is_told(tmp_path: Path) -> None:
    run = an_ab_run(tmp_path / "run", 1.1)
    known = provenance(run)
    other = replace(known.measured["disagg"], model="tiny-fp8")
    write_lock(run, read_lock(run), replace(known, measured=known.measured | {"disagg": other}))
    (found,) = compared(run).comparisons
    assert ("model.name", "tiny-trained", "tiny-fp8") in [(one.name, one.before, one.now) for one in found.differences]


def test_the_arm_that_the_gate_names_is_the_baseline(tmp_path: Path) -> None:
    (found,) = compared(an_ab_run(tmp_path / "run", 1.1), baseline="disagg", max_regression="5%").comparisons
    assert (found.baseline, found.candidate) == ("disagg", "agg")
    (itl, _) = [one for one in found.metrics if one.metric.startswith("inter_token")]
    assert itl.ratio and itl.ratio.estimate == pytest.approx(1 / 1.1) and itl.verdict is Verdict.PASS


def test_the_order_is_that_of_the_journal_and_a_trial_made_again_counts_once(tmp_path: Path) -> None:
    run = an_ab_run(tmp_path / "run", 1.1)
    told = [(one.topology, one.round) for one in compared(run).starts]
    assert told == [("agg", 1), ("disagg", 1), ("disagg", 2), ("agg", 2), ("agg", 3), ("disagg", 3)]
    for cell in ("agg-c1", "agg-c2"):
        Journal(run).note(TrialEnded(cell=cell, trial=1, aiperf_exit_code=0, restarted=()))
    assert [(one.topology, one.round) for one in compared(run).starts] == [*told[1:], told[0]]


def test_a_run_that_ended_early_has_its_rounds_and_no_ratio(tmp_path: Path) -> None:
    run = an_ab_run(tmp_path / "run", 1.1)
    change_cells(run, lambda cell: replace(cell, trials=cell.trials[: 1 if cell.topology == "agg" else 2]))
    (run / "cells" / "disagg-c2" / "cell.json").unlink()
    keep_comparison(run, gated(run, baseline="agg", max_regression="5%"), None)
    (found,) = COMPARISON.read(run, ComparedArms).comparisons
    rows = {(one.cell, one.metric): one for one in found.metrics}
    one, other = (rows[cell, "inter_token_latency:p50"] for cell in ("c1", "c2"))
    assert one.ratio is one.verdict is None and "trial 3 of 3 has no result" in str(one.reason)
    assert [(a is None, b is None) for a, b in one.rounds] == [(False, False), (True, False), (True, True)]
    assert other.candidate is None and "it was not measured" in str(other.reason)
    assert [(a is None, b is None) for a, b in other.rounds] == [(False, True), (True, True), (True, True)]
    forget_verdict(run)
    assert COMPARISON.find(run, ComparedArms) is None, "a run that goes on has none until it has ended"


def test_a_run_that_is_no_ab_run_has_no_comparison(tmp_path: Path) -> None:
    run = a_run(tmp_path / "run")
    keep_comparison(run, gated(run), judged(run))
    assert COMPARISON.find(run, ComparedArms) is None
