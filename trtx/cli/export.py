"""The shared parts of ``trtx export kubernetes``, ``slurm`` and ``nginx``: output, and options of ``trtx serve``.

Each of these verbs has its own module, ``export_<target>.py``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

import typer

from trtx.cli.findings_text import describe_findings
from trtx.cli.sentences import tell
from trtx.cli.topology_options import OptionGroup, TopologyOptions
from trtx.export import ExportedFile, as_one_text, write_files

if TYPE_CHECKING:
    from trtx.export.outcome import Export

ExportOutput = Annotated[
    Path | None,
    typer.Option(
        "-o",
        "--output",
        help="Directory for the files, new or empty. Default: all of them to standard output.",
        rich_help_panel="Output",
        show_default=False,
    ),
]


DryRun = Annotated[
    bool,
    typer.Option(
        "--dry-run", help="Print what would run where, with what, and why; write nothing.", rich_help_panel="Output"
    ),
]


def topology_group(*names: str) -> OptionGroup:
    """Returns the group of the named options of :class:`TopologyOptions`; the others don't apply to an export."""
    hints = get_type_hints(TopologyOptions, include_extras=True)
    defaults = {field.name: field.default for field in fields(TopologyOptions)}
    members: Mapping[str, tuple[Any, Any]] = {name: (hints[name], defaults[name]) for name in names}
    return OptionGroup(members)


def hand_over_export(made: Export, output: Path | None, *, dry_run: bool) -> None:
    """Prints the findings in the engine configs, then writes, prints or (for a dry run) describes the export."""
    from trtx.cli.export_text import describe_export
    from trtx.config.left_out import left_out_told

    for line in describe_findings(made.findings) if made.findings else ():
        typer.echo(line, err=True)
    if dry_run:
        typer.echo(describe_export(made))
    else:
        for line in left_out_told(made.left_out, made.served.engine):
            tell(f"trtx: {line}")
        hand_over(made.files, output, made.how)


def hand_over(files: Sequence[ExportedFile], output: Path | None, how: str) -> None:
    """Writes ``files`` to ``output`` and prints the next step ``how``, or prints the files if ``output`` is None."""
    if output is None:
        typer.echo(as_one_text(files), nl=False)
        return
    write_files(files, output)
    typer.echo(f"Wrote {', '.join(file.name for file in files)} to {output}.\n{how}")
