"""A/B runs: what two sweep files make together, and B against A by their rounds."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from judged_runs import GOLDEN, a_run, gated, judged, of_trials, provenance

from trtx.bench import read_cells
from trtx.bench.cells import write_cell
from trtx.bench.judgement import Verdict
from trtx.errors import UsageError
from trtx.experiment.ab import ab_spec, compared_arms
from trtx.experiment.directory import read_lock, write_lock

SLOW, FAST = "topology: {engine: paced, workers: 2}\n", "topology: {engine: paced}\n"
LOAD = "load: {concurrency: [1, 8], isl: 64}\n"


def _files(tmp_path: Path, a: str, b: str) -> tuple[Path, Path]:
    for name, text in (("a", a), ("b", b)):
        (tmp_path / f"{name}.yaml").write_text(text)
    return tmp_path / "a.yaml", tmp_path / "b.yaml"


def test_two_files_make_one_run_of_two_arms_that_take_turns(tmp_path: Path) -> None:
    spec = ab_spec(*_files(tmp_path, SLOW + LOAD, FAST + LOAD), 4, {"max_regression": "5%"})
    assert (spec.name, spec.order, spec.load.trials, spec.gate.baseline) == ("ab-a-b", "abba", 4, "a")
    assert [(one.label, one.spec.workers, one.spec.engine) for one in spec.topologies] == [
        ("a", 2, "paced"), ("b", 1, "paced"),
    ]  # fmt: skip
    assert (spec.load.isl, spec.load.concurrency) == ((64,), (1, 8))


@pytest.mark.parametrize(
    ("a", "b", "says"),
    [
        (SLOW + LOAD, FAST, "load.concurrency is [1, 8] in .*a.yaml and [1, 8, 64] in .*b.yaml; expected one load"),
        ("modes: [agg, disagg]\n", FAST, "a.yaml has the topologies agg, disagg; expected one"),
        (FAST, "attach: {url: http://127.0.0.1:9}\n", "b.yaml has the topologies attached; expected one"),
    ],
)
def test_files_that_make_no_pair_are_one_sentence(tmp_path: Path, a: str, b: str, says: str) -> None:
    with pytest.raises(UsageError, match=says.replace("[", r"\[").replace("]", r"\]")):
        ab_spec(*_files(tmp_path, a, b), 2, {})
    same = _files(tmp_path, FAST, FAST)[0]
    with pytest.raises(UsageError, match="are both called 'a'"):
        ab_spec(same, same, 2, {})


ROUNDS = (1.0, 1.3, 0.8)  # which differ more than the arms


def _ab_run(tmp_path: Path, slower: float) -> Path:
    """As if agg and disagg of the kept run had been arms of one kind, the second so much slower in each round."""
    run = a_run(tmp_path / "run", trials=ROUNDS)
    write_lock(run, read_lock(run).model_copy(update={"order": "abba"}), provenance(run))
    for kept in (cell for cell in read_cells(GOLDEN) if cell.topology == "agg"):
        for topology, factor in (("agg", 1.0), ("disagg", slower)):
            cell = replace(of_trials(kept, [factor * one for one in ROUNDS]), topology=topology)
            write_cell(run / "cells" / cell.name, cell)
    return run


@pytest.mark.parametrize(("slower", "verdict", "exit_code"), [(1.03, Verdict.PASS, 0), (1.1, Verdict.REGRESSED, 1)])
def test_rounds_that_differ_more_than_the_arms_still_tell_them_apart(
    tmp_path: Path, slower: float, verdict: Verdict, exit_code: int
) -> None:
    run = _ab_run(tmp_path, slower)
    said = judged(run, baseline="agg", max_regression="5%")
    ratios = [one for one in said.judgements if one.criterion.count(":") == 1]  # a bound has two more
    assert {one.cell for one in ratios} == {"disagg-c1", "disagg-c2"}, "an arm is not compared with itself"
    assert {one.verdict for one in ratios} == {verdict} and said.exit_code == exit_code
    assert said.baseline is None and not (run / "baseline.json").exists()


def test_the_second_is_told_against_the_first_by_loads(tmp_path: Path) -> None:
    run = _ab_run(tmp_path, 1.1)
    found = compared_arms(run)
    assert found is not None and (found.baseline.name, found.candidate.name) == ("agg", "disagg")
    assert {one.cell for one in found.metrics} == {"c1", "c2"}
    for one in found.metrics:
        expected = 1 / 1.1 if "throughput" in one.metric else 1.1
        assert one.ratio is not None and one.ratio.estimate == pytest.approx(expected)
        assert one.ratio.high / one.ratio.low < 1.001
    assert any("workers" in difference.name for difference in found.differences)
    write_lock(run, gated(run).model_copy(update={"order": "in turn"}), provenance(run))
    assert compared_arms(run) is None
