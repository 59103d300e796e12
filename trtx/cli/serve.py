"""``trtx serve``: one topology, until it is told to stop."""

from __future__ import annotations

import json
import shlex
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated
from urllib.parse import urlsplit

import typer

from trtx.cli import topology_options as options
from trtx.cli.command import Verb
from trtx.cli.placement import refuse_ignored
from trtx.config import Mode
from trtx.config.hosts import MAX_FRONTENDS, read_hosts
from trtx.errors import UsageError

if TYPE_CHECKING:
    from trtx.launch import ServedTopology
    from trtx.topology import Plan

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)

_REFRESH_S = 0.5


@app.command(
    cls=Verb,
    no_args_is_help=False,
    epilog="Exit codes: 2 usage, config or port in use; 4 launch failed or crash loop; 129, 130 and 143 interrupted.",
)
@options.spread()
def serve(
    context: typer.Context,
    *,
    model: options.ModelOptions,
    mode: Annotated[
        Mode,
        typer.Option(
            "--mode",
            help="agg: every worker does all of a request. disagg: prefill workers run prompts, decode workers go on.",
            rich_help_panel="Topology",
        ),
    ] = "agg",
    topology: options.TopologyOptions,
    frontends: Annotated[
        int,
        typer.Option(
            "--frontends",
            min=1,
            max=MAX_FRONTENDS,
            help="Frontends on --port and the ports after it; one that dies loses its own streams alone.",
            rich_help_panel="Topology",
        ),
    ] = 1,
    hosts: Annotated[
        Path | None,
        typer.Option(
            "--hosts",
            metavar="FILE",
            help="Several machines, in YAML: this one runs its share, the others run trtx serve join.",
            rich_help_panel="Topology",
        ),
    ] = None,
    this_host: Annotated[
        str | None,
        typer.Option(
            "--this-host",
            metavar="NAME",
            help="Which of the hosts this machine is. Default: the one whose address it has.",
            rich_help_panel="Topology",
        ),
    ] = None,
    media: options.MediaOptions,
    output: options.OutputOption = Path("runs"),
    dry_run: Annotated[
        bool,
        typer.Option(
            "--dry-run", help="Print what would be started, and why; start nothing.", rich_help_panel="Output"
        ),
    ] = False,
) -> None:
    """Serve a model: an OpenAI-compatible frontend and its workers.

    Starts all processes, waits until a real request has gone through, watches
    and restarts them, and stops them cleanly on Ctrl-C.

    \b
    Examples:
      trtx serve
      trtx serve --mode disagg --prefill 1 --decode 1
      trtx serve --engine simulated --mode agg --workers 4 --router-mode kv
      trtx serve --mode disagg --gpus 0,1 --model synthetic:qwen3-0.6b
      trtx serve --set kv_cache_config.max_tokens=8192 --dry-run
      trtx serve --frontends 2
      trtx serve --hosts hosts.yaml --mode disagg --dry-run
    """
    refuse_ignored(context, (mode, *options.engine_uses(model.engine), *([] if hosts else ["no hosts"])))
    if hosts is not None:
        there = read_hosts(hosts)
        refuse_ignored(context, ("hosts", *(["roles"] if there.has_roles else [])))
    from trtx.cli.console import ProgressConsole
    from trtx.cli.topology_text import describe_plan
    from trtx.cli.topology_view import open_view
    from trtx.launch import host_named, new_run_directory, prepare, prepare_hosts
    from trtx.launch import serve as serve_plan

    spec = options.build_spec(mode=mode, **asdict(model), **asdict(topology), **media)
    options.check_roles((mode,), model.config, model.overrides, model.recipe, encode=spec.encode)
    run_dir = new_run_directory(output, f"serve-{mode}")
    if hosts is not None:
        whole = prepare_hosts(spec, there, run_dir=run_dir)
        if not dry_run:
            raise UsageError("--hosts without --dry-run is not there yet; add --dry-run")
        typer.echo(describe_plan(whole if this_host is None else whole.share(host_named(whole.hosts, this_host).name)))
        return
    plan = prepare(spec, run_dir=run_dir, frontends=frontends)
    if dry_run:
        typer.echo(describe_plan(plan))
        return
    for warning in plan.warnings:
        ProgressConsole(stderr=True, soft_wrap=True).print(f"trtx: warning: {warning}")
    with open_view(plan) as view, serve_plan(plan, on_event=view.on_event, on_slots=view.on_slots) as served:
        view.show(_ready_text(served))
        while True:
            served.wait(_REFRESH_S)


def _curl(plan: Plan) -> str:
    """How it is asked on this machine: under a name that its certificate is for, wherever that leads elsewhere."""
    if plan.tls is None:
        return f"curl -s {plan.url}"
    here = urlsplit(plan.url).hostname
    names = plan.tls.names or (here,)
    curl = f"curl -s --cacert {shlex.quote(str(plan.tls.certificate))}"
    if here in names:
        return f"{curl} {plan.url}"
    name = str(names[0]).replace("*", "www")
    return f"{curl} --connect-to ::{here}: https://{name}:{plan.port}"


def _ready_text(topology: ServedTopology) -> str:
    body = json.dumps({"model": topology.plan.model, "max_tokens": 32}).removesuffix("}")
    message = json.dumps([{"role": "user", "content": "Hello"}])
    workers = "1 worker" if topology.plan.worker_count == 1 else f"{topology.plan.worker_count} workers"
    return (
        f"Ready: {topology.url} serves {topology.plan.model} ({topology.plan.mode}, {workers}). Try:\n\n"
        f"{_curl(topology.plan)}/v1/chat/completions \\\n"
        "  -H 'Content-Type: application/json' \\\n"
        f"  -d '{body},\n  \"messages\": {message}}}'\n\n"
        f"Logs and plan: {topology.plan.run_dir}. Ctrl-C stops it.\n"
    )
