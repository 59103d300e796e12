"""Retrieval over length and depth as it is shown: every field with its interval, and a dash where nobody answered."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from trtx.evals import EVAL, Retrieval, ScoredTask, TopologyScores, eval_directory, statistics
from trtx.experiment import evaluation_of
from trtx.experiment.directory import write_lock
from trtx.report.evaluation import read_evaluation_view, render_evaluation
from trtx.report.forms import LOCK, Provenance

RUN = Path(__file__).parent / "golden" / "run"


def field(length: int, depth: int, right: int, answered: int) -> Retrieval:
    share = statistics.share_interval([1] * right + [0] * (answered - right))
    return Retrieval(length, depth, length - 40, length - 34, 10, answered, share)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Of two lengths and two depths: the longer one was not answered at its end."""
    found = (field(512, 0, 10, 10), field(512, 100, 9, 10), field(1024, 0, 0, 10), field(1024, 100, 0, 0))
    spec = evaluation_of({"tasks": ["needle"]})
    write_lock(tmp_path, spec, LOCK.read(RUN, type("Asked", (), {})) if False else provenance())
    scores = ScoredTask("needle", "generate_until", "1", 0, 40, 30, (), (), None, (), found)
    EVAL.write(eval_directory(tmp_path, "agg"), TopologyScores("agg", "0.4.13", "completions", None, None, (scores,)))
    return tmp_path
