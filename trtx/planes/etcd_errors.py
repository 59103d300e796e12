"""Errors of the etcd client: what etcd refused and why, and why an endpoint can't be reached."""

from __future__ import annotations

import contextlib
import json
import ssl

from trtx.config.wording import shown
from trtx.errors import LaunchError

INVALID, NOT_FOUND, FORBIDDEN, UNAVAILABLE, UNAUTHENTICATED = 3, 5, 7, 14, 16  # gRPC's status codes


class EtcdError(LaunchError):
    """etcd refused the request; the text contains etcd's own message."""


class EtcdUnreachable(EtcdError):
    """No endpoint answered in time."""


class EtcdRefusal(EtcdError):
    """An error response with gRPC's status code; 0 if it has none."""

    def __init__(self, told: str, code: int, message: str) -> None:
        super().__init__(told)
        self.code = code
        self.message = message


def refusal_of(where: str, path: str, status: int, body: bytes) -> EtcdRefusal:
    """The error for a response with another status than 200. ``where``: the endpoint; ``path``: of the request."""
    text = " ".join(body.decode(errors="replace").split())
    code, message = 0, text
    with contextlib.suppress(ValueError, TypeError, AttributeError):
        document = json.loads(body)
        code, message = int(document.get("code", 0)), str(document.get("message") or document.get("error") or text)
    message = shown(message, 200) or "an empty answer"
    told = f"etcd at {where} refuses {path}: {message}"
    if status == 404 and not code:
        told = (
            f"etcd at {where} has no HTTP gateway ({path} is 404); expected one of 3.4 or newer, without "
            "--enable-grpc-gateway=false"
        )
    elif code == UNAUTHENTICATED or (code == INVALID and ("user" in message or "auth" in message)):
        told = f"etcd at {where} rejects the credentials ({message}); set etcd_auth to a user that it knows"
    elif code == FORBIDDEN:
        told = f"etcd at {where} does not let this user use {path} ({message}); give it a role with v1/ and trtx/"
    return EtcdRefusal(told, code, message)


def unreachable_because(error: Exception) -> str:
    """Returns why a connection to an endpoint failed, with a remedy if it is known."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"its certificate is not trusted: {error.verify_message}"
    if isinstance(error, TimeoutError):
        return "no answer in time"
    if isinstance(error, ssl.SSLEOFError):
        return "it ended the TLS handshake: it may not accept the certificate of etcd_auth, or not use TLS"
    if isinstance(error, ssl.SSLError) and "ALERT" in (error.reason or ""):
        alert = str(error.reason).rpartition("ALERT_")[2].lower().replace("_", " ")
        return f"it does not accept the certificate of etcd_auth: {alert}"
    if isinstance(error, ssl.SSLError) and error.reason in ("WRONG_VERSION_NUMBER", "HTTP_REQUEST"):
        return "it does not use TLS: its address may have to begin with http:"
    if isinstance(error, ConnectionResetError | BrokenPipeError):  # either, as the server's close overtakes the request
        return (
            "it closes the connection without an answer, like a TLS server: its address may have to begin with https:"
        )
    return getattr(error, "strerror", None) or str(error) or type(error).__name__
