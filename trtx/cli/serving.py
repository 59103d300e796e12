"""Runs a planned topology for ``trtx serve``: the processes of one machine, or this host's share."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from urllib.parse import urlsplit

import typer

from trtx.cli.console import warn
from trtx.cli.hosts_text import exposure
from trtx.cli.sentences import tell
from trtx.cli.topology_text import describe_plan
from trtx.cli.topology_view import View, open_view
from trtx.config import TopologySpec
from trtx.config.hosts import HostsSpec
from trtx.config.left_out import left_out_notes
from trtx.launch import (
    Published,
    ServedTopology,
    SharePresence,
    check_planes,
    host_here,
    host_named,
    name_of,
    prepare_hosts,
    publishing,
    serve,
    settle_share,
    take_place,
)
from trtx.topology import Plan

_REFRESH_S = 0.5


def run_plan(plan: Plan, whole: Plan | None = None, presence: SharePresence | None = None) -> None:
    """Serves ``plan`` until it is stopped.

    ``whole``, ``presence``: set if ``plan`` is one host's share of the plan ``whole``.
    """
    with (
        open_view(plan) as view,
        serve(plan, whole=whole, presence=presence, on_event=view.on_event, on_slots=view.on_slots) as served,
    ):
        _show_until_the_end(served, view)


def serve_hosts(spec: TopologySpec, hosts: HostsSpec, *, this_host: str | None, run_dir: Path, dry_run: bool) -> None:
    """Plans all hosts and serves this host's share. ``this_host``: the value of ``--this-host``."""
    plan, asked = prepare_hosts(spec, hosts, run_dir=run_dir)
    if dry_run:
        typer.echo(describe_plan(plan if this_host is None else plan.share(host_named(plan.hosts, this_host).name)))
        return
    host = host_here(plan.hosts, this_host)
    share = settle_share(plan, host, model_path=plan.model_path, run_dir=run_dir)
    take_place(share)  # refuses problems of this host before the topology is published
    warn_of_planes(plan, share)
    with publishing(plan, Published.of(asked, plan.model_path), host) as presence:
        others = [one.name for one in plan.hosts if one.name != host]
        if others:
            typer.echo(f"On {' and '.join(others)}: {_join_command(plan)}")
        run_plan(share, plan, presence)


def warn_of_planes(plan: Plan, share: Plan) -> None:
    """Warns about problems of etcd and NATS, and prints the warnings of :func:`warn_of` for this host's ``share``.

    Raises LaunchError if etcd or NATS can't be used.
    """
    warn((*check_planes(plan), exposure(plan)))
    warn_of(share)


def warn_of(plan: Plan) -> None:
    """Prints the warnings of a plan before it starts, and the config fields that its engine does not act on."""
    warn(plan.all_warnings)
    for note in left_out_notes(plan.left_out, plan.engine):
        tell(f"trtx: {note}")


def _join_command(plan: Plan) -> str:
    assert plan.etcd is not None
    words = ["trtx", "serve", "join"]
    for endpoint in plan.etcd.endpoints:
        words += ["--etcd", endpoint]
    words += ["--name", name_of(plan)]
    if plan.etcd.credentials is not None:
        words += ["--etcd-auth", "..."]
    if plan.nats is not None and plan.nats.credentials is not None:
        words += ["--nats-auth", "..."]
    return shlex.join(words)


def _show_until_the_end(served: ServedTopology, view: View) -> None:
    view.show(_ready_text(served))
    while True:
        served.wait(_REFRESH_S)


def _curl(plan: Plan) -> str:
    """Returns the curl command for a request from this machine.

    It uses a name in the server's certificate and connects to this machine even if the name resolves elsewhere.
    """
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
    plan, whole = topology.plan, topology.whole
    body = json.dumps({"model": plan.model, "max_tokens": 32}).removesuffix("}")
    message = json.dumps([{"role": "user", "content": "Hello"}])
    workers = "1 worker" if whole.worker_count == 1 else f"{whole.worker_count} workers"
    if len(whole.hosts) > 1:
        workers += f" on {len(whole.hosts)} hosts"
    return (
        f"Ready: {', '.join(whole.urls)} serves {plan.model} ({plan.mode}, {workers}). Try:\n\n"
        f"{_curl(plan)}/v1/chat/completions \\\n"
        "  -H 'Content-Type: application/json' \\\n"
        f"  -d '{body},\n  \"messages\": {message}}}'\n\n"
        f"Logs and plan: {plan.run_dir}. Ctrl-C stops it{' here' if plan.this_host else ''}.\n"
    )
