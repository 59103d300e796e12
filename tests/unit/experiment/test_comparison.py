"""Any two runs side by side."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from judged_runs import CELLS, NOISY, a_run

from trtx.bench.judge.judgement import Verdict
from trtx.bench.judge.regression import GateLimit, parse_metrics
from trtx.errors import UsageError
from trtx.experiment.baselines.baseline import of_run
from trtx.experiment.baselines.comparison import compare_measured
from trtx.stats.intervals import ratio_interval

ITL = parse_metrics(["inter_token_latency:p50"])


def test_each_metric_of_each_cell_has_its_ratio_and_its_interval(tmp_path: Path) -> None:
    one, other = of_run(a_run(tmp_path / "one")), of_run(a_run(tmp_path / "other", slower=1.1, trials=NOISY))
    found = compare_measured(one, other, ITL)
    assert [row.cell for row in found.metrics] == list(CELLS) and not found.differences
    values = [
        [trial.figures.stored["inter_token_latency"]["p50"] for trial in side.cells[0].trials if trial.figures]
        for side in (other, one)
    ]
    assert found.metrics[0].ratio == ratio_interval(*values, confidence=1 - 0.05 / 4)
    assert found.metrics[0].verdict is None and found.metrics[0].unit == "ms"
    assert found.metrics[0].candidate == pytest.approx(1.1 * (found.metrics[0].baseline or 0))


def test_a_cell_that_one_side_alone_has_is_told(tmp_path: Path) -> None:
    one, other = a_run(tmp_path / "one"), a_run(tmp_path / "other")
    (one / "cells" / "agg-c1" / "cell.json").unlink()
    (other / "cells" / "agg-c2" / "cell.json").unlink()
    rows = {row.cell: row for row in compare_measured(of_run(one), of_run(other), ITL).metrics}
    assert set(rows) == set(CELLS)
    assert "the baseline has no such cell" in str(rows["agg-c1"].reason) and rows["agg-c1"].baseline is None
    assert "other has no such cell" in str(rows["agg-c2"].reason) and rows["agg-c2"].candidate is None


def test_runs_of_other_conditions_are_compared_and_told_but_not_gated(tmp_path: Path) -> None:
    def elsewhere(conditions: object) -> object:
        return replace(conditions, machine=conditions.machine | {"cpu": "other"})  # type: ignore

    one = of_run(a_run(tmp_path / "one", conditions=elsewhere))
    other = of_run(a_run(tmp_path / "other", slower=1.3))
    assert [each.name for each in compare_measured(one, other, ITL).differences] == ["machine.cpu"]
    with pytest.raises(UsageError, match="one was measured under other conditions; .*: machine.cpu was other"):
        compare_measured(one, other, ITL, limit=GateLimit(5))
    gated = compare_measured(one, other, ITL, limit=GateLimit(5), allowed=["machine"])
    assert {row.verdict for row in gated.metrics} == {Verdict.REGRESSED}
