"""``trtx report``: renders the report of a run directory again."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from trtx.cli.command import Verb
from trtx.errors import UsageError

if TYPE_CHECKING:
    from trtx.report import RunView
    from trtx.report.eval_report import EvalReport

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command(
    cls=Verb,
    no_args_is_help=True,
    epilog="Exit codes: 0 rendered, whatever the verdict of the run; 2 usage, a document that can't be read, or "
    "records that were changed since they were measured.",
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
    from trtx.bench.intact import refuse_changed, refuse_changed_documents
    from trtx.cli.console import ResultConsole
    from trtx.report import REPORT_FILE, RunView, console_table
    from trtx.report.summary import summary_json

    view = rendered(run)
    if isinstance(view, RunView):
        fields, table = summary_json(view), console_table(view)
    else:
        fields, table = view.summary, view.on_terminal
    if as_json:
        typer.echo(json.dumps({"run_dir": str(run.absolute()), **fields}))
    else:
        ResultConsole().print(table)
        typer.echo(str(run / REPORT_FILE))
    if isinstance(view, RunView):
        refuse_changed(run, {row.name: row.kept for row in view.rows})
    refuse_changed_documents(run)


def rendered(run: Path) -> RunView | EvalReport:
    """Renders the report of a run and returns its view.

    Raises UsageError if the directory is not a run, if a document can't be read, or if the report can't be written.
    """
    from trtx.report import render
    from trtx.report.evaluation import is_evaluation, render_evaluation
    from trtx.report.fidelity import is_fidelity, render_fidelity
    from trtx.report.parity import is_parity, render_parity
    from trtx.runs.forms import LOCK

    if not (run / LOCK.file).exists():
        raise UsageError(f"{str(run)!r} is not a run directory, it has no {LOCK.file}; expected one of trtx bench")
    try:
        for is_it, render_it in (
            (is_fidelity, render_fidelity), (is_parity, render_parity), (is_evaluation, render_evaluation),
        ):  # fmt: skip
            if is_it(run):
                return render_it(run)
        return render(run)
    except OSError as error:
        raise UsageError(
            f"{str(run)!r} can't be written ({error.strerror}); make room there, or take a copy"
        ) from error
