from __future__ import annotations

import os
import re
import shutil
from datetime import UTC, datetime
from pathlib import Path

import pytest
import yaml

from trtx.bench.files import write_text
from trtx.errors import UsageError
from trtx.experiment import load_sweep
from trtx.experiment.bench.spec import ExperimentSpec
from trtx.experiment.directory import create, hold, unwritable_refused, write_lock
from trtx.experiment.environment import environment
from trtx.runs.forms import LOCK, Provenance

NOON = datetime(2026, 3, 4, 12, 0, 0, tzinfo=UTC)
PROVENANCE = Provenance(environment([], NOON), {})


def test_a_run_directory_says_when_what_and_of_which_spec(tmp_path: Path) -> None:
    path = create(tmp_path / "runs", load_sweep(None, {"name": "demo"}), NOON)
    assert re.fullmatch(r"20260304T120000Z-demo-[0-9a-f]{8}", path.name)
    assert path.is_dir() and path.is_absolute()


def test_the_same_spec_has_the_same_hash_and_another_has_not(tmp_path: Path) -> None:
    hashes = [
        create(tmp_path / str(n), load_sweep(None, overlay), NOON).name[-8:]
        for n, overlay in enumerate([{}, {}, {"load": {"isl": 300}}])
    ]
    assert hashes[0] == hashes[1] != hashes[2]


def test_a_run_directory_is_always_new(tmp_path: Path) -> None:
    spec = load_sweep(None, {})
    assert len({create(tmp_path, spec, NOON) for _ in range(3)}) == 3


def test_the_lock_holds_what_defaults_led_to(tmp_path: Path) -> None:
    write_lock(tmp_path, load_sweep(None, {"load": {"concurrency": [1, 64]}}), PROVENANCE)
    lock = yaml.safe_load((tmp_path / "run.lock.yaml").read_text())
    assert lock["schema_version"] == LOCK.version
    assert [cell["request_count"] for cell in lock["load"]["cells"]] == [67, 256]


def test_a_run_directory_that_was_removed_is_missed_even_where_its_parts_came_back(tmp_path: Path) -> None:
    run_dir = create(tmp_path, ExperimentSpec(), datetime.now(UTC))
    write_lock(run_dir, ExperimentSpec(), PROVENANCE)
    removed = f"run directory {run_dir} was removed during the measurement"
    with hold(run_dir) as check:
        check()
        shutil.rmtree(run_dir)
        with pytest.raises(UsageError, match=removed):
            check()
        run_dir.mkdir()
        write_lock(run_dir, ExperimentSpec(), PROVENANCE)
        with pytest.raises(UsageError, match=removed):
            check()
    with pytest.raises(UsageError, match=removed), unwritable_refused(run_dir), hold(run_dir):
        shutil.rmtree(run_dir)
        try:
            (run_dir / "journal.jsonl").write_text("")
        finally:
            run_dir.mkdir()  # as the launcher makes its own part of it again


def test_a_file_that_is_larger_than_the_room_is_told_though_a_small_one_is_taken_still(tmp_path: Path) -> None:
    run_dir, elsewhere = tmp_path / "run", tmp_path / "elsewhere"
    for parent in (run_dir, elsewhere):
        parent.mkdir()
        (parent / f".report.html.{os.getpid()}").symlink_to("/dev/full")  # beside the file, until it is whole
    told = rf"{run_dir} can't be written \(No space left on device\).*make room there"
    with pytest.raises(UsageError, match=told), unwritable_refused(run_dir):
        write_text(run_dir / "report.html", "text")
    assert not any(run_dir.iterdir())
    with pytest.raises(OSError, match="No space left on device"), unwritable_refused(run_dir):
        write_text(elsewhere / "report.html", "text")  # of another disk
