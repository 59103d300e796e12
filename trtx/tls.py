"""TLS verification by trtx's clients.

A server that trtx did not start is verified in the usual way: by its name and by the certificate authorities that this
machine trusts. A server that trtx started is verified only by its exact certificate, under any address.
"""

from __future__ import annotations

import contextlib
import functools
import os
import re
import ssl
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import certifi

from trtx.errors import UsageError

CA_VARIABLE = "SSL_CERT_FILE"  # OpenSSL's own variable, which Python, httpx and aiperf (aiohttp) honour
_NO_CHECK_TIME = 0x200000  # X509_V_FLAG_NO_CHECK_TIME, for which Python's ssl has no constant
_ROUNDS = 10  # the maximum rounds of an in-memory handshake, which needs three
_CERTIFICATE = re.compile(r"-----BEGIN CERTIFICATE-----.+?-----END CERTIFICATE-----", re.DOTALL)


def trust_of(url: str, certificate: Path | None = None) -> ssl.SSLContext:
    """Returns the SSL context for a client of ``url``.

    ``certificate``: the server's own certificate in PEM, if trtx started the server. For a plain HTTP address, the
    context trusts no certificate, because reading the system's certificates would take 30 ms of CPU. Raises UsageError
    if SSL_CERT_FILE is not a file of certificates.
    """
    if urlsplit(url).scheme != "https":
        return ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    if certificate is not None:
        return pinned(certificate)
    _check_ca_file()
    return default_trust()


@functools.cache
def default_trust() -> ssl.SSLContext:
    """Returns a context that trusts the system's authorities and those of certifi, which httpx depends on.

    SSL_CERT_FILE and SSL_CERT_DIR can replace the system's authorities. certifi's are added because many container
    images have none. The context is cached, because its creation takes tens of milliseconds.
    """
    context = ssl.create_default_context()
    context.load_verify_locations(certifi.where())
    return context


def _check_ca_file() -> None:
    """Raises UsageError for an SSL_CERT_FILE that OpenSSL would silently ignore."""
    if not (file := os.environ.get(CA_VARIABLE)):
        return
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(file)
    except OSError as error:
        reason = "no certificate in PEM" if isinstance(error, ssl.SSLError) else error.strerror
        raise UsageError(
            f"{CA_VARIABLE} is {file!r}, which can't be read ({reason}); expected a file of certificates in PEM"
        ) from error


def pinned(certificate: Path) -> ssl.SSLContext:
    """Returns a context that accepts only the certificate in this file, and no other certificate of its authority.

    It does not check names and dates: a server that trtx started is the same server under any address, and still
    answers when its certificate has expired.

    If another certificate replaces the one in the file, both are accepted, because a running frontend keeps the one
    that it read at its start. Raises OSError if the file did not exist at the first call or contains no certificate.
    """
    return _pin(certificate).context()


class _Pin:
    def __init__(self, path: Path) -> None:
        self._path = path
        self._seen: set[str] = set()
        self._context = exactly(first_certificate(path.read_text(encoding="ascii", errors="replace")))

    def context(self) -> ssl.SSLContext:
        with contextlib.suppress(OSError):  # the file is gone or being written: keep the certificates read so far
            found = first_certificate(self._path.read_text(encoding="ascii", errors="replace"))
            if found not in self._seen:
                self._context.load_verify_locations(cadata=found)
                self._seen.add(found)
        return self._context


_pin = functools.cache(_Pin)  # never expires: this process can't know which of two certificates a server still uses


def exactly(certificate: str, *, of: int = ssl.PROTOCOL_TLS_CLIENT) -> ssl.SSLContext:
    """Returns a context that accepts only this certificate (PEM), under any name.

    ``of``: the protocol side; default: a client. Raises SSLError for an invalid certificate.
    """
    context = ssl.SSLContext(of)
    context.check_hostname = False
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN  # accept a trust anchor that is not a certificate authority
    context.verify_flags |= _NO_CHECK_TIME
    context.load_verify_locations(cadata=certificate)
    return context


def first_certificate(pem: str) -> str:
    """Returns the first certificate in PEM text: the server's own, which precedes its authorities'. Raises SSLError."""
    found = _CERTIFICATE.search(pem)
    if found is None:
        raise ssl.SSLError("no certificate in PEM")
    return found.group() + "\n"


def trusted_beside(certificates: Iterable[Path]) -> str:
    """Returns PEM text for SSL_CERT_FILE, so that a process with the usual verification also accepts ``certificates``.

    It includes the system's certificate file; the system's certificate directory stays in effect.
    """
    paths = ssl.get_default_verify_paths()
    files = [Path(paths.cafile)] if paths.cafile is not None else []  # SSL_CERT_FILE, else the system's file, if any
    texts = (path.read_text(encoding="utf-8", errors="replace") for path in (*files, *certificates))
    return "".join(f"{found}\n" for text in texts for found in _CERTIFICATE.findall(text))


def handshake(server: ssl.SSLContext, client: ssl.SSLContext, name: str | None = None) -> Mapping[str, Any]:
    """Performs a TLS handshake between two contexts in memory. ``name``: the server name that the client requests.

    Returns the server's certificate as the client sees it (see ``SSLSocket.getpeercert``). Raises SSLError.
    """
    return _meet(server, client, name)[0].getpeercert() or {}


def shown_by_client(certificate: str, chain: Callable[[ssl.SSLContext], None]) -> Mapping[str, Any]:
    """Returns what a server sees of the client certificate ``certificate`` (PEM), ignoring its issuer and its dates.

    ``chain``: loads the certificate with its key into a context. Raises SSLError if no server would accept it as a
    client certificate.
    """
    server, client = exactly(certificate, of=ssl.PROTOCOL_TLS_SERVER), ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    server.verify_mode = ssl.CERT_REQUIRED
    client.check_hostname, client.verify_mode = False, ssl.CERT_NONE  # both sides are this process
    for side in (server, client):
        chain(side)
    return _meet(server, client, None)[1].getpeercert() or {}


def _meet(server: ssl.SSLContext, client: ssl.SSLContext, name: str | None) -> tuple[ssl.SSLObject, ssl.SSLObject]:
    up, down = ssl.MemoryBIO(), ssl.MemoryBIO()
    asking = client.wrap_bio(down, up, server_hostname=name)
    asked = server.wrap_bio(up, down, server_side=True)
    waiting = [asking, asked]
    for _ in range(_ROUNDS):
        for side in tuple(waiting):
            with contextlib.suppress(ssl.SSLWantReadError):
                side.do_handshake()
                waiting.remove(side)
    return asking, asked
