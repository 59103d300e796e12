"""``trtx explain``: says where the time of a run's requests went, and why they were slow if a cause stands out."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from trtx.cli.command import Verb
from trtx.errors import UsageError

if TYPE_CHECKING:
    from trtx.bench.explain import CellExplanation
    from trtx.bench.stages import RequestSplit

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command(
    cls=Verb,
    no_args_is_help=True,
    epilog="Exit codes: 0 explained, also if no cause stands out; 2 usage, or a document that can't be read.",
)
def explain(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A run directory of trtx bench.")],
    *,
    cell: Annotated[str | None, typer.Option("--cell", metavar="NAME", help="Only this cell.")] = None,
    request: Annotated[
        str | None,
        typer.Option("--request", metavar="ID", help="Only this request, by its x_request_id in aiperf's records."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="The explanation as one line of JSON on stdout.")] = False,
) -> None:
    """Say where the time of a run's requests went, by stage, and why if a cause stands out.

    It measures nothing: the workers of a run write the stage times of each request.

    \b
    Examples:
      trtx explain runs/20261121T050132Z-bench-9a1c6852
      trtx explain runs/20261121T050132Z-bench-9a1c6852 --cell disagg-c8 --json
    """
    fields, text = answer(run, cell, request)
    typer.echo(json.dumps(fields) if as_json else text)


def answer(run: Path, cell: str | None, request: str | None) -> tuple[dict[str, Any], str]:
    """The explanation of a run, of one of its cells, or of one request: as fields, and as text. Raises UsageError."""
    from trtx.bench.explain import explain_cell
    from trtx.bench.named_cells import cells_named
    from trtx.report.explanation import explanation_fields, explanation_text, request_fields, request_text

    found = [explain_cell(run, one) for one in cells_named(run, cell)]
    if request is not None:
        where, split = _find(found, request)
        return request_fields(where, split), request_text(where, split)
    fields = {"run_dir": str(run.absolute()), "cells": [explanation_fields(one) for one in found]}
    return fields, "\n\n".join(explanation_text(one) for one in found)


def _find(cells: list[CellExplanation], request: str) -> tuple[str, RequestSplit]:
    """The request and its cell's name. Raises UsageError if no cell has stage times of it."""
    for one in cells:
        for split in one.splits:
            if split.record.request_id == request:
                return one.cell, split
    known = next((split.record.request_id for one in cells for split in one.splits), None)
    hint = f"expected an id such as {known}" if known else "this run has no stage times"
    raise UsageError(f"no measured request with stage times has the id {request!r}; {hint}")
