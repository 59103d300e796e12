"""https: the certificate is the URL's host's, although an address is what was connected to."""

from __future__ import annotations

import asyncio
import datetime
import os
import ssl
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

_NOW = datetime.datetime.now(datetime.UTC)
_DAY = datetime.timedelta(days=1)


def _certificate(
    path: Path, name: str, signer: tuple[x509.Certificate, ec.EllipticCurvePrivateKey] | None
) -> tuple[x509.Certificate, ec.EllipticCurvePrivateKey]:
    """Written to ``path`` with its key; its own authority without a ``signer``."""
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    builder = x509.CertificateBuilder().subject_name(subject).public_key(key.public_key())
    builder = builder.issuer_name(signer[0].subject if signer else subject).serial_number(x509.random_serial_number())
    builder = builder.not_valid_before(_NOW - _DAY).not_valid_after(_NOW + _DAY)
    builder = builder.add_extension(x509.BasicConstraints(ca=signer is None, path_length=None), critical=True)
    builder = builder.add_extension(x509.SubjectAlternativeName([x509.DNSName(name)]), critical=False)
    certificate = builder.sign(signer[1] if signer else key, hashes.SHA256())
    path.write_bytes(
        certificate.public_bytes(serialization.Encoding.PEM)
        + key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    )
    return certificate, key


_CLIENT = textwrap.dedent("""
    import asyncio, sys
    from trtx.media import MediaError, MediaLimits
    from trtx.media.fetch import fetch
    limits = MediaLimits(allow_private_media=True, media_timeout_s=60, media_idle_s=30)
    async def loopback(host, port):
        return ("127.0.0.1",)
    for host in ("picture.example", "other.example"):
        try:
            blob = asyncio.run(fetch(f"https://{host}:{sys.argv[1]}/", limits, resolve=loopback))
            print(host, blob.data.decode())
        except MediaError as error:
            print(host, error.status, error)
""")


@pytest.mark.slow
async def test_name_and_authority_are_checked_and_the_name_is_sent(tmp_path: Path) -> None:
    """In processes of their own: an operator's authorities are taken from SSL_CERT_FILE when the first is needed."""
    authority = _certificate(tmp_path / "authority.pem", "Authority", None)
    _certificate(tmp_path / "server.pem", "picture.example", authority)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(tmp_path / "server.pem")
    asked_for: list[str | None] = []
    context.sni_callback = lambda _, name, __: asked_for.append(name)

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        host = next(line for line in head.lower().split(b"\r\n") if line.startswith(b"host: "))
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (len(host), host))
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0, ssl=context)
    port = server.sockets[0].getsockname()[1]

    async def client(authorities: Path) -> list[str]:
        environment = {**os.environ, "SSL_CERT_FILE": str(authorities)}
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-c", _CLIENT, str(port)), stdout=subprocess.PIPE, env=environment
        )
        output, _ = await process.communicate()
        return output.decode().splitlines()

    try:
        right, wrong_name = await client(tmp_path / "authority.pem")
        assert right == f"picture.example host: picture.example:{port}"
        assert (
            wrong_name.startswith("other.example 424 ")
            and "a certificate that this machine does not trust" in wrong_name
        )
        assert asked_for == ["picture.example", "other.example"]
        unknown, _ = await client(tmp_path / "none.pem")
        assert (
            unknown.startswith("picture.example 424 ") and "a certificate that this machine does not trust" in unknown
        )
    finally:
        server.close()
