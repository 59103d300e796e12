"""``trtx bench reproduce`` whole: a run, its lock carried away, and the same measured again with real aiperf."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import yaml

from trtx.report import read_run

TRTX = [sys.executable, "-c", "from trtx.cli.app import main; main()"]
ENGINE = ["--engine", "paced", "--model", "synthetic:tiny", "--set", "paced_ttft_ms=5"]
LOAD = ["--concurrency", "2", "--request-count", "6", "--warmup-request-count", "2", "--isl", "32", "--osl", "4"]
OF_ONE_START = {"Command", "Started", "Load average before", "Time to load", "Resumed"}


def bench(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    done = subprocess.run([*TRTX, "bench", *arguments], cwd=cwd, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
    return done


def only_run(parent: Path) -> Path:
    (run_dir,) = parent.iterdir()
    return run_dir


def asked(run_dir: Path) -> dict[str, Any]:
    document: dict[str, Any] = yaml.safe_load((run_dir / "run.lock.yaml").read_text())
    return {name: value for name, value in document.items() if name != "provenance"}


def test_a_run_is_made_again_from_a_copy_of_its_lock_alone(tmp_path: Path) -> None:
    there, here = tmp_path / "there", tmp_path / "here"
    there.mkdir()
    here.mkdir()
    (there / "mine.yaml").write_text("max_batch_size: 5\nmax_num_tokens: 512\n")
    bench(*ENGINE, "--config", "agg=mine.yaml", *LOAD, "-o", "runs", cwd=there)
    first = only_run(there / "runs").rename(tmp_path / "first")
    lock = Path(shutil.copy(first / "run.lock.yaml", here / "of-a-job.yaml"))
    shutil.rmtree(there)

    done = bench("reproduce", lock.name, "--exact", "--json", "-o", "runs", cwd=here)
    assert done.stderr.startswith("nothing differs\n")
    second = Path(json.loads(done.stdout)["run_dir"])
    assert {path.name.partition("-")[0] for path in (here / "runs").iterdir()} == {
        "engine",
        second.name.partition("-")[0],
    }

    both = [first, second]
    for of_both in (
        [(run_dir / "cells/agg-c2/trial-01/inputs.json").read_bytes() for run_dir in both],
        [
            {one.name: one.value for one in read_run(run_dir).conditions if one.name not in OF_ONE_START}
            for run_dir in both
        ],
        [[(row.name, row.status, row.cell and row.cell.load) for row in read_run(run_dir).rows] for run_dir in both],
        [asked(run_dir)["load"] for run_dir in both],
    ):
        assert of_both[0] == of_both[1]
    (row,) = read_run(second).rows
    assert row.status == "ok" and row.figures is not None
    written = asked(second)["topology"].pop("engine_configs")
    assert Path(written["agg"]).is_relative_to(here / "runs") and yaml.safe_load(Path(written["agg"]).read_text())
