"""The script behind ``synthetic:tiny-vl-trained``: it learns, and a run that was killed goes on as if it never was."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytestmark = pytest.mark.proof
SCRIPT = Path(__file__).parents[3] / "tools" / "training" / "train_tiny_vl.py"
STATE_S = 300.0


def start(directory: Path, log: Path) -> subprocess.Popen[bytes]:
    command = [sys.executable, str(SCRIPT), "--tower-steps", "60", "--steps", "50",
               "--scored", "4", "--out", str(directory / "out"), "--state", str(directory / "state.pt")]  # fmt: skip
    environment = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    return subprocess.Popen(command, stderr=log.open("ab"), env=environment)


def test_the_loss_falls_and_a_killed_run_ends_with_the_weights_of_one_that_was_not(tmp_path: Path) -> None:
    whole, cut, log = tmp_path / "whole", tmp_path / "cut", tmp_path / "log"
    assert start(whole, log).wait(timeout=1200) == 0
    losses = [float(loss) for loss in re.findall(r"loss ([\d.]+)", log.read_text())]
    assert len(losses) == 11
    assert losses[5] < 0.8 * losses[0] and losses[10] < 0.5 * losses[6]
    assert "| colour | 4 |" in (whole / "out" / "TRAINING.md").read_text()
    first, deadline = start(cut, tmp_path / "first"), time.monotonic() + STATE_S
    while not (cut / "state.pt").exists() and time.monotonic() < deadline:
        assert first.poll() is None
        time.sleep(0.2)
    first.kill()
    first.wait()
    assert start(cut, tmp_path / "second").wait(timeout=1200) == 0
    assert re.search(r"goes on from step (50|100) of", (tmp_path / "second").read_text())
    assert (cut / "out" / "model.safetensors").read_bytes() == (whole / "out" / "model.safetensors").read_bytes()
