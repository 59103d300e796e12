"""Whether an OpenTelemetry collector answers, before processes send it traces."""

from __future__ import annotations

import os
import socket
from urllib.parse import urlsplit

_TIMEOUT_S = 1.0
_PORTS = {"http": 80, "https": 443}


def collector_warnings(endpoint: str | None) -> tuple[str, ...]:
    """One warning if nothing accepts a connection at the endpoint; the topology serves all the same."""
    if endpoint is None:
        return ()
    parts = urlsplit(endpoint)
    try:
        socket.create_connection((parts.hostname, parts.port or _PORTS[parts.scheme]), _TIMEOUT_S).close()
    except OSError as error:
        why = os.strerror(error.errno) if error.errno else str(error)
        return (f"--otlp-endpoint {endpoint} does not answer ({why}); traces are lost until it does",)
    return ()
