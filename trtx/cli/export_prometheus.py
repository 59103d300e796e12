"""``trtx export prometheus``: writes Prometheus' configuration and rules for served topologies."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from trtx.cli.command import Verb
from trtx.cli.export import ExportOutput, hand_over
from trtx.errors import UsageError

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)

_Runs = Annotated[
    list[Path] | None,
    typer.Argument(
        metavar="RUN...",
        help="Run directories of trtx serve, or plan.json files. Ports are those of this start.",
        show_default=False,
    ),
]


@app.command(
    cls=Verb, no_args_is_help=True, epilog="Exit codes: 0 files written; 2 usage, or a directory that is no run."
)
def prometheus(
    runs: _Runs = None,
    *,
    kubernetes: Annotated[
        str | None,
        typer.Option(
            "--kubernetes",
            help="In place of RUN: the --name of trtx export kubernetes. Prometheus finds its pods by label.",
            metavar="NAME",
            rich_help_panel="Topology",
            show_default=False,
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
            help="Seconds between two scrapes; rates are taken over 1 minute, so at most 15.",
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
    from trtx.cli.console import warn
    from trtx.export.monitoring.rules import rule_file
    from trtx.export.monitoring.scrape import KubernetesPods, configuration, read_plan

    if kubernetes is None and not runs:
        raise UsageError("RUN is missing; give the run directory of trtx serve, or --kubernetes NAME")
    if kubernetes is not None and runs:
        raise UsageError("RUN and --kubernetes name two topologies; give one of them")
    if kubernetes is not None:
        files = (configuration([KubernetesPods(kubernetes, namespace)], interval), rule_file(has_gpus=True))
    else:
        plans = [read_plan(path) for path in runs or ()]
        if len({plan.namespace for plan in plans}) < len(plans):
            raise UsageError("two of the runs are the same topology; give each topology once")
        has_gpus = any(plan.gpu_count for plan in plans)
        if not has_gpus:
            warn([f"{_topologies(len(plans))} without GPUs, so the rules have no alerts about GPUs"])
        files = (configuration(plans, interval), rule_file(has_gpus=has_gpus))
    hand_over(files, output, "Start it with: prometheus --config.file=prometheus.yml, in that directory")


def _topologies(number: int) -> str:
    return "this topology runs" if number == 1 else f"these {number} topologies run"
