"""``trtx export grafana``: writes a dashboard for served topologies."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from trtx.cli.command import Verb
from trtx.cli.export import ExportOutput, hand_over

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command(
    cls=Verb, no_args_is_help=False, epilog="Exit codes: 0 file written; 2 usage, or a directory that is not a run."
)
def grafana(
    runs: Annotated[
        list[Path] | None,
        typer.Argument(
            metavar="RUN",
            help="Run directories of trtx serve. If none of them has a GPU, the row about GPUs says so.",
            show_default=False,
        ),
    ] = None,
    *,
    output: ExportOutput = None,
) -> None:
    """Write a Grafana dashboard: traffic, latency, KV, GPUs, handoff, workers.

    It shows every topology that trtx export prometheus makes Prometheus scrape, and
    asks for the data source when it is imported.

    \b
    Examples:
      trtx export grafana -o monitoring
      trtx export grafana runs/20261128T005654Z-serve-disagg-3e94032b -o monitoring
    """
    from trtx.export.monitoring import exported

    hand_over((exported.grafana_file(runs or ()),), output, "Import it in Grafana: Dashboards, New, Import.")
