"""What a set of cells says about a run: nothing wrong, or the error whose exit code it ends with."""

from __future__ import annotations

from collections.abc import Sequence

from trtx.bench import Cell
from trtx.errors import GateError, LoadGeneratorError, NoVerdictError, TrtxError


def verdict(cells: Sequence[Cell], expected: int) -> TrtxError | None:
    """None when every expected cell was measured and no request failed.

    A cell without a result is the load generator's failure (exit 5) and outweighs failed requests, which are the
    server's: the gate that every benchmark has (exit 1). Fewer cells than expected give no verdict (exit 3).
    """
    without = [cell for cell in cells if cell.status == "failed"]
    if without:
        return LoadGeneratorError(
            f"{len(without)} of {expected} cells have no result ({', '.join(cell.name for cell in without)}; "
            f"{without[0].name}: {without[0].failure}); expected one each; see the logs under their trial directories"
        )
    failing = [cell for cell in cells if cell.status == "errors" and cell.figures]
    if failing:
        failed = sum(cell.figures.error_request_count for cell in failing if cell.figures)
        sent = failed + sum(cell.figures.request_count for cell in cells if cell.figures)
        message = failing[0].errors[0][0] if failing[0].errors else "no message"
        return GateError(
            f"{failed} of {sent} requests failed ({', '.join(cell.name for cell in failing)}); expected none; "
            f"the most common: {message}"
        )
    if len(cells) < expected:
        return NoVerdictError(f"{len(cells)} of {expected} cells were measured; expected all; run it again")
    return None
