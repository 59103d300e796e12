"""``benchmarks/recompute_run.py`` as a stranger runs it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "recompute_run.py"


def assert_recomputed(run_dir: Path) -> None:
    """Every figure that the run says is what aiperf's records give."""
    done = subprocess.run([sys.executable, str(SCRIPT), str(run_dir)], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr
