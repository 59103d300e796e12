from __future__ import annotations

from typing import Any

from judged_runs import GOLDEN, of_trials

from trtx.bench import Cell, Figures, read_cells
from trtx.bench.failures import Reasons
from trtx.bench.judge.judgement import Verdict
from trtx.errors import GateError, LoadGeneratorError, NoVerdictError
from trtx.experiment.bench.verdict import ending, error_of, judge_cells, run_verdict
from trtx.experiment.gate_spec import GateSpec

NAMES = ("agg-c1", "agg-c2")


def cells(*said: dict[str, Any]) -> dict[str, Cell]:
    """Of the kept run, each with 10 requests, of which so many were as said."""
    return {cell.name: _cell(cell, **one) for cell, one in zip(read_cells(GOLDEN), said, strict=False)}


def _cell(cell: Cell, failed: int = 0, uncounted: int = 0, failure: str | None = None) -> Cell:
    from dataclasses import replace

    (trial,) = of_trials(cell, (1.0,)).trials
    assert trial.figures is not None
    figures = Figures(
        {**trial.figures.stored, "request_count": 10 - failed, "error_request_count": failed,
         "uncounted_request_count": uncounted, "request_error_rate": 10.0 * failed},
    )  # fmt: skip
    status = "failed" if failure else "errors" if failed else "uncounted" if uncounted else "ok"
    errors: Reasons = (("HTTP 500 boom", failed),) if failed else ()
    found = None if failure else figures
    trial = replace(trial, status=status, errors=errors, figures=found, failure=failure)
    return replace(cell, trials=(trial,), figures=found)


def judged(found: dict[str, Cell], **gate: Any) -> Exception | None:
    return ending(tuple(found.values()), judge_cells(GateSpec.model_validate(gate), NAMES, found))


def test_a_run_without_a_failure_passes() -> None:
    assert judged(cells({}, {})) is None


def test_one_failed_request_fails_the_run_with_exit_1() -> None:
    error = judged(cells({}, {"failed": 1}))
    assert isinstance(error, GateError) and error.exit_code == 1
    assert str(error) == "1 of 20 failed: HTTP 500 boom (agg-c2); expected none"


def test_requests_that_all_failed_are_the_servers_failure_and_exit_1() -> None:
    error = judged(cells({"failed": 10}, {}))
    assert isinstance(error, GateError)
    assert str(error).startswith("10 of 20 failed: HTTP 500 boom")


def test_what_else_is_bad_is_told_behind_failed_requests() -> None:
    error = judged(cells({"failed": 1}, {}), slo=["time_to_first_token:p50:le:1"])
    assert str(error).startswith("1 of 20 failed: HTTP 500 boom (agg-c1); expected none; 2 of 3 checks did not pass")


def test_half_of_the_requests_failed_in_each_cell() -> None:
    error = judged(cells({"failed": 5}, {"failed": 5}), max_error_rate="20%")
    assert isinstance(error, GateError)
    assert str(error) == "10 of 20 failed: HTTP 500 boom (agg-c1, agg-c2); expected at most 20 % of a cell"


def test_answers_that_nobody_counted_are_no_verdict() -> None:
    error = judged(cells({}, {"uncounted": 10}))
    assert isinstance(error, NoVerdictError) and error.exit_code == 3
    assert "10 of 10 answers carry no usage" in str(error) and "agg-c2" in str(error)


def test_a_failed_request_outweighs_an_uncounted_answer() -> None:
    error = judged(cells({"uncounted": 1}, {"failed": 1}))
    assert isinstance(error, GateError) and "uncounted" not in str(error).split(";")[0]


def test_a_cell_without_a_result_outweighs_failed_requests_and_exits_5() -> None:
    error = judged(cells({"failed": 1}, {"failure": "aiperf exited 1 without a result"}))
    assert isinstance(error, LoadGeneratorError) and error.exit_code == 5
    assert "1 of 2 cells have no result (agg-c2; agg-c2: aiperf exited 1" in str(error)


def test_a_cell_that_was_not_measured_is_bad_news() -> None:
    error = judged(cells({}))
    assert isinstance(error, GateError) and "agg-c2" in str(error) and "it was not measured" in str(error)


def test_the_kept_verdict_ends_a_run_as_its_judgements_do() -> None:
    for said in ({}, {"failed": 1}, {"uncounted": 1}, {"failure": "lost"}):
        found = cells(said, {})
        judgements = judge_cells(GateSpec(), NAMES, found)
        kept, now = (
            error_of(run_verdict(tuple(found.values()), judgements, None)),
            ending(tuple(found.values()), judgements),
        )
        assert (type(kept), str(kept)) == (type(now), str(now))
        assert (kept is None) == all(one.verdict is Verdict.PASS for one in judgements)
