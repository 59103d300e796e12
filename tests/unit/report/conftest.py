from __future__ import annotations

import shutil
from pathlib import Path

import pytest

GOLDEN = Path(__file__).parent / "golden"


@pytest.fixture
def golden_run(tmp_path: Path) -> Path:
    """A copy of a real run: the paced engine (TTFT 20 ms, ITL 5 ms), agg and disagg, concurrency 1 and 2."""
    return Path(shutil.copytree(GOLDEN / "run", tmp_path / "20261122T003706Z-bench-ae3daa03"))
