from __future__ import annotations

from trtx.bench import Cell, Figures, LoadSpec, Trial
from trtx.bench.records import RequestRecord
from trtx.errors import GateError, LoadGeneratorError, NoVerdictError
from trtx.experiment import verdict


def cell(concurrency: int, *, ok: int = 10, failed: int = 0, uncounted: int = 0, failure: str | None = None) -> Cell:
    records = [RequestRecord(0, 10**9, None, 100, 10, 1000, 64, 32)] * ok
    records += [RequestRecord(0, 10**9, None, 100, None, 1000, None, None)] * uncounted
    records += [RequestRecord(0, 10**9, "HTTP 500 boom", None, None, None, None, None)] * failed
    found = None if failure else Figures.over([records])
    status = "failed" if failure else "errors" if failed else "uncounted" if uncounted else "ok"
    errors = (("HTTP 500 boom", failed),) if failed else ()
    trial = Trial(1, status, "trial-01", found, None, errors, failure)  # type: ignore[arg-type]
    (load,) = LoadSpec(concurrency=(concurrency,), request_count=ok or 1).loads
    return Cell("agg", load, "worker", 1, 1, (trial,), found, None, None)


def test_a_run_without_a_failure_passes() -> None:
    assert verdict([cell(1), cell(8)], expected=2) is None


def test_one_failed_request_fails_the_run_with_exit_1() -> None:
    error = verdict([cell(1), cell(8, ok=9, failed=1)], expected=2)
    assert isinstance(error, GateError) and error.exit_code == 1
    assert str(error) == "1 of 20 failed: HTTP 500 boom (agg-c8); expected none"


def test_requests_that_all_failed_are_the_servers_failure_and_exit_1() -> None:
    error = verdict([cell(1, ok=0, failed=16)], expected=1)
    assert isinstance(error, GateError)
    assert str(error).startswith("16 of 16 failed: HTTP 500 boom")


def test_answers_that_nobody_counted_are_no_verdict() -> None:
    error = verdict([cell(1), cell(8, ok=0, uncounted=10)], expected=2)
    assert isinstance(error, NoVerdictError) and error.exit_code == 3
    assert "10 of 20 answers carry no usage (agg-c8)" in str(error)


def test_a_failed_request_outweighs_an_uncounted_answer() -> None:
    assert isinstance(verdict([cell(1, uncounted=1), cell(8, failed=1)], expected=2), GateError)


def test_a_cell_without_a_result_outweighs_failed_requests_and_exits_5() -> None:
    error = verdict([cell(1, failed=1), cell(8, failure="aiperf exited 1 without a result")], expected=2)
    assert isinstance(error, LoadGeneratorError) and error.exit_code == 5
    assert "1 of 2 cells have no result (agg-c8" in str(error)


def test_fewer_cells_than_asked_for_are_no_verdict() -> None:
    error = verdict([cell(1)], expected=2)
    assert isinstance(error, NoVerdictError) and error.exit_code == 3
