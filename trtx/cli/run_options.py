"""What the verbs that make a run share: their options, and how they show progress and result."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from trtx.cli import topology_options as options
from trtx.cli.command import optional
from trtx.cli.placement import refuse_ignored
from trtx.cli.sentences import tell
from trtx.errors import TrtxError

if TYPE_CHECKING:
    from rich.console import RenderableType

    from trtx.config import Mode
    from trtx.experiment import FinishedRun
    from trtx.experiment.bench.spec import Attach

ATTACH, OUTPUT = "Attach", "Output"
JsonOption = Annotated[
    bool, typer.Option("--json", help="Print the summary as one line of JSON on stdout.", rich_help_panel=OUTPUT)
]
DryRunOption = Annotated[
    bool,
    typer.Option("--dry-run", help="Print what would be started and sent; start nothing.", rich_help_panel=OUTPUT),
]
ModeOption = Annotated[
    str | None,
    optional("Topology", "--mode", "Modes to serve, one after the other. Default: agg.", metavar="agg,disagg"),
]
UrlOption = Annotated[
    str | None,
    optional(
        ATTACH,
        "--url",
        "Use the server at this address and start none. If it needs an API key, set OPENAI_API_KEY.",
    ),
]
TokenizerOption = Annotated[
    str | None,
    optional(
        ATTACH,
        "--tokenizer",
        "With --url: directory or name of the served model's tokenizer. Default: the model's name.",
    ),
]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOptions:
    """The options of every verb whose run can be resumed."""

    output: options.OutputOption = Path("runs")
    resume: Annotated[
        Path | None,
        optional(
            OUTPUT,
            "--resume",
            "Continue a run that ended early: keep its results and measure what is missing.",
            metavar="RUN_DIR",
        ),
    ] = None
    as_json: JsonOption = False


Result = Callable[[Path], "tuple[RenderableType, Mapping[str, Any]]"]
"""Reads from a run directory the result table and the fields of the summary."""


def own_command_line() -> list[str]:
    """Returns the command line of this process as the run's record stores it."""
    return ["trtx", *sys.argv[1:]]


def show_run(verb: str, start: Callable[..., FinishedRun], result: Result, *, as_json: bool) -> None:
    """Performs a run: shows its progress, then its result table and the path of its report.

    ``start`` gets the arguments ``argv`` and ``listener``.
    """
    from trtx.cli.run_view import RunProgress

    view = RunProgress()
    try:
        with view:
            finished = start(argv=own_command_line(), listener=view)
    except TrtxError:
        if view.run_dir is not None:
            _tell_what_is_kept(verb, view.run_dir)
        raise
    from trtx.cli.step_summary import add_step_summary

    add_step_summary(finished.run_dir)
    table, fields = result(finished.run_dir)
    view.print_table(table, to_stderr=as_json)
    if finished.error is not None:
        tell(f"trtx: {finished.error}")
    if finished.baseline is not None:
        tell(f"candidate for a baseline: {finished.baseline}")
    if finished.unsaved is not None:
        tell(f"trtx: {finished.unsaved}")
    if as_json:
        tell(f"report: {finished.report}")
        typer.echo(json.dumps({"run_dir": str(finished.run_dir), **fields}))
    else:
        typer.echo(str(finished.report))
    if (error := finished.error or finished.unsaved) is not None:
        raise typer.Exit(error.exit_code)


def _tell_what_is_kept(verb: str, run_dir: Path) -> None:
    from trtx.cli.step_summary import add_step_summary
    from trtx.report import REPORT_FILE
    from trtx.runs.forms import LOCK

    if not (run_dir / LOCK.file).exists():
        return
    if (report := run_dir / REPORT_FILE).exists():
        add_step_summary(run_dir)
        tell(f"partial report: {report}")
    tell(f"resume it with: {verb} --resume {shlex.quote(str(run_dir))}")


def topology_and_attach(given: dict[str, Any]) -> dict[str, Any]:
    """Converts the given options to the fields ``modes``, ``topology`` and ``attach`` of a spec."""
    from trtx.experiment import Attach

    fields: dict[str, Any] = {}
    if "mode" in given:
        fields["modes"] = options.parse_modes(given["mode"])
    if "url" in given:
        fields["attach"] = {name: given[name] for name in Attach.model_fields if name in given}
    elif topology := options.topology_fields(given, fields.get("modes", [])):
        fields["topology"] = {"port": 0, **topology}
    return fields


def refuse_unused(
    context: typer.Context,
    model: options.ModelOptions,
    *,
    modes: tuple[Mode, ...],
    attach: Attach | None,
    encode: int,
) -> None:
    """Raises UsageError for topology options that the served ``modes`` don't use.

    ``encode``: the number of encode workers.
    """
    if attach is None:
        refuse_ignored(context, modes if len(modes) == 1 else [])
        options.check_roles(modes, model.config, model.overrides, model.recipe, encode=encode)
