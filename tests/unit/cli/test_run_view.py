"""What ``trtx eval`` says of its samples while it runs."""

from __future__ import annotations

import pytest

from trtx.cli.run_view import RunProgress
from trtx.evals.messages import EvalProgress


@pytest.mark.parametrize(("answered", "told"), [(8, "agg sums: 8 of 10 samples"), (10, "agg sums: 10 samples")])
def test_the_end_of_a_task_says_how_many_samples_were_answered(
    answered: int, told: str, capfd: pytest.CaptureFixture[str]
) -> None:
    with RunProgress() as view:
        view.on_scored(EvalProgress("agg", "sums", 10, answered, 10, 0, None, None, None, None))
    assert told in capfd.readouterr().err.splitlines()
