"""``python -m trtx.frontend``: reads trtx's own flags and runs ``dynamo.frontend`` with the others."""

from __future__ import annotations

import argparse
import os
import socket
import sys
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING

from trtx.errors import TrtxError, UsageError
from trtx.frontend.admission import Bounds
from trtx.frontend.broker import Broker
from trtx.frontend.listener import NodelayListener
from trtx.frontend.sleeping_workers import why_unavailable
from trtx.prompts.same import difference
from trtx.text import torch_hidden

if TYPE_CHECKING:
    from trtx.planes.registry import Registry
    from trtx.prompts.rendering import PromptMaker

WORKERS_ROUTE = "trtx.frontend.workers:routes"  # a name, because dynamo must be imported after the broker has started
_CONDITIONAL_DISAGG = "--router-conditional-disagg"
_DYNAMOS_BODY_LIMIT_MB = "45"
_OVERLOADED = 529


def _parse(argv: list[str]) -> tuple[argparse.Namespace, list[str]]:
    parser = argparse.ArgumentParser(
        prog="python -m trtx.frontend",
        description="Runs dynamo.frontend on loopback with TCP_NODELAY; all other flags are passed on to it.",
        add_help=False,
        allow_abbrev=False,
    )
    parser.add_argument("--http-host", default="127.0.0.1", help="address of the HTTP port (default: %(default)s)")
    parser.add_argument("--http-port", type=int, required=True, help="HTTP port")
    parser.add_argument(
        "--prompts-of",
        type=Path,
        help="model directory; transformers renders its prompts if Dynamo may render them differently",
    )
    parser.add_argument("--prompts-template", type=Path, help="file with the chat template that replaces the model's")
    parser.add_argument("--parser-of-calls", help="the tool call parser that the workers register")
    parser.add_argument("--max-queued-requests", type=int, help="requests that may wait, over all frontends")
    parser.add_argument("--max-queue-s", type=float, help="seconds that a request may wait")
    parser.add_argument("--max-request-s", type=float, help="seconds that a request may take")
    parser.add_argument("--frontends", type=int, default=1, help="frontends that share the bounds")
    parser.add_argument("--sleeps-in", type=Path, help="run directory of workers that can sleep")
    parser.add_argument("--broker-xsub", help="tcp://127.0.0.1:PORT where event publishers connect")
    parser.add_argument("--broker-xpub", help="tcp://127.0.0.1:PORT where event subscribers connect")
    args, rest = parser.parse_known_args(argv)
    if (args.broker_xsub is None) != (args.broker_xpub is None):
        raise UsageError("only one of --broker-xsub and --broker-xpub is given; expected both or neither")
    return args, rest


def address_of(host: str, port: int) -> str:
    """The first address that ``host`` resolves to; the launcher reserves the port on the same one.

    With TLS, Dynamo 1.6.1 can't listen on a host name ("invalid IP address syntax"). Raises UsageError if ``host``
    can't be resolved.
    """
    try:
        return str(socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][4][0])
    except socket.gaierror as error:
        raise UsageError(
            f"--http-host {host!r} can't be resolved ({error.strerror}); give an address of this machine"
        ) from error


def start_proxy(
    maker: PromptMaker | None,
    address: tuple[str, int],
    flags: list[str],
    bounds: Bounds,
    *,
    reads_calls: bool,
    sleeps_in: Path | None,
) -> tuple[list[str], int]:
    """Starts the HTTP proxy on ``address`` with ``bounds``. Raises UsageError.

    ``maker``: renders the prompts; None: Dynamo does. ``reads_calls``: workers register a tool call parser.
    ``sleeps_in``: run directory of workers that can sleep.

    Returns Dynamo's flags and its port on loopback. The flags are ``flags`` without those for TLS, because the proxy
    terminates TLS.
    """
    from trtx.frontend.cut_tool_calls import with_calls
    from trtx.frontend.http_proxy import HttpProxy, server_tls
    from trtx.frontend.rewriting import PATHS, rewrite

    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--tls-cert-path")
    parser.add_argument("--tls-key-path")
    tls, others = parser.parse_known_args(flags)
    inner = _reserved_port()
    try:
        HttpProxy(
            address,
            inner,
            None if maker is None else partial(rewrite, maker),
            paths=frozenset(() if maker is None else PATHS),
            body_limit=int(os.environ.get("DYN_HTTP_BODY_LIMIT_MB", _DYNAMOS_BODY_LIMIT_MB)) << 20,
            tls=server_tls(tls.tls_cert_path, tls.tls_key_path) if tls.tls_cert_path else None,
            read_calls=with_calls if reads_calls and maker is not None else None,
            bounds=bounds,
            read_slots=_slots,
            overload_status=_overload_status(),
            namespace=os.environ.get("DYN_NAMESPACE", ""),
            why_unavailable=(lambda: None) if sleeps_in is None else partial(why_unavailable, sleeps_in),
            lacks_worker=_lacks_worker,
            drops_bypass_events=_CONDITIONAL_DISAGG in flags,
        ).start()
    except OSError as error:
        raise UsageError(
            f"the HTTP port {address[0]}:{address[1]} can't be opened ({error}); give another port"
        ) from error
    return others, inner


def _slots() -> int:
    from trtx.frontend.discovery import worker_slots

    registry = _registry()
    return 0 if registry is None else worker_slots(registry)


def _lacks_worker() -> bool:
    from trtx.frontend.discovery import lacks_generator

    registry = _registry()
    return registry is not None and lacks_generator(registry)


def _context() -> int:
    from trtx.frontend.discovery import worker_context

    registry = _registry()
    try:
        return 0 if registry is None else worker_context(registry)
    except OSError:  # discovery can't be read now: a worker refuses the prompt
        return 0


@cache
def _registry() -> Registry | None:
    from trtx.frontend.discovery import registry_of_environment

    return registry_of_environment(os.environ)


def _overload_status() -> int:
    """The HTTP status for overload, as in Dynamo: DYN_HTTP_OVERLOAD_STATUS_CODE, else 529."""
    given = os.environ.get("DYN_HTTP_OVERLOAD_STATUS_CODE", "").strip()
    return int(given) if given.isdecimal() and 400 <= int(given) <= 599 else _OVERLOADED


def _maker(model: Path, template: str | None) -> PromptMaker:
    from trtx.prompts.rendering import PromptMaker

    with torch_hidden():
        import transformers  # noqa: F401
    return PromptMaker(model, template, _context)


_RESERVED: list[socket.socket] = []
"""Sockets that stay bound until this process ends."""


def _reserved_port() -> int:
    """Reserves a port on loopback, which Dynamo opens seconds later.

    A bound socket that never listens holds the port: the kernel assigns it to no other process, and Dynamo's own socket
    may still listen there, because both have SO_REUSEADDR.
    """
    bound = socket.socket()
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    bound.bind(("127.0.0.1", 0))
    _RESERVED.append(bound)
    return int(bound.getsockname()[1])


def main(argv: list[str]) -> None:
    """Runs until SIGTERM or SIGINT. dynamo.frontend owns the event loop and handles the signals."""
    args, rest = _parse(argv)
    if args.broker_xsub is not None:
        Broker(args.broker_xsub, args.broker_xpub).start()
    host, port = address_of(args.http_host, args.http_port), args.http_port
    template = None if args.prompts_template is None else args.prompts_template.read_bytes().decode()
    differs = args.prompts_of is not None and difference(args.prompts_of, template) is not None
    bounds = Bounds(
        max_queued_requests=args.max_queued_requests,
        max_queue_s=args.max_queue_s,
        max_request_s=args.max_request_s,
        frontends=args.frontends,
    )
    if differs or bounds.has_any or args.sleeps_in is not None or _CONDITIONAL_DISAGG in rest:
        maker = _maker(args.prompts_of, template) if differs else None
        rest, port = start_proxy(
            maker, (host, port), rest, bounds, reads_calls=args.parser_of_calls is not None, sleeps_in=args.sleeps_in
        )
        host = "127.0.0.1"
    NodelayListener(port).start()
    from dynamo.frontend.main import (
        main as dynamo_frontend,
    )  # the import takes seconds; workers may connect to the broker in the meantime

    own = ["--http-host", host, "--http-port", str(port)]
    own += ["--frontend-route-extension", WORKERS_ROUTE]  # ``rest`` may name further extensions
    sys.argv = [sys.argv[0], *own, *rest]
    dynamo_frontend()


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except TrtxError as error:
        sys.stderr.write(f"trtx.frontend: {error}\n")
        sys.exit(error.exit_code)
