"""The runner's GPU tests play the same sequences as its unit tests do on a CPU."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1] / "unit" / "torch_engine" / "runner"))
sys.path.insert(0, str(Path(__file__).parents[1] / "integration"))


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from runner_player import build, save

    return save(build("qwen3"), tmp_path_factory.mktemp("checkpoint"))
