"""``trtx serve join``: runs this host's share of a topology that another host has planned."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from trtx.cli import topology_options as options
from trtx.cli.command import Verb
from trtx.cli.placement import refuse_ignored
from trtx.config.hosts import parse_auth

if TYPE_CHECKING:
    from trtx.topology import Credentials

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)

_LEASE_TTL_S = 120  # the lease of an etcd client that registers nothing


@app.command(
    cls=Verb,
    no_args_is_help=False,
    epilog="Exit codes: as trtx serve; also 2 if model files or versions differ from those of the planning host.",
)
def join(
    context: typer.Context,
    *,
    etcd: Annotated[
        list[str],
        typer.Option("--etcd", metavar="URL", help="Endpoint of the etcd that has the topology's plan. Repeatable."),
    ],
    name: Annotated[str, typer.Option("--name", metavar="NAME", help="Name of the topology in its hosts file.")],
    this_host: Annotated[
        str | None,
        typer.Option(
            "--this-host",
            metavar="NAME",
            help="Name of this host in the hosts file. Default: the host with an address of this machine.",
        ),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(
            "--model", help="Directory of the same model on this host. Default: the path on the planning host."
        ),
    ] = None,
    etcd_auth: Annotated[
        str | None,
        typer.Option(
            "--etcd-auth",
            metavar="FILES",
            help="ca=FILE,certificate=FILE,key=FILE or username=NAME,password_file=FILE. Default: none.",
        ),
    ] = None,
    nats_auth: Annotated[
        str | None,
        typer.Option(
            "--nats-auth",
            metavar="FILES",
            help="username=NAME,password_file=FILE or token_file=FILE. Default: none.",
        ),
    ] = None,
    output: options.OutputOption = Path("runs"),
) -> None:
    """Run this host's share of a topology that trtx serve --hosts planned.

    Reads the published plan from etcd, starts this host's processes, and prints "Ready" when
    all hosts are ready. Ctrl-C ends the processes of this host only.

    \b
    Examples:
      trtx serve join --etcd http://10.77.0.1:2379 --name qwen3
      trtx serve join --etcd http://10.77.0.1:2379 --name qwen3 --this-host node2
    """
    refuse_ignored(context, ())
    from trtx.cli.serving import run_plan, warn_of_planes
    from trtx.launch import join_share, new_run_directory, publishing, take_place
    from trtx.topology import EtcdService

    share, whole, published = join_share(
        EtcdService(tuple(etcd), _LEASE_TTL_S, _files("--etcd-auth", etcd_auth)),
        name,
        this_host=this_host,
        model=model,
        nats_files=_files("--nats-auth", nats_auth),
        run_dir=new_run_directory(output, "serve-join"),
    )
    take_place(share)
    warn_of_planes(share, share)
    with publishing(whole, published, share.this_host) as presence:
        run_plan(share, whole, presence)


def _files(option: str, text: str | None) -> Credentials | None:
    from trtx.topology import Credentials

    return None if text is None else Credentials(**parse_auth(option, text, Path.cwd()).model_dump())
