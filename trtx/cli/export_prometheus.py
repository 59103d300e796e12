"""``trtx export prometheus``: writes Prometheus' configuration and rules for served topologies."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from trtx.cli.command import Verb, optional
from trtx.cli.export import ExportOutput, hand_over
from trtx.cli.placement import refuse_ignored

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)

_Runs = Annotated[
    list[Path] | None,
    typer.Argument(
        metavar="RUN",
        help="Run directories of trtx serve, or plan.json files. A new start has other ports.",
        show_default=False,
    ),
]


@app.command(
    cls=Verb, no_args_is_help=True, epilog="Exit codes: 0 files written; 2 usage, or a directory that is not a run."
)
def prometheus(
    context: typer.Context,
    runs: _Runs = None,
    *,
    kubernetes: Annotated[
        str | None,
        optional(
            "Topology",
            "--kubernetes",
            "In place of RUN: the --name of trtx export kubernetes. Prometheus finds its pods by label.",
            metavar="NAME",
        ),
    ] = None,
    namespace: Annotated[
        str,
        typer.Option("--namespace", help="Namespace of these pods.", rich_help_panel="Topology"),
    ] = "default",
    interval: Annotated[
        int,
        typer.Option(
            "--interval",
            help="Seconds between two scrapes, 1 to 15. The rules take rates over 1 minute.",
            min=1,
            max=15,
            rich_help_panel="Prometheus",
        ),
    ] = 5,
    output: ExportOutput = None,
) -> None:
    """Write Prometheus' scrape file and rules for running topologies.

    It scrapes the frontends and the metrics port of each worker. The rules record
    latencies, throughput and KV use, and raise alerts.

    \b
    Examples:
      trtx export prometheus runs/20261128T005654Z-serve-disagg-3e94032b -o monitoring
      prometheus --config.file=monitoring/prometheus.yml
      trtx export prometheus --kubernetes trtx --namespace inference -o monitoring
    """
    refuse_ignored(context, [*(["runs"] if runs else []), *(["kubernetes"] if kubernetes is not None else [])])
    from trtx.cli.console import warn
    from trtx.export.monitoring import exported
    from trtx.export.monitoring.scrape import KubernetesPods

    pods = None if kubernetes is None else KubernetesPods(kubernetes, namespace)
    made = exported.prometheus_files(runs or (), pods, interval)
    warn(made.notes)
    hand_over(made.files, output, "Start it with: prometheus --config.file=prometheus.yml, in that directory")
