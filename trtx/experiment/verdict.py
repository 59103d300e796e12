"""What a set of cells says about a run: nothing wrong, or the error whose exit code it ends with."""

from __future__ import annotations

from collections.abc import Sequence

from trtx.bench import Cell, describe
from trtx.bench.failures import merge_reasons
from trtx.bench.metrics import error_request_count, request_count, uncounted_request_count
from trtx.errors import GateError, LoadGeneratorError, NoVerdictError, TrtxError

_REASONS = 3  # told in one sentence; the report has all


def verdict(cells: Sequence[Cell], expected: int) -> TrtxError | None:
    """None when every expected cell was measured, no request failed, and every answer was counted.

    A cell without a result is the load generator's failure (exit 5) and outweighs failed requests, which are the
    server's: the gate that every benchmark has (exit 1). Fewer cells than expected, or answers without usage, whose
    tokens nobody counted, give no verdict (exit 3).
    """
    without = [cell for cell in cells if cell.status == "failed"]
    if without:
        return LoadGeneratorError(
            f"{len(without)} of {expected} cells have no result ({_names(without)}; "
            f"{without[0].name}: {without[0].failure}); expected one each; see the logs under their trial directories"
        )
    measured = [cell.figures for cell in cells if cell.figures]
    succeeded = sum(figures[request_count] for figures in measured)
    failed = sum(figures[error_request_count] for figures in measured)
    if failed:
        reasons = merge_reasons(cell.errors for cell in cells)
        failing = [cell for cell in cells if cell.errors]
        return GateError(
            f"{failed} of {succeeded + failed} failed: {describe(reasons, _REASONS)} ({_names(failing)}); expected none"
        )
    if len(cells) < expected:
        return NoVerdictError(f"{len(cells)} of {expected} cells were measured; expected all; run it again")
    if uncounted := sum(figures[uncounted_request_count] for figures in measured):
        lacking = [cell for cell in cells if cell.status == "uncounted"]
        return NoVerdictError(
            f"{uncounted} of {succeeded} answers carry no usage ({_names(lacking)}), so nobody counted their tokens; "
            "expected one each; switch usage on at the server"
        )
    return None


def _names(cells: Sequence[Cell]) -> str:
    return ", ".join(cell.name for cell in cells)
