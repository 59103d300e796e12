"""``trtx export nginx``: writes the configuration of an nginx gateway in front of a topology's frontends."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from trtx.cli import topology_options as options
from trtx.cli.command import Verb, optional, typed
from trtx.cli.export import ExportOutput, hand_over, topology_group
from trtx.cli.placement import refuse_ignored
from trtx.config import TopologySpec
from trtx.config.hosts import MAX_FRONTENDS, read_hosts

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)

_FRONTENDS, _NGINX = "Frontends", "nginx"
_OF_SERVE = ("frontends", "hosts", "host", "port", "max_media_bytes", "tls_cert", "tls_key")


@app.command(
    cls=Verb, no_args_is_help=False, epilog="Exit codes: 0 file written; 2 usage, or files that nginx can't use."
)
@options.spread()
def nginx(
    context: typer.Context,
    *,
    frontends: Annotated[
        int,
        optional(_FRONTENDS, "--frontends", "As for trtx serve. Default: 1.", min=1, max=MAX_FRONTENDS),
    ] = 1,
    hosts: Annotated[
        Path | None, optional(_FRONTENDS, "--hosts", "As for trtx serve: the frontends of all hosts.", metavar="FILE")
    ] = None,
    topology: Annotated[Mapping[str, Any], topology_group("host", "port", "tls_cert", "tls_key")],
    max_media_bytes: Annotated[
        int | None,
        optional(_FRONTENDS, "--max-media-bytes", "As for trtx serve; it sets the largest body of a request."),
    ] = None,
    listen: Annotated[
        str,
        typer.Option(
            "--listen",
            help="Address and port of nginx; 0.0.0.0:8443 opens it to the network.",
            metavar="ADDRESS:PORT",
            rich_help_panel=_NGINX,
        ),
    ] = "127.0.0.1:8080",
    listen_cert: Annotated[
        Path | None,
        optional(_NGINX, "--listen-cert", "Certificate of nginx (PEM). Default: that of the frontends, if any."),
    ] = None,
    listen_key: Annotated[
        Path | None, optional(_NGINX, "--listen-key", "Private key of --listen-cert (PEM), without a passphrase.")
    ] = None,
    api_keys: Annotated[
        Path | None,
        optional(
            _NGINX,
            "--api-keys",
            'File with API keys on the machine of nginx, one line each: "Bearer KEY" HOLDER; (trtx does not read it).',
        ),
    ] = None,
    rate_limit: Annotated[
        float | None,
        optional(_NGINX, "--rate-limit", "POSTs a second of all clients together; more get a 429.", metavar="RATE"),
    ] = None,
    rate_limit_per_key: Annotated[
        float | None,
        optional(_NGINX, "--rate-limit-per-key", "POSTs a second of each key of --api-keys.", metavar="RATE"),
    ] = None,
    rate_burst: Annotated[
        int | None,
        optional(
            _NGINX,
            "--rate-burst",
            "POSTs above a rate that may come at once. Default: one second's.",
            metavar="N",
            min=1,
        ),
    ] = None,
    output: ExportOutput = None,
) -> None:
    """Write nginx's configuration for the frontends of a topology.

    nginx spreads requests over the frontends, retries requests without an answer
    on another frontend, streams without buffering, and can require an API key
    and limit the rate of requests.

    \b
    Examples:
      trtx export nginx --frontends 2 -o gateway
      trtx export nginx --hosts hosts.yaml --listen 0.0.0.0:8443 \\
        --listen-cert cert.pem --listen-key key.pem --api-keys keys.map
    """
    refuse_ignored(context, ["hosts"] if hosts is not None else [])
    from trtx.cli.console import warn
    from trtx.export import nginx as gateways
    from trtx.launch import check_certificate
    from trtx.topology import body_mib

    media = {} if max_media_bytes is None else {"max_media_bytes": max_media_bytes}
    spec: TopologySpec = options.build_spec(mode="agg", **topology, **media)
    there = None if hosts is None else read_hosts(hosts)
    shared = check_certificate(spec.tls_cert, spec.tls_key)
    own = check_certificate(listen_cert, listen_key, options=("--listen-cert", "--listen-key")) or shared
    gateway = gateways.Gateway(
        listen=gateways.parse_listen(listen),
        frontends=gateways.frontends_of(spec, frontends, there),
        body_mib=body_mib(spec.media),
        tls=None if own is None else own.tls,
        frontend_tls=None if shared is None else shared.tls,
        api_keys=None if api_keys is None else api_keys.expanduser().absolute(),
        rates=gateways.RateLimits(rate_limit, rate_limit_per_key, rate_burst),
    )
    file = gateways.export(gateway, started_by=_started_by(context))
    told = dict.fromkeys(warning for one in (shared, own) if one is not None for warning in one.warnings)
    warn((*told, *gateways.warnings_of(gateway)))
    hand_over((file,), output, "Put it into /etc/nginx/conf.d, then: nginx -t && nginx -s reload")


def _started_by(context: typer.Context) -> str:
    """Returns the ``trtx serve`` command with the options that it must share with the gateway."""
    words = ["trtx", "serve"]
    for parameter in typed(context):
        if str(parameter.name) in _OF_SERVE:
            words += [max(parameter.opts, key=len), str(context.params[str(parameter.name)])]
    return shlex.join(words)
