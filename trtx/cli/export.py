"""The shared parts of ``trtx export kubernetes``, ``slurm`` and ``nginx``: output, and options of ``trtx serve``.

Each of these verbs has its own module, ``export_<target>.py``.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from trtx.cli.command import optional
from trtx.cli.field_options import OptionGroup
from trtx.cli.findings_text import describe_findings
from trtx.cli.sentences import tell
from trtx.cli.topology_options import TOPOLOGY_FIELDS
from trtx.config import Mode, TopologySpec
from trtx.config.option_field import record_of
from trtx.config.topology import TopologyField
from trtx.export import ExportedFile, as_one_text, write_files

if TYPE_CHECKING:
    from trtx.export.outcome import Export

ExportOutput = Annotated[
    Path | None,
    typer.Option(
        "-o",
        "--output",
        help="New or empty directory for the files. Default: print them on stdout.",
        rich_help_panel="Output",
        show_default=False,
    ),
]
NODES = "Nodes"
ExportMode = Annotated[
    Mode,
    typer.Option("--mode", help="As for trtx serve: agg or disagg.", rich_help_panel="Topology"),
]
GpusPerNode = Annotated[
    int | None,
    optional(NODES, "--gpus-per-node", "GPUs of each node; larger workers span nodes. 0: no GPUs. Default: 8."),
]
DryRun = Annotated[
    bool,
    typer.Option("--dry-run", help="Print the plan and its reasons; write nothing.", rich_help_panel="Output"),
]


def topology_group(*names: str) -> OptionGroup:
    """Returns the group of these topology options of ``trtx serve``."""
    return OptionGroup(TopologySpec, names)


def options_of_cluster(*more: str) -> OptionGroup:
    """Returns the group of all topology options that don't describe this machine, and of ``more``.

    ``--port`` is not among them, because the ports of a pod are fixed.
    """
    records = {name: record_of(TopologySpec.model_fields[name]) for name in TOPOLOGY_FIELDS}
    own = [name for name, record in records.items() if isinstance(record, TopologyField) and record.of_machine]
    return topology_group(*(name for name in TOPOLOGY_FIELDS if name in more or name not in (*own, "port")))


def hand_over_export(made: Export, output: Path | None, *, dry_run: bool) -> None:
    """Prints the findings in the engine configs, then writes, prints or (for a dry run) describes the export."""
    from trtx.cli.export_text import describe_export
    from trtx.config.left_out import left_out_messages

    for line in describe_findings(made.findings) if made.findings else ():
        typer.echo(line, err=True)
    if dry_run:
        typer.echo(describe_export(made))
    else:
        for line in left_out_messages(made.left_out, made.served.engine):
            tell(f"trtx: {line}")
        hand_over(made.files, output, made.how)


def hand_over(files: Sequence[ExportedFile], output: Path | None, how: str) -> None:
    """Writes ``files`` to ``output`` and prints the next step ``how``, or prints the files if ``output`` is None."""
    if output is None:
        typer.echo(as_one_text(files), nl=False)
        return
    write_files(files, output)
    typer.echo(f"Wrote {', '.join(file.name for file in files)} to {output}.\n{how}")
