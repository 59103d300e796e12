"""The golden run: aiperf's records of a real run, and the files that trtx makes of them.

``make goldens`` rewrites those files and fails, so that somebody reads the difference before the tests pass again.
"""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from trtx.bench.cells import CELL
from trtx.experiment.bench.spec import ExperimentSpec
from trtx.experiment.directory import PROVENANCE, write_lock
from trtx.report import render
from trtx.runs.forms import LOCK, AskedRun

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[3]
GOLDEN = Path(__file__).parent / "golden"
LED_TO = ("schema_version", "topologies")  # which follow from the rest
LOCK_OF_GOLDEN = dataclasses.replace(LOCK, oldest=1)  # its version may be too old for all other readers
RENDERED = ("summary.md", "summary.json", "junit.xml")
METRICS, RECOMPUTED = "trtx/bench/metrics.py", "benchmarks/recomputed/figures.py"
sys.path.insert(0, str(ROOT / "benchmarks"))
from recompute_run import check_run  # noqa: E402  # a script, which finds its modules beside itself


def _write_lock(directory: Path) -> None:
    """What the kept run was asked, as it would be written now: a field that is new has its default."""
    of_the_lock = (*LED_TO, PROVENANCE)
    asked = {name: value for name, value in LOCK_OF_GOLDEN.load(GOLDEN / "run").items() if name not in of_the_lock}
    load = {name: value for name, value in asked["load"].items() if name not in ("cells", "prompts")}
    spec = ExperimentSpec.model_validate({**asked, "load": load})
    write_lock(directory, spec, LOCK_OF_GOLDEN.read(GOLDEN / "run", AskedRun).provenance)


def _check(kept: Path, found: str) -> None:
    if os.environ.get("TRTX_WRITE_GOLDEN") and found != kept.read_text(encoding="utf-8"):
        kept.write_text(found, encoding="utf-8")
        pytest.fail(f"{kept} was written; look at it (git diff), then run the tests without TRTX_WRITE_GOLDEN")
    assert found == kept.read_text(encoding="utf-8"), (
        f"{kept} differs from what trtx makes of the golden run; if the change is meant, `make goldens` rewrites it"
    )


def test_the_manifest_of_a_real_run_says_what_this_version_would_write(tmp_path: Path) -> None:
    """A field that came later is not in it: the run counts as one of an older trtx, as users have them."""
    _write_lock(tmp_path)
    kept, now = LOCK_OF_GOLDEN.load(GOLDEN / "run"), LOCK.load(tmp_path)
    if lost := sorted(_lost(kept, now)):
        _check(GOLDEN / "run" / LOCK.file, (tmp_path / LOCK.file).read_text(encoding="utf-8"))
        pytest.fail(f"{GOLDEN / 'run' / LOCK.file} and what trtx writes differ in {lost}")


def _lost(kept: dict[str, Any], now: dict[str, Any], parent: str = "") -> Iterator[str]:
    """Fields of an older manifest that one written now lacks or has with another value."""
    for name, value in kept.items():
        if isinstance(value, dict) and isinstance(now.get(name), dict):
            yield from _lost(value, now[name], f"{parent}{name}.")
        elif name != "fields_sha256" and (name not in now or now[name] != value):
            yield f"{parent}{name}"


def _rendered(run: Path) -> None:
    """Renders a run, and compares all its metrics with an independent computation."""
    render(run)
    comparison = check_run(run)
    assert comparison.compared > 2000
    assert not comparison.mismatches, (
        f"{METRICS} and the independent {RECOMPUTED} differ. A metric that is not recomputed: add it to LATENCIES or "
        f"NUMBERS of {RECOMPUTED}. A percentile that is not recomputed: add it to percentiles of the metric's entry in "
        "LATENCIES. A key that ends in _low or _high: has_interval=True stands in NUMBERS exactly if "
        "the record has a heading and better=. A metric that trtx says is – but aiperf recorded: name what its formula "
        f"reads in reads= of its record in {METRICS}. File, metric, value of trtx, recomputed value: "
        f"{comparison.mismatches[:5]}"
    )


def test_every_metric_of_a_real_run_is_what_the_recomputation_finds(measured_run: Path) -> None:
    _rendered(measured_run)


@pytest.mark.parametrize("name", ["agg-c1", "agg-c2", "disagg-c1", "disagg-c2"])
def test_a_cell_that_was_written_earlier_says_what_its_records_give(measured_run: Path, name: str) -> None:
    earlier, now = (
        json.loads((run / "cells" / name / CELL.file).read_text()) for run in (GOLDEN / "run", measured_run)
    )
    earlier, now = (
        _without_sentences(earlier),
        _without_sentences(now),
    )  # an earlier trtx may have worded them otherwise
    assert _same_fields(earlier, now) == earlier | {"schema_version": CELL.version}, (
        f"the cells of {GOLDEN / 'run'} are from an earlier trtx, and a formula in {METRICS} now gives another value"
    )


def _without_sentences(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _without_sentences(one) for name, one in value.items() if name not in ("sentence", "why")}
    return [_without_sentences(one) for one in value] if isinstance(value, list) else value


def _same_fields(earlier: Any, now: Any) -> Any:
    """``now`` with only the fields that ``earlier`` has."""
    if isinstance(earlier, dict) and isinstance(now, dict):
        return {name: _same_fields(value, now.get(name)) for name, value in earlier.items()}
    if isinstance(earlier, list) and isinstance(now, list) and len(earlier) == len(now):
        return [_same_fields(*both) for both in zip(earlier, now, strict=True)]
    return now


@pytest.mark.parametrize("name", RENDERED)
def test_the_summary_files_of_a_real_run_are_the_golden_ones(measured_run: Path, name: str) -> None:
    _rendered(measured_run)  # nothing is written while a metric is wrong
    _check(GOLDEN / name, (measured_run / name).read_text(encoding="utf-8"))


def test_goldens_that_were_written_fail_so_that_somebody_looks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRTX_WRITE_GOLDEN", "1")
    kept = Path(shutil.copy(GOLDEN / "summary.md", tmp_path))
    _check(kept, kept.read_text(encoding="utf-8"))  # an unchanged file is not written
    with pytest.raises(pytest.fail.Exception, match="was written; look at it"):
        _check(kept, "another")
    assert kept.read_text(encoding="utf-8") == "another"
