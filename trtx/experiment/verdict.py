"""What the judgements of a run say of it: nothing wrong, or the error whose exit code it ends with."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from trtx.bench import Cell, describe
from trtx.bench.failures import merge_reasons
from trtx.bench.judgement import Judgement, Verdict, outcome
from trtx.bench.metrics import error_request_count, request_count, request_error_rate
from trtx.errors import GateError, LoadGeneratorError, NoVerdictError, TrtxError
from trtx.report.forms import ComparedWith, RunVerdict

_REASONS = 3  # told in one sentence; the report has all


def run_verdict(cells: Sequence[Cell], judgements: Sequence[Judgement], baseline: ComparedWith | None) -> RunVerdict:
    """Of a run whose ``cells`` were measured and judged, those that were not measured too."""
    error = ending(cells, judgements)
    worst = next((verdict for verdict in Verdict if any(one.verdict is verdict for one in judgements)), None)
    return RunVerdict(
        verdict=worst or Verdict.NO_VERDICT,
        exit_code=0 if error is None else error.exit_code,
        sentence=None if error is None else str(error),
        baseline=baseline,
        judgements=tuple(judgements),
    )


def ending(cells: Sequence[Cell], judgements: Sequence[Judgement]) -> TrtxError | None:
    """None where every judgement passed.

    A cell without a result is the load generator's failure (exit 5) and outweighs all else; then what was found bad
    (exit 1), requests that failed first; then what could not be judged (exit 3).
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
    beside = f"; {others}" if isinstance(others, GateError) and len(judgements) > len(missed) else ""
    return GateError(f"{_failed_requests(cells, missed, judgements)}{beside}")


def error_of(verdict: RunVerdict) -> TrtxError | None:
    """What a run ends with, of its kept verdict."""
    if verdict.sentence is None:
        return None
    kinds: tuple[type[TrtxError], ...] = (GateError, NoVerdictError, LoadGeneratorError)
    return next(kind for kind in kinds if kind.exit_code == verdict.exit_code)(verdict.sentence)


def _is_of_failures(judgement: Judgement) -> bool:
    return judgement.criterion.startswith(f"{request_error_rate.name}:")


def _failed_requests(cells: Sequence[Cell], missed: Collection[str], judgements: Sequence[Judgement]) -> str:
    failing = [cell for cell in cells if cell.name in missed]
    failed = sum(cell.figures[error_request_count] for cell in failing if cell.figures)
    succeeded = sum(cell.figures[request_count] for cell in cells if cell.figures)
    reasons = describe(merge_reasons(cell.errors for cell in failing), _REASONS)
    limit = next(one.limit for one in judgements if _is_of_failures(one) and one.limit is not None)
    expected = f"at most {limit:g} % of a cell" if limit else "none"
    return f"{failed} of {failed + succeeded} failed: {reasons} ({_names(failing)}); expected {expected}"


def _names(cells: Sequence[Cell]) -> str:
    return ", ".join(cell.name for cell in cells)
