"""``trtx report``: what a run directory has is rendered again."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from trtx.cli.command import Verb
from trtx.errors import UsageError

if TYPE_CHECKING:
    from trtx.report import RunView
    from trtx.report.evaluation import EvaluationView
    from trtx.report.parity import ParityView

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command(
    cls=Verb,
    no_args_is_help=True,
    epilog="Exit codes: 0 rendered, whatever the verdict of the run; 2 usage, or a document that can't be read.",
)
def report(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A run directory of trtx bench or trtx eval.")],
    *,
    as_json: Annotated[bool, typer.Option("--json", help="The summary as one line of JSON on stdout.")] = False,
) -> None:
    """Render a run again: table, summary files, JUnit and page. It measures and judges nothing.

    \b
    Example:
      trtx report runs/20261121T050132Z-bench-9a1c6852
    """
    from rich.console import Console

    from trtx.report import REPORT_FILE, console_table
    from trtx.report.evaluation import EvaluationView, evaluation_fields, evaluation_table
    from trtx.report.parity import ParityView, parity_fields, parity_table
    from trtx.report.summary import summary_json

    view = rendered(run)
    if isinstance(view, ParityView):
        if as_json:
            typer.echo(json.dumps({"run_dir": str(run.absolute()), **parity_fields(view)}))
            return
        Console(highlight=False).print(parity_table(view))
        typer.echo(str(run / REPORT_FILE))
        return
    if isinstance(view, EvaluationView):
        if as_json:
            typer.echo(json.dumps({"run_dir": str(run.absolute()), **evaluation_fields(view)}))
            return
        Console(highlight=False).print(evaluation_table(view))
        typer.echo(str(run / REPORT_FILE))
        return
    if as_json:
        typer.echo(json.dumps({"run_dir": str(run.absolute()), **summary_json(view)}))
        return
    Console(highlight=False).print(console_table(view))
    typer.echo(str(run / REPORT_FILE))


def rendered(run: Path) -> RunView | EvaluationView | ParityView:
    """Raises UsageError where it is no run, one of its documents can't be read, or it can't be written."""
    from trtx.report import render
    from trtx.report.evaluation import is_evaluation, render_evaluation
    from trtx.report.forms import LOCK
    from trtx.report.parity import is_parity, render_parity

    if not (run / LOCK.file).exists():
        raise UsageError(f"{str(run)!r} is no run directory, it has no {LOCK.file}; expected one of trtx bench")
    try:
        if is_parity(run):
            return render_parity(run)
        return render_evaluation(run) if is_evaluation(run) else render(run)
    except OSError as error:
        raise UsageError(
            f"{str(run)!r} can't be written ({error.strerror}); make room there, or take a copy"
        ) from error
