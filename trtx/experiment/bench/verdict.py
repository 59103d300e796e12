"""The verdict on a run's cells, and the error, if any, with which the run ends."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from trtx.bench import Cell, describe
from trtx.bench.failures import merge_reasons
from trtx.bench.judge.goodput import judge_goodput
from trtx.bench.judge.judgement import CheckResult, Verdict, outcome
from trtx.bench.judge.regression import compare
from trtx.bench.judge.sample import CellSample, Window
from trtx.bench.judge.slo import judge_error_rate, judge_objective
from trtx.bench.metrics import error_request_count, request_count, request_error_rate, uncounted_request_count
from trtx.errors import GateError, LoadGeneratorError, NoVerdictError, TrtxError
from trtx.experiment.gate_spec import GateSpec
from trtx.runs.forms import ComparedWith, RunVerdict

_REASONS = 3  # maximum number of reasons in one sentence; the report has all


def judge_cells(
    gate: GateSpec,
    names: Sequence[str],
    cells: Mapping[str, Cell],
    *,
    goodputs: Mapping[str, Sequence[float | None]] | None = None,
    baseline: Sequence[CellSample] = (),
    pairs: Mapping[str, str] | None = None,
) -> tuple[CheckResult, ...]:
    """Judges every criterion for every cell in ``names``, cell by cell. A cell that is not in ``cells`` was not
    measured.

    Failed requests are always judged. ``goodputs`` gives each trial's goodput, by cell, if the gate has a minimum.
    ``pairs`` maps, for an A/B run, each cell to the one with which it is compared block by block, instead of a
    ``baseline``.
    """
    samples = [sample_of(cells, name, gate.window) for name in names]
    found: list[CheckResult] = []
    for sample in samples:
        failures = _judge_failures(sample, cells.get(sample.cell), gate.error_rate_limit)
        lacking = _judge_usage(sample) if failures.verdict is Verdict.PASS else None
        found += [failures] if lacking is None else [failures, lacking]
        found += [judge_objective(sample, objective) for objective in gate.objectives]
        if gate.min_goodput is not None:
            found.append(judge_goodput(sample, (goodputs or {}).get(sample.cell, ()), gate.min_goodput))
    if gate.limit is not None and pairs is not None:
        arm = [replace(sample_of(cells, of_arm, gate.window), cell=name) for name, of_arm in pairs.items()]
        candidates = [sample for sample in samples if sample.cell in pairs]
        found += compare(
            arm, candidates, gate.limit, gate.compared, design="paired", max_error_rate=gate.error_rate_limit
        )
    elif gate.limit is not None:
        found += compare(baseline, samples, gate.limit, gate.compared, max_error_rate=gate.error_rate_limit)
    return tuple(sorted(found, key=lambda judgement: names.index(judgement.cell)))


def sample_of(cells: Mapping[str, Cell], name: str, window: Window) -> CellSample:
    """The sample of a cell; a missing cell counts as not measured."""
    return CellSample.of(cells[name], window) if name in cells else unmeasured(name)


def run_verdict(
    cells: Sequence[Cell], judgements: Sequence[CheckResult], baseline: ComparedWith | None, window: Window = "whole"
) -> RunVerdict:
    """The verdict on a run with these measured ``cells``. ``judgements`` also cover cells that were not measured."""
    error = ending(cells, judgements)
    worst = next((verdict for verdict in Verdict if any(one.verdict is verdict for one in judgements)), None)
    return RunVerdict(
        verdict=worst or Verdict.NO_VERDICT,
        exit_code=0 if error is None else error.exit_code,
        sentence=None if error is None else str(error),
        baseline=baseline,
        judgements=tuple(judgements),
        window=window,
    )


def ending(cells: Sequence[Cell], judgements: Sequence[CheckResult]) -> TrtxError | None:
    """The error with which a run ends; None if every judgement passed.

    A cell without a result is a failure of the load generator (exit code 5) and takes precedence. Next are failed
    judgements (exit code 1), starting with failed requests, and finally missing verdicts (exit code 3).
    """
    without = [cell for cell in cells if cell.status == "failed"]
    if without:
        return LoadGeneratorError(
            f"{len(without)} of {len({one.cell for one in judgements})} cells have no result ({_names(without)}; "
            f"{without[0].name}: {without[0].failure}); expected one each; see the logs under their trial directories"
        )
    missed = {one.cell for one in judgements if one.verdict is Verdict.MISSED and _is_of_failures(one)}
    if not missed:
        return outcome(judgements)
    others = outcome([one for one in judgements if not (_is_of_failures(one) and one.cell in missed)])
    beside = f"; {others}" if isinstance(others, GateError) else ""
    return GateError(f"{_failed_requests(cells, missed, judgements)}{beside}")


def error_of(verdict: RunVerdict) -> TrtxError | None:
    """The error with which a run ends, from its stored verdict."""
    if verdict.sentence is None:
        return None
    kinds: tuple[type[TrtxError], ...] = (GateError, NoVerdictError, LoadGeneratorError)
    return next(kind for kind in kinds if kind.exit_code == verdict.exit_code)(verdict.sentence)


def _is_of_failures(judgement: CheckResult) -> bool:
    return judgement.criterion.startswith(f"{request_error_rate.name}:")


def _failed_requests(cells: Sequence[Cell], missed: Collection[str], judgements: Sequence[CheckResult]) -> str:
    failing = [cell for cell in cells if cell.name in missed]
    failed = sum(cell.figures[error_request_count] for cell in failing if cell.figures)
    succeeded = sum(cell.figures[request_count] for cell in cells if cell.figures)
    reasons = describe(merge_reasons(cell.errors for cell in failing), _REASONS)
    limit = next(one.limit for one in judgements if _is_of_failures(one) and one.limit is not None)
    expected = f"at most {limit:g} % of a cell" if limit else "none"
    return f"{failed} of {failed + succeeded} failed: {reasons} ({_names(failing)}); expected {expected}"


def _names(cells: Sequence[Cell]) -> str:
    return ", ".join(cell.name for cell in cells)


def _judge_failures(sample: CellSample, cell: Cell | None, limit: float) -> CheckResult:
    judged = judge_error_rate(sample, limit)
    if judged.verdict is not Verdict.MISSED or cell is None or cell.figures is None:
        return judged
    failed, succeeded = cell.figures[error_request_count], cell.figures[request_count]
    reason = f"{failed:,} of {failed + succeeded:,} failed: {describe(cell.errors)}; expected {_at_most(limit)}"
    return replace(judged, reason=reason)


def _judge_usage(sample: CellSample) -> CheckResult | None:
    """No verdict if answers lack usage, since their tokens were not counted; None if all have one."""
    uncounted = 0 if sample.figures is None else sample.figures[uncounted_request_count]
    if not uncounted:
        return None
    answers = sample.requests()[0]
    return CheckResult(
        cell=sample.cell,
        criterion="uncounted_request_count:avg:le:0",
        verdict=Verdict.NO_VERDICT,
        reason=f"{uncounted:,} of {answers:,} answers carry no usage, so their tokens were not counted; switch usage "
        "on at the server",
        value=uncounted,
        limit=0,
        unit="requests",
    )


def unmeasured(name: str) -> CellSample:
    """The sample of a requested cell that doesn't exist."""
    return CellSample(cell=name, device_count=None, figures=None, trials=(), failure="it was not measured")


def _at_most(limit: float) -> str:
    return f"at most {limit:g} %" if limit else "none"
