"""``python -m trtx.frontend``: our few flags, then ``dynamo.frontend`` in this process with all others untouched."""

from __future__ import annotations

import argparse
import socket
import sys

from trtx.errors import TrtxError, UsageError
from trtx.frontend.broker import Broker
from trtx.frontend.listener import NodelayListener

WORKERS_ROUTE = "trtx.frontend.workers:routes"  # not imported here: dynamo's own import comes after the broker


def _parse(argv: list[str]) -> tuple[argparse.Namespace, list[str]]:
    parser = argparse.ArgumentParser(
        prog="python -m trtx.frontend",
        description="dynamo.frontend on loopback with TCP_NODELAY; other flags are dynamo.frontend's own.",
        add_help=False,
        allow_abbrev=False,
    )
    parser.add_argument("--http-host", default="127.0.0.1", help="address of the HTTP port (default: %(default)s)")
    parser.add_argument("--http-port", type=int, required=True, help="HTTP port")
    parser.add_argument("--broker-xsub", help="tcp://127.0.0.1:PORT where event publishers connect")
    parser.add_argument("--broker-xpub", help="tcp://127.0.0.1:PORT where event subscribers connect")
    args, rest = parser.parse_known_args(argv)
    if (args.broker_xsub is None) != (args.broker_xpub is None):
        raise UsageError("only one of --broker-xsub and --broker-xpub is given; expected both or neither")
    return args, rest


def address_of(host: str, port: int) -> str:
    """The address that a name stands for, the first, as the launcher holds its port: with TLS, Dynamo 1.4.2 listens on
    no name ("invalid socket address syntax"). Raises UsageError for a name that stands for none."""
    try:
        return str(socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][4][0])
    except socket.gaierror as error:
        raise UsageError(f"--http-host {host!r} is no address of this machine ({error.strerror})") from error


def main(argv: list[str]) -> None:
    """Runs until SIGTERM or SIGINT; dynamo.frontend owns the event loop and the signals."""
    args, rest = _parse(argv)
    if args.broker_xsub is not None:
        Broker(args.broker_xsub, args.broker_xpub).start()
    NodelayListener(args.http_port).start()
    from dynamo.frontend.main import main as dynamo_frontend  # after the broker: workers may connect already

    own = ["--http-host", address_of(args.http_host, args.http_port), "--http-port", str(args.http_port)]
    own += ["--frontend-route-extension", WORKERS_ROUTE]  # further ones in rest stand beside it
    sys.argv = [sys.argv[0], *own, *rest]
    dynamo_frontend()


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except TrtxError as error:
        sys.stderr.write(f"trtx.frontend: {error}\n")
        sys.exit(error.exit_code)
