"""Credentials of etcd and NATS: stored in files, which are read when a process starts and when a client connects.

Plans, logs and command lines contain only paths. Dynamo 1.6.1 takes the secrets themselves from its environment, such
as the text of a PEM file. (It would treat a path as "etcd not reachable yet" for 120 s.) So trtx puts the secrets into
the environment of each child at its start, and nowhere else.
"""

from __future__ import annotations

import contextlib
import os
import ssl
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from urllib.parse import urlsplit

from trtx.config.files import read_text
from trtx.config.wording import shown_address
from trtx.errors import UsageError
from trtx.tls import first_certificate, shown_by_client

_MOST_BYTES = 64 * 1024
"""Maximum size of one file.

Linux limits an environment variable to 128 KiB, and no certificate chain is half as long.
"""


@dataclass(frozen=True, slots=True)
class EtcdAuth:
    """Paths of etcd's credentials: three certificate files for mutual TLS, or a user name and a password file.

    Raises UsageError for any other combination. Dynamo 1.6.1 supports one or the other: with a password it ignores the
    certificates, and sends the password in clear text.
    """

    ca: Path | None = None  # PEM: the CA that signed etcd's certificate
    certificate: Path | None = None  # PEM: the client's certificate
    key: Path | None = None  # PEM, not encrypted
    username: str | None = None
    password_file: Path | None = None

    def __post_init__(self) -> None:
        pem = [path is not None for path in (self.ca, self.certificate, self.key)]
        password = [value is not None for value in (self.username, self.password_file)]
        if any(pem) and any(password):
            raise UsageError(
                "etcd_auth has certificates and a password: Dynamo 1.6.1 ignores the certificates then, and sends the "
                "password in clear; expected ca, certificate and key, or username and password_file"
            )
        if any(pem) != all(pem) or any(password) != all(password) or not (any(pem) or any(password)):
            raise UsageError(
                "etcd_auth is incomplete; expected all of ca, certificate and key, or username and password_file"
            )

    @property
    def files(self) -> tuple[Path, ...]:
        """The files that contain a secret."""
        return tuple(path for path in (self.key, self.password_file) if path is not None)

    def read(self) -> EtcdSecrets:
        """Reads the files. Raises UsageError if a file can't be read or has other content."""
        if self.password_file is not None:
            password = _line("etcd_auth.password_file", self.password_file)
            return EtcdSecrets(username=self.username, password=password)
        assert self.ca is not None and self.certificate is not None and self.key is not None
        secrets = EtcdSecrets(
            ca=_pem("etcd_auth.ca", self.ca),
            certificate=_pem("etcd_auth.certificate", self.certificate),
            key=_pem("etcd_auth.key", self.key),
        )
        try:
            secrets.context()
            secrets.check_dates()
        except ValueError as error:
            raise UsageError(
                f"etcd_auth's ca {str(self.ca)!r}, certificate {str(self.certificate)!r} and key {str(self.key)!r} "
                f"can't be used ({error}); expected the CA of etcd's certificate, a client certificate and its "
                "unencrypted key, all in PEM"
            ) from error
        return secrets


@dataclass(frozen=True, slots=True, repr=False)
class EtcdSecrets:
    """The secrets themselves: PEM texts for mutual TLS, or a user name and a password. Never shown."""

    ca: str | None = None
    certificate: str | None = None
    key: str | None = None
    username: str | None = None
    password: str | None = None

    @property
    def uses_tls(self) -> bool:
        return self.ca is not None

    def context(self) -> ssl.SSLContext:
        """The TLS context for the certificates. Raises ValueError with the reason if they are unusable."""
        try:
            context = ssl.create_default_context(cadata=self.ca)
        except (ssl.SSLError, ValueError) as error:
            raise ValueError(f"the CA can't be read: {_reason(error)}") from error
        with _as_file(self.certificate or "") as certificate, _as_file(self.key or "") as key:
            try:
                # Without this, OpenSSL would ask for a passphrase on the terminal; Dynamo can't be given one either.
                context.load_cert_chain(certificate, key, password=_no_passphrase)
            except (ssl.SSLError, OSError, ValueError) as error:
                raise ValueError(f"certificate and key don't match: {_reason(error)}") from error
        return context

    def check_dates(self) -> None:
        """Raises ValueError if no server would accept the client certificate now; etcd would just hang up."""
        with _as_file(self.certificate or "") as certificate, _as_file(self.key or "") as key:
            try:
                told = shown_by_client(
                    first_certificate(self.certificate or ""),
                    lambda context: context.load_cert_chain(certificate, key, password=_no_passphrase),
                )
            except (ssl.SSLError, OSError) as error:
                raise ValueError(f"the certificate can't be used by a client: {_reason(error)}") from error
        since, until = (ssl.cert_time_to_seconds(str(told[name])) for name in ("notBefore", "notAfter"))
        if time.time() >= until:
            raise ValueError(f"the certificate expired on {_date(until)}: renew it, or set this machine's clock")
        if time.time() < since:
            raise ValueError(f"the certificate is not in force before {_date(since)}: set this machine's clock")

    def environment(self) -> dict[str, str]:
        """The environment variables that Dynamo 1.6.1 reads."""
        named = {name: getattr(self, field) for name, field in _ETCD_VARIABLES.items()}
        return {name: value for name, value in named.items() if value is not None}

    @classmethod
    def of_environment(cls, environment: Mapping[str, str]) -> EtcdSecrets | None:
        """Reads what :meth:`environment` wrote. A password takes precedence over certificates, as in Dynamo 1.6.1."""
        named = {field: environment.get(name) for name, field in _ETCD_VARIABLES.items()}
        if named["username"] is not None and named["password"] is not None:
            return cls(username=named["username"], password=named["password"])
        if None in (named["ca"], named["certificate"], named["key"]):
            return None
        return cls(ca=named["ca"], certificate=named["certificate"], key=named["key"])


_ETCD_VARIABLES = {
    "ETCD_AUTH_CA": "ca",
    "ETCD_AUTH_CLIENT_CERT": "certificate",
    "ETCD_AUTH_CLIENT_KEY": "key",
    "ETCD_AUTH_USERNAME": "username",
    "ETCD_AUTH_PASSWORD": "password",
}


@dataclass(frozen=True, slots=True)
class NatsAuth:
    """Credentials of NATS: a user name and a password file, or a token file.

    Raises UsageError for any other combination.
    """

    username: str | None = None
    password_file: Path | None = None
    token_file: Path | None = None

    def __post_init__(self) -> None:
        password = [value is not None for value in (self.username, self.password_file)]
        if any(password) != all(password) or any(password) == (self.token_file is not None):
            raise UsageError(
                "nats_auth is incomplete or contradictory; expected username and password_file, or token_file"
            )

    @property
    def files(self) -> tuple[Path, ...]:
        """The files that contain a secret."""
        return tuple(path for path in (self.password_file, self.token_file) if path is not None)

    def environment(self) -> dict[str, str]:
        """The environment variables that Dynamo 1.6.1 reads. Raises UsageError if a file can't be read or is empty."""
        if self.token_file is not None:
            return {"NATS_AUTH_TOKEN": _line("nats_auth.token_file", self.token_file)}
        assert self.password_file is not None
        password = _line("nats_auth.password_file", self.password_file)
        return {"NATS_AUTH_USERNAME": self.username or "", "NATS_AUTH_PASSWORD": password}


def secret_environment(etcd: EtcdAuth | None, nats: NatsAuth | None) -> dict[str, str]:
    """The secret environment variables of a child, in addition to those in its plan. Raises UsageError.

    The files are read again for each child, because they may be renewed.
    """
    of_etcd = etcd.read().environment() if etcd is not None else {}
    return of_etcd | (nats.environment() if nats is not None else {})


def check_endpoints(endpoints: Sequence[str], *, uses_tls: bool) -> None:
    """Raises UsageError unless all are ``http://HOST:PORT``, or ``https://…`` with certificates (``uses_tls``)."""
    if not endpoints:
        raise UsageError("no etcd is named; expected one address or more, such as http://10.0.0.1:2379")
    for endpoint in endpoints:
        try:
            address = urlsplit(endpoint)
            is_whole = address.scheme in ("http", "https") and bool(address.hostname) and address.port is not None
            # A password in an address would appear in plans and in Dynamo's log.
            is_whole = is_whole and address.path in ("", "/") and not (address.query or address.fragment)
            is_whole = is_whole and "@" not in address.netloc
        except ValueError:
            is_whole = False
        if not is_whole:
            raise UsageError(
                f"etcd is {shown_address(endpoint)}; expected http://HOST:PORT or https://HOST:PORT, and nothing else "
                "in it"
            )
        if (address.scheme == "https") != uses_tls:
            has, needs = ("https", "etcd_auth with ca, certificate and key") if not uses_tls else ("http", "https://")
            raise UsageError(
                f"etcd is {endpoint!r} over {has}; expected {needs}: Dynamo 1.6.1 speaks TLS with certificates of both "
                "sides, or not at all"
            )


@contextlib.contextmanager
def _as_file(text: str) -> Iterator[str]:
    """A path from which OpenSSL reads ``text``; the file exists only in memory."""
    descriptor = os.memfd_create("trtx", os.MFD_CLOEXEC)
    try:
        os.write(descriptor, text.encode())
        yield f"/proc/self/fd/{descriptor}"
    finally:
        os.close(descriptor)


def _no_passphrase() -> str:
    raise ValueError("the key is encrypted")


def _date(seconds: float) -> str:
    return f"{datetime.fromtimestamp(seconds, UTC):%Y-%m-%d %H:%M} UTC"


def _reason(error: Exception) -> str:
    if isinstance(error, ssl.SSLCertVerificationError):
        return error.verify_message
    return (getattr(error, "reason", None) or getattr(error, "strerror", None) or str(error)).strip()


def _pem(name: str, path: Path) -> str:
    text = read_text(path, name, "a PEM file", limit=_MOST_BYTES)
    if "-----BEGIN " not in text:
        raise UsageError(f"{name} {str(path)!r} is not a PEM file; expected text that begins with -----BEGIN")
    return text


def _line(name: str, path: Path) -> str:
    """The single line of a secret file, without its line end. Errors do not show its content."""
    expected = "a file with only the secret, in one line"
    text = read_text(path, name, expected, limit=_MOST_BYTES)
    secret = text.removesuffix("\n").removesuffix("\r")
    if not secret or not secret.isprintable():
        what = "is empty" if not secret else "has several lines or unprintable characters"
        raise UsageError(f"{name} {str(path)!r} {what}; expected {expected}")
    return secret
