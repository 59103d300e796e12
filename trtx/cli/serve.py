"""``trtx serve``: serves one topology until it is stopped."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from trtx.cli import topology_options as options
from trtx.cli.command import Verb, optional
from trtx.cli.placement import refuse_ignored
from trtx.config import Mode
from trtx.config.hosts import MAX_FRONTENDS, read_hosts

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


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
            help="agg: each worker serves whole requests. disagg: prefill workers compute prompts, decode workers the "
            "other tokens.",
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
            help="Frontends, on --port and the ports after it. A frontend that dies loses only its own streams.",
            rich_help_panel="Topology",
        ),
    ] = 1,
    hosts: Annotated[
        Path | None,
        optional(
            "Topology",
            "--hosts",
            "Serve over the hosts in this YAML file: this host runs its share, the others run trtx serve join.",
            metavar="FILE",
        ),
    ] = None,
    this_host: Annotated[
        str | None,
        optional(
            "Topology",
            "--this-host",
            "Name of this host in the file. Default: the host with an address of this machine.",
            metavar="NAME",
        ),
    ] = None,
    media: options.MediaOptions,
    output: options.OutputOption = Path("runs"),
    dry_run: Annotated[
        bool,
        typer.Option("--dry-run", help="Print the plan and its reasons; start nothing.", rich_help_panel="Output"),
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
    there = None if hosts is None else read_hosts(hosts)
    if there is not None:  # check these uses first: their messages name the hosts file
        refuse_ignored(context, ("hosts", *(["roles"] if there.has_roles else [])))
    refuse_ignored(context, (mode, *options.engine_uses(model.engine), *(["no hosts"] if there is None else [])))
    from trtx.cli.serving import run_plan, serve_hosts, warn_of
    from trtx.cli.topology_text import describe_plan
    from trtx.launch import new_run_directory, prepare

    spec = options.build_spec(mode=mode, **asdict(model), **topology, **media)
    options.check_roles((mode,), model.config, model.overrides, model.recipe, encode=spec.encoders)
    run_dir = new_run_directory(output, f"serve-{mode}")
    if there is not None:
        serve_hosts(spec, there, this_host=this_host, run_dir=run_dir, dry_run=dry_run)
        return
    plan = prepare(spec, run_dir=run_dir, frontends=frontends)
    if dry_run:
        typer.echo(describe_plan(plan))
        return
    warn_of(plan)
    run_plan(plan)
