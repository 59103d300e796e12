"""Checks the certificate of the HTTP port before anything is started, and refuses one that no client would accept."""

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
from trtx.topology import Plan, ServerTls

_OF_SERVE = ("--tls-cert", "--tls-key")
_ENCRYPTED = re.compile(rb"-----BEGIN ENCRYPTED PRIVATE KEY-----|^Proc-Type: 4,ENCRYPTED", re.MULTILINE)
_PRIVATE = re.compile(rb"-----BEGIN (RSA |EC )?PRIVATE KEY-----")
_TOO_OPEN = 0o027  # any access for others, and write access for the group
_OTHER_NAME = (62, 64)  # X509_V_ERR_HOSTNAME_MISMATCH, X509_V_ERR_IP_ADDRESS_MISMATCH
_SOON_S = 14 * 24 * 3600.0


@dataclass(frozen=True, slots=True)
class Certificate:
    """A checked server certificate: it matches its key and is valid now."""

    tls: ServerTls
    until: datetime
    warnings: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class _Pair:
    """A certificate and its key, with the options that named them."""

    certificate: Path
    key: Path
    options: tuple[str, str]

    @property
    def description(self) -> str:
        return f"{self.options[0]} {shown(self.certificate)}"

    @property
    def key_description(self) -> str:
        return f"{self.options[1]} {shown(self.key)}"


def check_certificate(
    certificate: Path | None, key: Path | None, *, options: tuple[str, str] = _OF_SERVE
) -> Certificate | None:
    """Checks a certificate and its key. Returns None if neither is given. ``options``: the names of their options.

    Raises UsageError if only one of them is given, if they can't be read or do not match, and if the certificate is not
    valid now.
    """
    if certificate is None or key is None:
        if certificate is not None or key is not None:
            given, lacked = options if key is None else options[::-1]
            raise UsageError(f"{given} has no effect without {lacked}; name both, or leave it out")
        return None
    pair = _Pair(certificate.expanduser().absolute(), key.expanduser().absolute(), options)
    own = read_certificate(pair.certificate, option=options[0])
    _check_key(pair)
    server = _server(pair)
    try:
        presented = handshake(server, exactly(own))
    except ssl.SSLError as error:
        _refused(pair, _reason(error))
    since, until = (ssl.cert_time_to_seconds(str(presented[name])) for name in ("notBefore", "notAfter"))
    if not since <= time.time() < until:
        word, at = ("expired on", until) if time.time() >= until else ("is not in force before", since)
        raise UsageError(
            f"{pair.description} {word} {_date(at)}, so no client accepts it; renew it, or correct this machine's clock"
        )
    return Certificate(
        ServerTls(pair.certificate, pair.key, tuple(_names(presented))),
        datetime.fromtimestamp(until, UTC),
        tuple(_warnings(pair, until)),
    )


def read_certificate(path: Path, *, option: str = _OF_SERVE[0]) -> str:
    """The server's own certificate in a file, in PEM. Raises UsageError if there is none."""
    pem = read_bytes(path, option, "a certificate in PEM").decode("utf-8", errors="replace")
    try:
        return first_certificate(pem)
    except ssl.SSLError as error:
        raise UsageError(
            f"{option} {shown(path)} has no certificate in PEM; expected -----BEGIN CERTIFICATE----- in it (`openssl "
            "x509 -inform der` converts DER)"
        ) from error


def with_certificate(spec: TopologySpec) -> tuple[TopologySpec, Certificate | None]:
    """``spec`` with absolute certificate paths for its frontends, and the checked certificate.

    Raises UsageError as :func:`check_certificate`.
    """
    found = check_certificate(spec.tls_cert, spec.tls_key)
    if found is None:
        return spec, None
    return spec.model_copy(update={"tls_cert": found.tls.certificate, "tls_key": found.tls.key}), found


def as_seen_outside(plan: Plan, certificate: Certificate | None) -> Plan:
    """``plan`` with the certificate that its clients see, and with reasons and warnings about its HTTP ports."""
    reasons, warnings = plan.reasons, () if certificate is None else certificate.warnings
    if certificate is not None:
        names = ", ".join(certificate.tls.names) or "no name"
        reasons += (
            f"HTTP uses TLS because of --tls-cert, whose certificate is for {names}, until "
            f"{certificate.until:%Y-%m-%d}; the other ports don't use TLS",
        )
    if not plan.is_local:
        clear = "" if certificate is not None else "in clear text (--tls-cert and --tls-key) and "
        warnings += (
            f"HTTP listens on {', '.join(_outside(plan))} {clear}without authentication: anyone who can reach "
            f"{'these machines' if plan.hosts else 'this machine'} can use it; docs/security.md describes a gateway",
        )
    return replace(plan, tls=None if certificate is None else certificate.tls, reasons=reasons, warnings=warnings)


def _outside(plan: Plan) -> Iterator[str]:
    for frontend in plan.frontends:
        yield f"{frontend.http_host}:{frontend.http_port}"


def check_usual_client(plan: Plan) -> None:
    """Raises UsageError if a standard TLS client, such as aiperf, would reject the frontend of ``plan``.

    The client verifies the name in the URL and trusts the server's own certificate.
    """
    if plan.tls is None:
        return
    pair = _Pair(plan.tls.certificate, plan.tls.key, _OF_SERVE)
    client = ssl.create_default_context()
    client.load_verify_locations(cadata=trusted_beside([pair.certificate]))
    host = urlsplit(plan.url).hostname or ""
    try:
        handshake(_server(pair), client, host)
    except ssl.SSLCertVerificationError as error:
        if error.verify_code in _OTHER_NAME:
            raise UsageError(
                f"{pair.description} is for {', '.join(plan.tls.names) or 'no name'}, but aiperf verifies the name "
                f"{host}; name one of them with --host, or use a certificate for {host}"
            ) from error
        raise UsageError(
            f"{pair.description}: aiperf would not trust it ({_reason(error)}); set {CA_VARIABLE} to the certificates "
            "of its authority, in PEM"
        ) from error


def _check_key(pair: _Pair) -> None:
    content = read_bytes(pair.key, pair.options[1], "a private key in PEM")
    if _ENCRYPTED.search(content):
        raise UsageError(
            f"{pair.key_description} is encrypted, but a starting server can't ask for a passphrase; expected an "
            "unencrypted one that only you can read (`openssl pkey` makes it)"
        )
    if not _PRIVATE.search(content):
        raise UsageError(
            f"{pair.key_description} has no private key in PEM; expected -----BEGIN PRIVATE KEY----- in it"
        )


def _server(pair: _Pair) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        context.load_cert_chain(pair.certificate, pair.key)
    except ssl.SSLError as error:
        if error.reason == "KEY_VALUES_MISMATCH":
            raise UsageError(
                f"{pair.key_description} is not the key of {pair.description}; use a certificate and key that belong "
                "together, with the server's own certificate first in its file"
            ) from error
        _refused(pair, _reason(error))
    return context


def _refused(pair: _Pair, reason: str) -> NoReturn:
    raise UsageError(
        f"{pair.description} can't be served with ({reason}); expected a certificate for a TLS server, and its key"
    )


def _reason(error: ssl.SSLError) -> str:
    if isinstance(error, ssl.SSLCertVerificationError):
        return error.verify_message
    return (error.reason or str(error)).lower().replace("_", " ")


def _names(presented: Mapping[str, Any]) -> Iterator[str]:
    names: Sequence[tuple[str, str]] = presented.get("subjectAltName", ())
    for kind, value in names:
        if kind == "IP Address":
            yield str(ipaddress.ip_address(value.strip()))  # IPv6 in its usual notation
        elif kind == "DNS":
            yield value


def _warnings(pair: _Pair, until: float) -> Iterator[str]:
    mode = stat.S_IMODE(pair.key.stat().st_mode)
    if mode & _TOO_OPEN:
        yield f"{pair.key_description} is open to other users of this machine (mode {mode:03o}); chmod 600 it"
    if until - time.time() < _SOON_S:
        yield f"{pair.description} expires on {_date(until)}; a renewed file takes effect when a server starts"


def _date(seconds: float) -> str:
    return f"{datetime.fromtimestamp(seconds, UTC):%Y-%m-%d %H:%M} UTC"
