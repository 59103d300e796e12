"""By what trtx's clients verify a server: shown on handshakes, without a network."""

from __future__ import annotations

import ssl
from pathlib import Path

import pytest
from certificates import Pair, make
from cryptography.hazmat.primitives.serialization import Encoding

from trtx import tls
from trtx.errors import UsageError


def server(pair: Pair) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(pair.certificate, pair.key)
    return context


@pytest.fixture
def authority(tmp_path: Path) -> Pair:
    return make(tmp_path, "authority")


def test_ours_is_known_by_its_certificate_alone_under_any_name_and_on_any_day(tmp_path: Path, authority: Pair) -> None:
    own = make(tmp_path, "own", ["llm.example.com"], signer=authority, since_days=-9, until_days=-1)
    assert tls.handshake(server(own), tls.pinned(own.certificate), "127.0.0.1")["subjectAltName"]
    for name in ("twin", "neighbour"):  # of the same names and the same authority
        other = make(tmp_path, name, ["llm.example.com"], signer=authority)
        with pytest.raises(ssl.SSLCertVerificationError):
            tls.handshake(server(other), tls.pinned(own.certificate), "llm.example.com")


def test_the_authority_behind_a_certificate_in_its_file_vouches_for_no_other(tmp_path: Path, authority: Pair) -> None:
    own = make(tmp_path, "own", ["llm.example.com"], signer=authority)
    own.certificate.write_bytes(own.certificate.read_bytes() + authority.certificate.read_bytes())
    other = make(tmp_path, "other", ["llm.example.com"], signer=authority)
    assert tls.handshake(server(own), tls.pinned(own.certificate))
    with pytest.raises(ssl.SSLCertVerificationError):
        tls.handshake(server(other), tls.pinned(own.certificate))


def test_a_certificate_that_replaces_another_in_its_file_is_taken_beside_it(tmp_path: Path) -> None:
    before = make(tmp_path, "own", ["localhost"])
    serves, client = server(before), tls.pinned(before.certificate)
    assert tls.handshake(serves, client)
    before.certificate.write_text("half of a ")  # as it is being written
    assert tls.handshake(serves, tls.pinned(before.certificate))
    after = make(tmp_path, "own", ["localhost"])
    with pytest.raises(ssl.SSLCertVerificationError):
        tls.handshake(server(after), tls.exactly(before.signed.public_bytes(Encoding.PEM).decode()))
    for one in (serves, server(after)):  # a frontend that runs on, and one that was started again
        assert tls.handshake(one, tls.pinned(before.certificate))


def test_others_are_verified_by_name_and_authority(
    tmp_path: Path, authority: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = make(tmp_path, "own", ["llm.example.com"], signer=authority)
    monkeypatch.setenv(tls.CA_VARIABLE, str(authority.certificate))
    tls.default_trust.cache_clear()
    try:
        trust = tls.trust_of("https://llm.example.com:8443")
        assert tls.handshake(server(own), trust, "llm.example.com")
        for name, because in (("other.example.com", "Hostname mismatch"), ("127.0.0.1", "IP address mismatch")):
            with pytest.raises(ssl.SSLCertVerificationError, match=because):
                tls.handshake(server(own), trust, name)
        with pytest.raises(ssl.SSLCertVerificationError, match="self-signed"):
            tls.handshake(server(make(tmp_path, "alone", ["llm.example.com"])), trust, "llm.example.com")
    finally:
        tls.default_trust.cache_clear()


@pytest.mark.parametrize(("content", "because"), [(None, "No such file or directory"), ("mine", "no certificate")])
def test_a_file_of_authorities_that_openssl_would_leave_out_silently_is_refused(
    content: str | None, because: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "authorities.pem"
    if content is not None:
        file.write_text(content)
    monkeypatch.setenv(tls.CA_VARIABLE, str(file))
    with pytest.raises(UsageError, match=f"SSL_CERT_FILE is .*{because}.*; expected"):
        tls.trust_of("https://llm.example.com")
    assert tls.trust_of("http://llm.example.com").get_ca_certs() == [], "nobody is verified of plain HTTP"


def test_what_a_process_trusts_otherwise_stays_beside_ours(
    tmp_path: Path, authority: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(tls.CA_VARIABLE, str(authority.certificate))
    own, others = make(tmp_path, "own", ["localhost"]), make(tmp_path, "others", ["localhost"], signer=authority)
    client = ssl.create_default_context(cadata=tls.trusted_beside([own.certificate]))
    for one in (own, others):
        assert tls.handshake(server(one), client, "localhost")
