"""What is kept of a real run: aiperf's records, and everything that follows from them, file by file.

``make goldens`` writes anew what follows, the lock file and the cells included, and fails: whoever changed a figure
looks at the difference, and runs the tests again. It writes no figure while those computed here from aiperf's lines
alone are others.
"""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from statistics import fmean, median

import pytest

from trtx.bench import Cell, cell_directory, cell_name
from trtx.bench.cells import CELL, measure_cell
from trtx.bench.figures import Measured, all_figures
from trtx.experiment.bench.resumption import read_recorded
from trtx.experiment.bench.spec import ExperimentSpec
from trtx.experiment.directory import PROVENANCE, read_lock, write_lock
from trtx.report import render
from trtx.runs.forms import LOCK, AskedRun

GOLDEN = Path(__file__).parent / "golden"
LED_TO = ("schema_version", "topologies")  # which follow from the rest
RENDERED = ("summary.csv", "summary.md", "summary.json", "junit.xml")
CELLS = ("agg-c1", "agg-c2", "disagg-c1", "disagg-c2")


def _measured(run: Path) -> dict[str, Cell]:
    """The cells as their records give them."""
    spec = read_lock(run)
    recorded = read_recorded(run, spec)
    names = {cell_name(label, load): (label, load) for label in spec.labels for load in spec.load.loads}
    trials = range(1, spec.load.trials + 1)
    return {
        name: measure_cell(cell_directory(run, name), recorded.target(label), spec.load, load, trials, restarted=())
        for name, (label, load) in names.items()
    }


def _computed_apart(trial: Path) -> dict[str, float]:
    """Of aiperf's lines, in as few steps as can be, and with nothing of trtx. No request of the kept run failed."""
    lines = [json.loads(line) for line in (trial / "profile_export.jsonl").read_text(encoding="utf-8").splitlines()]
    measured = [line for line in lines if line["metadata"]["benchmark_phase"] == "profiling"]
    assert not any(line.get("error") for line in measured)
    values = {
        name: [line["metrics"][name]["value"] for line in measured]
        for name in (
            "time_to_first_token", "inter_token_latency", "request_latency",
            "input_sequence_length", "output_sequence_length",
        )
    }  # fmt: skip
    starts, ends = ([line["metadata"][f"request_{end}_ns"] for line in measured] for end in ("start", "end"))
    seconds = (max(ends) - min(starts)) / 1e9
    figures = {
        "request_count": len(measured),
        "error_request_count": 0,
        "benchmark_duration": seconds,
        "request_throughput": len(measured) / seconds,
        "output_token_throughput": sum(values["output_sequence_length"]) / seconds,
        "output_token_throughput_per_user": median(1000 / latency for latency in values["inter_token_latency"]),
        "input_sequence_length": fmean(values["input_sequence_length"]),
        "output_sequence_length": fmean(values["output_sequence_length"]),
    }
    for name in ("time_to_first_token", "inter_token_latency", "request_latency"):
        figures |= {f"{name}.count": len(measured), f"{name}.avg": fmean(values[name])}
        figures[f"{name}.p50"] = median(values[name])
    return figures


def _differing(run: Path, computed: Callable[[Path], dict[str, float]] = _computed_apart) -> list[str]:
    """What trtx makes of the kept records, where it is not what is computed apart; the first few."""
    found = []
    for name, cell in _measured(run).items():
        assert cell.figures is not None
        for path, expected in computed(run / "cells" / name / "trial-01").items():
            figure, _, part = path.partition(".")
            ours = cell.figures.stored.get(figure)
            ours = ours.get(part) if part and ours is not None else ours
            if ours != pytest.approx(expected):
                found.append(f"{path} of {name} is {ours}, computed from aiperf's lines alone {expected}")
    return found[:4]


NOT_COMPUTED_APART = {
    "uncounted_request_count": "every answer of the kept run is counted",
    "request_error_rate": "none of its requests failed",
    "input_sequence_lengths": "the mean is computed apart, of the same values",
    "output_sequence_lengths": "the same",
    "images_per_second": "no request of the kept run has an image; test_metrics.py computes it of some that have",
}


def test_every_figure_is_computed_apart() -> None:
    apart = {path.partition(".")[0] for path in _computed_apart(GOLDEN / "run" / "cells" / "agg-c1" / "trial-01")}
    measured = {record.name for record in all_figures() if isinstance(record, Measured)}
    lacking, unused = sorted(measured - apart - NOT_COMPUTED_APART.keys()), sorted(NOT_COMPUTED_APART.keys() & apart)
    assert not lacking and not unused and NOT_COMPUTED_APART.keys() <= measured, (
        f"nothing computes {', '.join(lacking) or 'what is gone'} apart: compute it of aiperf's lines in "
        f"_computed_apart of {Path(__file__).name}, or say in NOT_COMPUTED_APART why not, which has no more than that "
        f"({', '.join(unused) or 'nothing twice'})"
    )


REASON_FIRST = (
    "look for the reason first, in trtx/bench/records.py (what is read of aiperf's lines) and trtx/bench/metrics.py "
    "(the formulas)"
)


def test_the_figures_of_a_real_run_are_those_computed_apart() -> None:
    assert not (differing := _differing(GOLDEN / "run")), f"{'; '.join(differing)}: {REASON_FIRST}"


def _write_lock(directory: Path) -> None:
    """What the kept run was asked, as it would be written now: a field that is new has its default."""
    of_the_lock = (*LED_TO, PROVENANCE)
    kept = dataclasses.replace(LOCK, oldest=1)  # it may be of a version that nobody else reads any more
    asked = {name: value for name, value in kept.load(GOLDEN / "run").items() if name not in of_the_lock}
    load = {name: value for name, value in asked["load"].items() if name not in ("cells", "prompts")}
    spec = ExperimentSpec.model_validate({**asked, "load": load})
    write_lock(directory, spec, kept.read(GOLDEN / "run", AskedRun).provenance)


def _write_run(run: Path, computed: Callable[[Path], dict[str, float]] = _computed_apart) -> None:
    """The lock file and the cells; pytest.fail where the figures are not those computed apart."""
    _write_lock(run)
    if differing := _differing(run, computed):
        pytest.fail(f"no cell is written while {'; '.join(differing)}: {REASON_FIRST}")
    for cell in _measured(run).values():
        CELL.write(cell_directory(run, cell.name), cell.to_json())


def _check(kept: Path, found: str) -> None:
    if os.environ.get("TRTX_WRITE_GOLDEN"):
        kept.write_text(found, encoding="utf-8")
        pytest.fail(f"{kept} was written; look at it (git diff), then run the tests without TRTX_WRITE_GOLDEN")
    assert found == kept.read_text(encoding="utf-8"), (
        f"{kept.name} is another than before: {REASON_FIRST}; where the change is meant, make goldens writes it anew"
    )


def test_the_lock_file_of_a_real_run_is_as_it_would_be_written_now(tmp_path: Path) -> None:
    _write_lock(tmp_path)
    found = (tmp_path / LOCK.file).read_text(encoding="utf-8")
    if os.environ.get("TRTX_WRITE_GOLDEN"):
        _check(GOLDEN / "run" / LOCK.file, found)
    assert found == (GOLDEN / "run" / LOCK.file).read_text(encoding="utf-8"), (
        f"{LOCK.file} of the kept run lacks a field of a sweep, or has one more: make goldens writes it"
    )


@pytest.fixture(scope="session", autouse=True)
def _written_where_asked() -> None:
    if os.environ.get("TRTX_WRITE_GOLDEN"):
        _write_run(GOLDEN / "run")


@pytest.mark.parametrize("name", CELLS)
def test_a_cell_of_a_real_run_is_what_its_records_give(name: str, tmp_path: Path) -> None:
    CELL.write(tmp_path, _measured(GOLDEN / "run")[name].to_json())
    _check(GOLDEN / "run" / "cells" / name / CELL.file, (tmp_path / CELL.file).read_text(encoding="utf-8"))


@pytest.mark.parametrize("name", RENDERED)
def test_the_summary_files_of_a_real_run_are_the_golden_ones(golden_run: Path, name: str) -> None:
    render(golden_run)
    _check(GOLDEN / name, (golden_run / name).read_text(encoding="utf-8"))


def test_no_cell_is_written_while_its_figures_are_wrong(tmp_path: Path) -> None:
    run = Path(shutil.copytree(GOLDEN / "run", tmp_path / "run"))
    before = (run / "cells" / "agg-c1" / CELL.file).read_text(encoding="utf-8")
    with pytest.raises(
        pytest.fail.Exception, match="no cell is written while time_to_first_token.p50 .*look for the rea"
    ):
        _write_run(run, lambda trial: _computed_apart(trial) | {"time_to_first_token.p50": 1.0})
    assert (run / "cells" / "agg-c1" / CELL.file).read_text(encoding="utf-8") == before


def test_goldens_that_were_written_fail_so_that_somebody_looks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRTX_WRITE_GOLDEN", "1")
    kept = Path(shutil.copy(GOLDEN / "summary.md", tmp_path))
    with pytest.raises(pytest.fail.Exception, match="was written; look at it"):
        _check(kept, kept.read_text(encoding="utf-8"))
    with pytest.raises(pytest.fail.Exception, match="was written; look at it"):
        _check(kept, "another")
    assert kept.read_text(encoding="utf-8") == "another"
