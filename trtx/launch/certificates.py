"""The certificate of the HTTP port, before anything is started with it: what no client would take is refused here."""

from __future__ import annotations

import ipaddress
import re
import ssl
import stat
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NoReturn
from urllib.parse import urlsplit

from trtx.config import TopologySpec
from trtx.config.files import read_bytes
from trtx.config.wording import shown
from trtx.errors import UsageError
from trtx.tls import CA_VARIABLE, exactly, first_certificate, handshake, trusted_beside
from trtx.topology import Plan

_CERTIFICATE, _KEY = "--tls-cert", "--tls-key"
_ENCRYPTED = re.compile(rb"-----BEGIN ENCRYPTED PRIVATE KEY-----|^Proc-Type: 4,ENCRYPTED", re.MULTILINE)
_PRIVATE = re.compile(rb"-----BEGIN (RSA |EC )?PRIVATE KEY-----")
_TOO_OPEN = 0o027  # others at all, and writing for the group
_OTHER_NAME = (62, 64)  # X509_V_ERR_HOSTNAME_MISMATCH, X509_V_ERR_IP_ADDRESS_MISMATCH
_SOON_S = 14 * 24 * 3600.0


@dataclass(frozen=True, slots=True)
class Certificate:
    """Of a server, checked: it can prove that it is its own, and is in force."""

    path: Path
    names: tuple[str, ...]  # DNS names and addresses that its clients may ask for
    until: datetime
    warnings: tuple[str, ...]


def check_certificate(path: Path, key: Path) -> Certificate:
    """Raises UsageError where the two can't be read, don't belong together, or where no client takes the certificate
    now."""
    pem = read_bytes(path, _CERTIFICATE, "a certificate in PEM").decode("utf-8", errors="replace")
    try:
        own = first_certificate(pem)
    except ssl.SSLError as error:
        raise UsageError(
            f"{_CERTIFICATE} {shown(path)} holds no certificate in PEM; expected -----BEGIN CERTIFICATE----- in it "
            "(of DER, `openssl x509 -inform der` makes it)"
        ) from error
    _check_key(key)
    server = _server(path, key)
    try:
        told = handshake(server, exactly(own))
    except ssl.SSLError as error:
        _refused(path, _reason(error))
    since, until = (ssl.cert_time_to_seconds(str(told[name])) for name in ("notBefore", "notAfter"))
    if not since <= time.time() < until:
        word, at = ("expired on", until) if time.time() >= until else ("is not in force before", since)
        raise UsageError(
            f"{_CERTIFICATE} {shown(path)} {word} {_date(at)}, so no client takes it; renew it, or set this machine's "
            "clock"
        )
    return Certificate(
        path, tuple(_names(told)), datetime.fromtimestamp(until, UTC), tuple(_warnings(path, key, until))
    )


def with_certificate(spec: TopologySpec) -> tuple[TopologySpec, Certificate | None]:
    """``spec`` with absolute paths, which its frontends get, and what they will show their clients. Raises UsageError
    as :func:`check_certificate`."""
    if spec.tls_cert is None or spec.tls_key is None:
        return spec, None
    cert, key = (path.expanduser().absolute() for path in (spec.tls_cert, spec.tls_key))
    return spec.model_copy(update={"tls_cert": cert, "tls_key": key}), check_certificate(cert, key)


def as_seen_outside(plan: Plan, certificate: Certificate | None) -> Plan:
    """``plan`` with what clients see of it, and what whoever opens it to others should know."""
    reasons, warnings = plan.reasons, () if certificate is None else certificate.warnings
    if certificate is not None:
        names = ", ".join(certificate.names) or "no name"
        reasons += (
            f"HTTP speaks TLS because --tls-cert says so: for {names}, until {certificate.until:%Y-%m-%d}; the other "
            "ports stay plain",
        )
    if not plan.is_local:
        clear = "" if certificate is not None else "in clear text (--tls-cert and --tls-key) and "
        warnings += (
            f"HTTP listens on {', '.join(_outside(plan))} {clear}without authentication: whoever reaches "
            f"{'these machines' if plan.hosts else 'this machine'} can use it; docs/security.md has a gateway",
        )
    tls = None if plan.tls is None or certificate is None else replace(plan.tls, names=certificate.names)
    return replace(plan, tls=tls, reasons=reasons, warnings=warnings)


def _outside(plan: Plan) -> Iterator[str]:
    for frontend in plan.frontends:
        yield f"{frontend.http_host}:{frontend.http_port}"


def check_usual_client(plan: Plan) -> None:
    """Raises UsageError where a client that verifies in the usual way, by the name in the URL and with the server's own
    certificate trusted, would not take the frontend of ``plan``: aiperf is one."""
    if plan.tls is None:
        return
    client = ssl.create_default_context()
    client.load_verify_locations(cadata=trusted_beside([plan.tls.certificate]))
    host = urlsplit(plan.url).hostname or ""
    try:
        handshake(_server(plan.tls.certificate, plan.tls.key), client, host)
    except ssl.SSLCertVerificationError as error:
        cert = shown(plan.tls.certificate)
        if error.verify_code in _OTHER_NAME:
            raise UsageError(
                f"{_CERTIFICATE} {cert} is for {', '.join(plan.tls.names) or 'no name'}, and aiperf asks for "
                f"{host}, which it verifies; name one of them with --host, or take a certificate for {host}"
            ) from error
        raise UsageError(
            f"{_CERTIFICATE} {cert}: aiperf would not trust it ({_reason(error)}); set {CA_VARIABLE} to the "
            "certificates of its authority, in PEM"
        ) from error


def _check_key(key: Path) -> None:
    content = read_bytes(key, _KEY, "a private key in PEM")
    if _ENCRYPTED.search(content):
        raise UsageError(
            f"{_KEY} {shown(key)} is encrypted, and nobody is asked for a passphrase when a frontend starts; expected "
            "a plain one that you alone can read (`openssl pkey` makes it)"
        )
    if not _PRIVATE.search(content):
        raise UsageError(f"{_KEY} {shown(key)} holds no private key in PEM; expected -----BEGIN PRIVATE KEY----- in it")


def _server(path: Path, key: Path) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        context.load_cert_chain(path, key)
    except ssl.SSLError as error:
        if error.reason == "KEY_VALUES_MISMATCH":
            raise UsageError(
                f"{_KEY} {shown(key)} is not the key of {_CERTIFICATE} {shown(path)}; name the pair that was made "
                "together, the server's own certificate first in its file"
            ) from error
        _refused(path, _reason(error))
    return context


def _refused(path: Path, reason: str) -> NoReturn:
    raise UsageError(
        f"{_CERTIFICATE} {shown(path)} can't be served with ({reason}); expected a certificate for a TLS server, and "
        "its key"
    )


def _reason(error: ssl.SSLError) -> str:
    if isinstance(error, ssl.SSLCertVerificationError):
        return error.verify_message
    return (error.reason or str(error)).lower().replace("_", " ")


def _names(told: Mapping[str, Any]) -> Iterator[str]:
    names: Sequence[tuple[str, str]] = told.get("subjectAltName", ())
    for kind, value in names:
        if kind == "IP Address":
            yield str(ipaddress.ip_address(value.strip()))  # IPv6 as everybody writes it
        elif kind == "DNS":
            yield value


def _warnings(path: Path, key: Path, until: float) -> Iterator[str]:
    mode = stat.S_IMODE(key.stat().st_mode)
    if mode & _TOO_OPEN:
        yield f"{_KEY} {shown(key)} is open to other users of this machine (mode {mode:03o}); chmod 600 it"
    if until - time.time() < _SOON_S:
        yield f"{_CERTIFICATE} {shown(path)} expires on {_date(until)}; frontends that start later read the file anew"


def _date(seconds: float) -> str:
    return f"{datetime.fromtimestamp(seconds, UTC):%Y-%m-%d %H:%M} UTC"
