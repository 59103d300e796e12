"""Certificates for tests, made by the package cryptography as an operator's authority would make them."""

from __future__ import annotations

import datetime
import ipaddress
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.types import CertificateIssuerPrivateKeyTypes
from cryptography.x509.oid import NameOID

_DAY = datetime.timedelta(days=1)
_PKCS8, _PEM = serialization.PrivateFormat.PKCS8, serialization.Encoding.PEM


@dataclass(frozen=True)
class Pair:
    """A certificate and its key, each in a file of its own."""

    certificate: Path
    key: Path
    signed: x509.Certificate
    private: CertificateIssuerPrivateKeyTypes


def make(
    directory: Path,
    name: str,
    names: Sequence[str] = (),
    *,
    signer: Pair | None = None,
    since_days: float = -1,
    until_days: float = 90,
    private: CertificateIssuerPrivateKeyTypes | None = None,
    passphrase: bytes | None = None,
) -> Pair:
    """``name.pem`` and ``name.key`` for ``names`` (DNS names and addresses); without a ``signer`` self-signed, and an
    authority where it is for no name."""
    private = private or ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    now = datetime.datetime.now(datetime.UTC)
    builder = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(signer.signed.subject if signer else subject)
        .public_key(private.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now + since_days * _DAY)
        .not_valid_after(now + until_days * _DAY)
        .add_extension(x509.BasicConstraints(ca=not names, path_length=None), critical=True)
    )
    if names:
        builder = builder.add_extension(x509.SubjectAlternativeName([_general(one) for one in names]), critical=False)
    signed = builder.sign(signer.private if signer else private, hashes.SHA256())
    pair = Pair(directory / f"{name}.pem", directory / f"{name}.key", signed, private)
    pair.certificate.write_bytes(signed.public_bytes(_PEM))
    hidden = serialization.BestAvailableEncryption(passphrase) if passphrase else serialization.NoEncryption()
    pair.key.touch(mode=0o600)
    pair.key.write_bytes(private.private_bytes(_PEM, _PKCS8, hidden))
    return pair


def _general(name: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(name))
    except ValueError:
        return x509.DNSName(name)
