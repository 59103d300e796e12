"""The life of a baseline: saved as a candidate, promoted, superseded, expired; and which one is picked."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from judged_runs import a_run, change_cells, conditions_of_kept, gated, judged

from trtx.bench import read_cells
from trtx.bench.judge.checks import ValidityLevel
from trtx.bench.judge.judgement import Verdict
from trtx.bench.judge.validity import Reason, Validity
from trtx.errors import UsageError
from trtx.experiment.baselines.baseline import of_run, read_baseline, write_baseline
from trtx.experiment.baselines.store import Baselines, open_baseline, open_measured
from trtx.experiment.gate import planned_loads

pytestmark = pytest.mark.slow


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """One that passed."""
    run = a_run(tmp_path / "run")
    judged(run)
    return run


@pytest.fixture
def kept(tmp_path: Path) -> Baselines:
    return Baselines(tmp_path / "baselines")


def older(baselines: Baselines, name: str, days: float) -> None:
    found = baselines.get(name)
    write_baseline(baselines.path(name), replace(found, saved_at=found.saved_at - timedelta(days=days)))


def of_machine(**values: Any) -> Any:
    return lambda conditions: replace(conditions, machine=conditions.machine | values)


def picked(baselines: Baselines, run: Path, allowed: tuple[str, ...] = ()) -> str:
    loads = planned_loads(gated(run))
    return open_baseline(str(baselines.directory), baselines, conditions_of_kept(run), loads, allowed).name


def test_what_is_saved_is_read_as_the_run_was_and_is_small(kept: Baselines, run: Path) -> None:
    path = kept.save(run, "main")
    found, measured = kept.get("main"), of_run(run)
    assert found.cells == measured.cells and found.conditions == measured.conditions
    assert (found.run, found.verdict, found.state) == ("run", Verdict.PASS, "candidate")
    assert path.stat().st_size < 2000 + 3600 * (3 + 1) * len(measured.cells)  # conditions; each trial, and their pool
    assert path.read_text().count("\n") == 16 + len(measured.cells)  # a line a cell


def test_what_a_run_ended_before_is_saved_with_it(kept: Baselines, run: Path) -> None:
    shutil.rmtree(run / "cells" / "agg-c2")
    path = kept.save(run, "early")
    assert kept.get("early").unmeasured == of_run(run).unmeasured == ("agg-c2",)
    document = json.loads(path.read_text())
    del document["unmeasured"], document["unscored"], document["sha256"]  # as it was kept before they were
    path.write_text(json.dumps(document))
    assert kept.get("early").unmeasured == ()


def test_a_candidate_of_that_name_is_replaced_and_a_promoted_one_is_not(kept: Baselines, run: Path) -> None:
    kept.save(run, "main")
    kept.save(run, "main")
    kept.promote("main")
    with pytest.raises(UsageError, match="main.json is promoted and would be replaced; save under another"):
        kept.save(run, "main")


def test_a_file_that_can_not_be_read_is_named_with_the_way_out(kept: Baselines, run: Path) -> None:
    kept.save(run, "main")
    kept.path("cut").write_text("{")
    with pytest.raises(
        UsageError, match=r"cut\.json is not valid JSON.*; or remove .*cut\.json, which keeps the others from"
    ):
        kept.all()
    assert kept.get("main").state == "candidate"


def test_a_cell_without_a_result_is_no_baseline(kept: Baselines, run: Path) -> None:
    change_cells(run, lambda cell: replace(cell, figures=None) if cell.name == "agg-c2" else cell)
    with pytest.raises(UsageError, match="has no result for agg-c2; measure these cells again"):
        kept.save(run, "main")
    assert not kept.all()


@pytest.mark.parametrize(("slo", "told"), [("time_to_first_token:p50:le:1", "ended with 'missed'"), (None, "was not")])
def test_a_run_that_did_not_pass_is_never_promoted(kept: Baselines, tmp_path: Path, slo: str | None, told: str) -> None:
    run = a_run(tmp_path / "run")
    if slo is not None:
        judged(run, slo=[slo])
    kept.save(run, "main")
    with pytest.raises(UsageError, match=f"main can't be promoted: its run run {told}.*expected a run that passed"):
        kept.promote("main")
    assert kept.get("main").state == "candidate"


def test_a_run_with_an_invalid_cell_is_never_promoted_though_no_request_failed(kept: Baselines, run: Path) -> None:
    invalid = Validity(ValidityLevel.INVALID, (Reason("late", ValidityLevel.INVALID, "the client sent late"),), ())
    change_cells(run, lambda cell: replace(cell, validity=invalid) if cell.name == "agg-c2" else cell)
    kept.save(run, "main")
    with pytest.raises(UsageError, match="main can't be promoted, because cells of its run run are INVALID .agg-c2.;"):
        kept.promote("main")
    assert kept.get("main").state == "candidate"


def test_promotion_supersedes_the_one_of_the_same_machine_model_and_load_alone(kept: Baselines, tmp_path: Path) -> None:
    for name, change in (("one", None), ("two", None), ("elsewhere", of_machine(cpu="other"))):
        run = a_run(tmp_path / name, conditions=change)
        kept.save(run, name)
        write_baseline(kept.path(name), replace(kept.get(name), verdict=Verdict.PASS))
    kept.promote("one")
    kept.promote("elsewhere")
    promoted, superseded = kept.promote("two")
    assert promoted.state == "promoted" and superseded == ("one",)
    assert {one.name: one.state for one in kept.all()} == {
        "one": "superseded by two", "two": "promoted", "elsewhere": "promoted",
    }  # fmt: skip
    assert kept.promote("one")[1] == ("two",)  # and back again
    assert kept.promote("one")[1] == () and kept.get("one").state == "promoted"


def test_one_with_other_cells_is_not_superseded(kept: Baselines, run: Path) -> None:
    kept.save(run, "all")
    kept.promote("all")
    (run / "cells" / "agg-c2" / "cell.json").unlink()
    kept.save(run, "some")
    assert kept.promote("some")[1] == ()


def test_the_promoted_one_of_this_machine_model_and_load_is_picked(kept: Baselines, run: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="has no promoted baseline to choose from; .*trtx baseline promote NAME"):
        picked(kept_dir(kept), run)
    kept.save(run, "here")
    elsewhere = a_run(tmp_path / "elsewhere", conditions=of_machine(cpu="other"))
    kept.save(elsewhere, "elsewhere")
    write_baseline(kept.path("elsewhere"), replace(kept.get("elsewhere"), verdict=Verdict.PASS))
    kept.promote("elsewhere")
    with pytest.raises(UsageError, match=r"no promoted baseline .* \(elsewhere: machine.cpu was other and is"):
        picked(kept, run)
    assert picked(kept, run, ("machine.cpu",)) == picked(kept, run, ("machine",)) == "elsewhere"
    kept.promote("here")
    assert picked(kept, run) == "here"


def kept_dir(baselines: Baselines) -> Baselines:
    baselines.directory.mkdir(exist_ok=True)
    return baselines


def test_one_that_lacks_a_cell_is_not_picked(kept: Baselines, run: Path) -> None:
    (run / "cells" / "disagg-c1" / "cell.json").unlink()
    kept.save(run, "main")
    kept.promote("main")
    with pytest.raises(UsageError, match="main: it has no cell disagg-c1"):
        picked(kept, run)


def test_superseded_ones_expire_and_with_an_age_older_ones_too(kept: Baselines, run: Path) -> None:
    for name in ("old", "stale", "new", "candidate"):
        kept.save(run, name)
    older(kept, "stale", 40)
    kept.promote("old")
    kept.promote("new")
    assert [one.name for one in kept.expired(None)] == ["old"]
    assert {one.name for one in kept.expired(30)} == {"old", "stale"}
    assert {one.name for one in kept.expired(50)} == {"old"}
    kept.remove(kept.expired(30))
    assert {one.name for one in kept.all()} == {"new", "candidate"}


def test_a_name_that_is_not_there_is_answered_with_the_nearest(kept: Baselines, run: Path) -> None:
    with pytest.raises(UsageError, match="the directory has none, so save one with trtx bench --save-baseline NAME"):
        kept.get("main")
    kept.save(run, "main")
    with pytest.raises(UsageError, match="no baseline is called 'mian' .*did you mean main"):
        kept.get("mian")
    with pytest.raises(UsageError, match="expected one of main"):
        kept.get("xyz")


def test_a_file_is_known_by_its_own_name(kept: Baselines, run: Path) -> None:
    kept.save(run, "main").rename(kept.directory / "moved.json")
    assert [one.name for one in kept.all()] == ["moved"]
    kept.promote("moved")
    assert kept.get("moved").state == "promoted"


def test_a_run_a_file_or_a_name_can_be_compared(kept: Baselines, run: Path) -> None:
    path = kept.save(run, "main")
    assert open_measured(str(run), kept).cells == open_measured(str(path), kept).cells
    assert [cell.figures for cell in open_measured(str(run), kept).cells] == [cell.figures for cell in read_cells(run)]
    assert open_measured("main", kept).name == "main"
    with pytest.raises(UsageError, match="'no/such' does not exist; expected a run directory, a baseline's file, or"):
        open_measured("no/such", kept)
    with pytest.raises(UsageError, match="is not a run directory, because it has no run.lock.yaml"):
        open_measured(str(kept.directory), kept)


def _repeat(listed: list[Any]) -> None:
    listed.append(listed[0])


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda found: found.pop("run"), "run is missing"),
        (lambda found: found.update(schema_version=99), "has schema_version 99, but this trtx reads 1"),
        (lambda found: found["cells"][0].update(schema_version=99), r"cells\.0 has schema_version 99"),
        (lambda found: found["cells"][0]["figures"].pop("request_count"), "figures.request_count is missing"),
        (lambda found: found["conditions"].update(machine=[]), "conditions.machine is"),
        (lambda found: found["cells"].append(found["cells"][0]), "cell agg-c1 is listed twice"),
        (lambda found: _repeat(found["cells"][1]["trials"]), "a trial of agg-c2 is listed twice"),
    ],
)
def test_a_file_that_can_not_be_read_is_told_with_its_field(kept: Baselines, run: Path, change: Any, told: str) -> None:
    path = kept.save(run, "main")
    found = json.loads(path.read_text())
    change(found)
    path.write_text(json.dumps(found))
    with pytest.raises(UsageError, match=rf"main\.json.*{told}"):
        read_baseline(path)
