"""The address of an OpenTelemetry collector."""

from __future__ import annotations

from urllib.parse import urlsplit

from trtx.config.wording import quoted

_PORT = 4318  # OTLP over HTTP; gRPC has 4317


def collector_url(value: str | None) -> str | None:
    """Checks the base URL of a collector. Raises ValueError, which names the value and what was expected."""
    if value is None:
        return None
    expected = f"expected a URL such as http://127.0.0.1:{_PORT}"
    try:
        parts = urlsplit(value)
        port = parts.port
    except ValueError as error:
        raise ValueError(f"otlp_endpoint {quoted(value)} is no URL ({error}); {expected}") from error
    if parts.scheme not in ("http", "https") or not parts.hostname or port == 0:
        raise ValueError(f"otlp_endpoint {quoted(value)} is not an address over HTTP; {expected}")
    if parts.username is not None or parts.password is not None:
        raise ValueError("otlp_endpoint has a user or a password, which logs would show; leave them out")
    if parts.query or parts.fragment:
        raise ValueError(f"otlp_endpoint {quoted(value)} has a query or a fragment; leave it out")
    if not value.isascii() or not value.isprintable() or " " in value:
        raise ValueError(f"otlp_endpoint {quoted(value)} has characters that no URL has; {expected}")
    return value


def signal_url(base: str, signal: str) -> str:
    """The URL that takes one signal, ``traces`` or ``logs``. ``base`` may be that of the traces already."""
    return f"{base.rstrip('/').removesuffix('/v1/traces')}/v1/{signal}"
