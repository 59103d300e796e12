"""TLS as trtx's clients see it: by what each verifies the server that it asks.

A server that something else serves is verified as everybody's is, by name and by the certificate authorities that are
trusted here. One of our own is known by its certificate alone: that very one, under whatever address it is asked.
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

CA_VARIABLE = "SSL_CERT_FILE"  # OpenSSL's own: Python, httpx and aiperf (aiohttp) take it
_NO_CHECK_TIME = 0x200000  # X509_V_FLAG_NO_CHECK_TIME, which Python's ssl has no name for
_ROUNDS = 10  # of a handshake without a network, which takes three
_CERTIFICATE = re.compile(r"-----BEGIN CERTIFICATE-----.+?-----END CERTIFICATE-----", re.DOTALL)


def trust_of(url: str, certificate: Path | None = None) -> ssl.SSLContext:
    """What a client of ``url`` verifies it by. ``certificate``: the server's own, in PEM, where trtx started it.

    Of a plain address one that trusts nobody: reading the system's certificates would cost 30 ms of CPU. Raises
    UsageError where SSL_CERT_FILE names no file of certificates.
    """
    if urlsplit(url).scheme != "https":
        return ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    if certificate is not None:
        return pinned(certificate)
    _check_ca_file()
    return default_trust()


@functools.cache
def default_trust() -> ssl.SSLContext:
    """The system's authorities (an operator's own: SSL_CERT_FILE or SSL_CERT_DIR) and, as many images of containers
    have none, those that httpx brings. Made once: it takes tens of milliseconds."""
    context = ssl.create_default_context()
    context.load_verify_locations(certifi.where())
    return context


def _check_ca_file() -> None:
    """Raises UsageError for an SSL_CERT_FILE that OpenSSL would leave out without a word."""
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
    """One that takes the server whose certificate lies in this file, and no other: its authority's other certificates
    neither. Names and dates are for its other clients: what trtx has started is the same server on any address, and
    does not answer less on the day that its certificate expires.

    A certificate that replaces it in the file is taken beside it: a frontend reads its own when it starts. Raises
    OSError where the file was never there, or holds none.
    """
    return _pin(certificate).context()


class _Pin:
    def __init__(self, path: Path) -> None:
        self._path = path
        self._seen: set[str] = set()
        self._context = exactly(first_certificate(path.read_text(encoding="ascii", errors="replace")))

    def context(self) -> ssl.SSLContext:
        with contextlib.suppress(OSError):  # gone, or being written: what it held still serves
            found = first_certificate(self._path.read_text(encoding="ascii", errors="replace"))
            if found not in self._seen:
                self._context.load_verify_locations(cadata=found)
                self._seen.add(found)
        return self._context


_pin = functools.cache(_Pin)  # for as long as this process lives: no answer says which of two a server holds


def exactly(certificate: str, *, checks_time: bool = False, of: int = ssl.PROTOCOL_TLS_CLIENT) -> ssl.SSLContext:
    """A client's context (``of``: another side's) that takes this certificate (PEM) alone, under any name. Raises
    SSLError for what is none."""
    context = ssl.SSLContext(of)
    context.check_hostname = False
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN  # an anchor that is nobody's authority
    if not checks_time:
        context.verify_flags |= _NO_CHECK_TIME
    context.load_verify_locations(cadata=certificate)
    return context


def first_certificate(pem: str) -> str:
    """The server's own, which comes before its authorities'. Raises SSLError where there is none."""
    found = _CERTIFICATE.search(pem)
    if found is None:
        raise ssl.SSLError("no certificate in PEM")
    return found.group() + "\n"


def trusted_beside(certificates: Iterable[Path]) -> str:
    """What SSL_CERT_FILE has to hold for a process that verifies in the usual way, so that it takes servers with these
    certificates too: PEM. The directory of the system's own stays in force beside it."""
    paths = ssl.get_default_verify_paths()
    files = [Path(paths.cafile)] if paths.cafile is not None else []  # SSL_CERT_FILE's, else the system's if it has one
    texts = (path.read_text(encoding="utf-8", errors="replace") for path in (*files, *certificates))
    return "".join(f"{found}\n" for text in texts for found in _CERTIFICATE.findall(text))


def handshake(server: ssl.SSLContext, client: ssl.SSLContext, name: str | None = None) -> Mapping[str, Any]:
    """Both of them talk to each other, without a network. ``name``: whom the client asks for.

    What the client knows of the server's certificate then, as ``SSLSocket.getpeercert`` has it. Raises SSLError.
    """
    return _meet(server, client, name)[0].getpeercert() or {}


def shown_by_client(certificate: str, chain: Callable[[ssl.SSLContext], None]) -> Mapping[str, Any]:
    """What a server learns of a client that shows ``certificate`` (PEM), whoever signed it and whenever that was.
    ``chain`` loads it with its key into a context. Raises SSLError where no server would take it as a client's."""
    server, client = exactly(certificate, of=ssl.PROTOCOL_TLS_SERVER), ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    server.verify_mode = ssl.CERT_REQUIRED
    client.check_hostname, client.verify_mode = False, ssl.CERT_NONE  # it talks to itself
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
