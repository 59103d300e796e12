from __future__ import annotations

import shutil
from itertools import product
from pathlib import Path

import pytest

from trtx.bench import cell_directory, cell_name
from trtx.bench.cells import CELL, measure_cell
from trtx.experiment.bench.resumption import read_recorded
from trtx.experiment.directory import read_lock

GOLDEN = Path(__file__).parent / "golden"


@pytest.fixture
def golden_run(tmp_path: Path) -> Path:
    """A copy of a real run: the paced engine (TTFT 20 ms, ITL 5 ms), agg and disagg, concurrency 1 and 2."""
    return Path(shutil.copytree(GOLDEN / "run", tmp_path / "20261122T003706Z-bench-ae3daa03"))


@pytest.fixture
def measured_run(golden_run: Path) -> Path:
    """The golden run with cells computed again from aiperf's records. They also have the metrics that came later."""
    spec = read_lock(golden_run)
    recorded = read_recorded(golden_run, spec)
    for label, load in product(spec.labels, spec.load.loads):
        directory, target = cell_directory(golden_run, cell_name(label, load)), recorded.target(label)
        cell = measure_cell(directory, target, spec.load, load, range(1, spec.load.trials + 1), restarted=())
        CELL.write(directory, cell.to_json())
    return golden_run
