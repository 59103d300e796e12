"""Reads a NATS server's INFO line, and checks whether it accepts a client's certificate check and login.

With TLS, as in Dynamo, the server's certificate must be signed by an authority that this machine trusts, or that the
file ``SSL_CERT_FILE`` contains.
"""

from __future__ import annotations

import json
import socket
import ssl
import time
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from trtx.config.wording import shown, shown_address
from trtx.errors import UsageError
from trtx.planes.credentials import NatsAuth
from trtx.tls import CA_VARIABLE

_MOST_BYTES = 1 << 20  # per line
_DYNAMOS_OWN = ("user", "user")  # Dynamo 1.6.1's default login


@dataclass(frozen=True, slots=True)
class NatsAnswer:
    """What a NATS server reported.

    ``problem``: why nothing is known. ``refusal``: the server's message if it refuses the login of a Dynamo client.
    ``tls_required``: the server takes TLS only, and was asked without.
    """

    version: str | None = None
    max_payload_bytes: int | None = None
    auth_required: bool = False
    tls_required: bool = False
    refusal: str | None = None
    problem: str | None = None


def check_nats_url(url: str) -> None:
    """Raises UsageError unless ``url`` is ``nats://HOST:PORT`` or ``tls://HOST:PORT``, which Dynamo 1.6.1 accepts."""
    try:
        address = urlsplit(url)
        is_whole = address.scheme in ("nats", "tls") and bool(address.hostname) and address.port is not None
        is_whole = is_whole and not (address.username or address.path or address.query)
    except ValueError:
        is_whole = False
    if not is_whole:
        raise UsageError(
            f"nats is {shown_address(url)}; expected nats://HOST:PORT, or tls://HOST:PORT for TLS, and nothing else in "
            "it; credentials are files of nats_auth"
        )


def ask_nats(url: str, auth: NatsAuth | None = None, *, timeout_s: float = 2.0) -> NatsAnswer:
    """Connects and logs in as Dynamo does, subscribes to nothing, and disconnects.

    Raises UsageError for an invalid address, or an ``auth`` whose files can't be read.
    """
    check_nats_url(url)
    login = _login(auth)
    address, deadline = urlsplit(url), time.monotonic() + timeout_s
    try:
        with socket.create_connection((address.hostname or "", address.port or 0), timeout=timeout_s) as connection:
            word, _, rest = _line(connection, deadline).partition(b" ")
            info = json.loads(rest) if word == b"INFO" else None
            if not isinstance(info, dict):
                return NatsAnswer(problem="the server there is not a NATS server")
            if address.scheme == "tls":
                if not (info.get("tls_required") or info.get("tls_available")):
                    return NatsAnswer(problem="the server there speaks no TLS; write nats:// for it")
                with ssl.create_default_context().wrap_socket(connection, server_hostname=address.hostname) as secured:
                    refusal = _knock(secured, login, deadline)
            else:
                refusal = None if info.get("tls_required") else _knock(connection, login, deadline)
    except ssl.SSLCertVerificationError as error:
        return NatsAnswer(
            problem=f"its certificate is not trusted: {error.verify_message}; set {CA_VARIABLE} to its authority's file"
        )
    except (OSError, ValueError) as error:
        reason = (
            "no answer in time" if isinstance(error, TimeoutError) else getattr(error, "strerror", None) or str(error)
        )
        return NatsAnswer(problem=reason)
    payload = info.get("max_payload")
    return NatsAnswer(
        version=str(info["version"]) if "version" in info else None,
        max_payload_bytes=payload if isinstance(payload, int) else None,
        auth_required=info.get("auth_required") is True,
        tls_required=info.get("tls_required") is True and address.scheme != "tls",
        refusal=refusal,
    )


def _login(auth: NatsAuth | None) -> dict[str, Any]:
    if auth is None:
        return {"user": _DYNAMOS_OWN[0], "pass": _DYNAMOS_OWN[1]}
    secrets = auth.environment()
    if "NATS_AUTH_TOKEN" in secrets:
        return {"auth_token": secrets["NATS_AUTH_TOKEN"]}
    return {"user": secrets["NATS_AUTH_USERNAME"], "pass": secrets["NATS_AUTH_PASSWORD"]}


def _knock(connection: socket.socket, login: dict[str, Any], deadline: float) -> str | None:
    """Logs in and sends a ping. Returns None if the server answers it, else the server's error message."""
    hello = {"verbose": False, "pedantic": False, "tls_required": False, "lang": "python", "version": "0", **login}
    connection.sendall(f"CONNECT {json.dumps(hello)}\r\nPING\r\n".encode())
    while (line := _line(connection, deadline)) != b"PONG":
        if line.startswith(b"-ERR"):
            return shown(line[4:].decode(errors="replace").strip(" '"))
    return None


def _line(connection: socket.socket, deadline: float) -> bytes:
    """One line without its end. Raises OSError, TimeoutError; ValueError if it has no end."""
    line = bytearray()
    while not line.endswith(b"\r\n"):
        if (left := deadline - time.monotonic()) <= 0:
            raise TimeoutError
        connection.settimeout(left)
        # Byte by byte, because the bytes after the line belong to the next one; a line has a few hundred.
        if not (byte := connection.recv(1)):
            raise ValueError("it closed the connection")
        line += byte
        if len(line) > _MOST_BYTES:
            raise ValueError("the server there is not a NATS server")
    return bytes(line[:-2])
