"""What no client would take is refused before anything is started with it, in one sentence."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from certificates import Pair, make
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import rsa

from trtx.config import TopologySpec
from trtx.errors import UsageError
from trtx.launch import check_usual_client
from trtx.launch.certificates import Certificate, check_certificate
from trtx.launch.preparation import HOLDER, prepare
from trtx.topology import Plan


def _good(at: Path) -> Pair:
    return make(at, "good", ["localhost"])


def _with(pair: Pair, *, certificate: bytes | None = None, key: bytes | None = None) -> Pair:
    if certificate is not None:
        pair.certificate.write_bytes(certificate)
    if key is not None:
        pair.key.write_bytes(key)
    return pair


def _absent(at: Path) -> Pair:
    pair = _good(at)
    pair.key.unlink()
    return pair


def _der(at: Path) -> Pair:
    pair = _good(at)
    return _with(pair, certificate=pair.signed.public_bytes(serialization.Encoding.DER))


def _swapped(at: Path) -> Pair:
    pair = _good(at)
    return _with(pair, certificate=pair.key.read_bytes(), key=pair.certificate.read_bytes())


REFUSED: dict[str, tuple[Callable[[Path], Pair], str]] = {
    "no key": (_absent, "--tls-key .* can't be read .No such file"),
    "a directory": (lambda at: Pair(at, _good(at).key, _good(at).signed, _good(at).private), "it is a directory"),
    "DER": (_der, "--tls-cert .* has no certificate in PEM; .*openssl x509 -inform der"),
    "swapped": (_swapped, "--tls-cert .* has no certificate in PEM"),
    "no key in it": (lambda at: _with(_good(at), key=b"secret"), "--tls-key .* has no private key in PEM"),
    "another's key": (
        lambda at: _with(_good(at), key=make(at, "other", ["localhost"]).key.read_bytes()),
        "--tls-key .* is not the key of --tls-cert",
    ),
    "encrypted": (lambda at: make(at, "hidden", ["localhost"], passphrase=b"x"), "is encrypted.*openssl pkey"),
    "expired": (lambda at: make(at, "old", ["localhost"], since_days=-9, until_days=-1), "expired on 20.*renew it"),
    "not yet": (lambda at: make(at, "new", ["localhost"], since_days=1), "is not in force before 20"),
    "a short key": (
        lambda at: make(at, "weak", ["localhost"], private=rsa.generate_private_key(65537, 1024)),
        "can't be served with .*key too small",
    ),
    "cut off": (
        lambda at: _with(_good(at), certificate=b"-----BEGIN CERTIFICATE-----\nMII\n-----END CERTIFICATE-----\n"),
        "--tls-cert .* can't be served with",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_nobody_could_be_served_with_is_refused(case: str, tmp_path: Path) -> None:
    made, because = REFUSED[case]
    pair = made(tmp_path)
    with pytest.raises(UsageError, match=because) as refused:
        check_certificate(pair.certificate, pair.key)
    assert "\n" not in str(refused.value) and ("; " in str(refused.value) or "expected" in str(refused.value))


def checked(pair: Pair) -> Certificate:
    found = check_certificate(pair.certificate, pair.key)
    assert found is not None
    return found


def test_a_certificate_says_whom_it_is_for_and_until_when(tmp_path: Path) -> None:
    pair = make(tmp_path, "own", ["*.example.com", "10.0.0.5", "::1"], signer=make(tmp_path, "authority"))
    found = checked(pair)
    assert found.tls.names == ("*.example.com", "10.0.0.5", "::1")
    assert found.until == pair.signed.not_valid_after_utc and not found.warnings


@pytest.mark.parametrize("mode", [0o640, 0o600, 0o400])
def test_a_key_that_its_owner_and_their_group_read_is_fine(mode: int, tmp_path: Path) -> None:
    pair = _good(tmp_path)
    pair.key.chmod(mode)
    assert not checked(pair).warnings


@pytest.mark.parametrize("mode", [0o644, 0o604, 0o660])
def test_a_key_that_others_can_read_or_write_is_warned_of(mode: int, tmp_path: Path) -> None:
    pair = _good(tmp_path)
    pair.key.chmod(mode)
    (warning,) = checked(pair).warnings
    assert f"(mode {mode:03o}); chmod 600 it" in warning and str(pair.key.name) in warning


def test_one_that_ends_soon_is_warned_of(tmp_path: Path) -> None:
    pair = make(tmp_path, "own", ["localhost"], until_days=3)
    (warning,) = checked(pair).warnings
    assert "expires on 20" in warning


def _planned(tmp_path: Path, **fields: object) -> Plan:
    spec = TopologySpec.model_validate({"engine": "paced", "port": 0, **fields})
    planned = prepare(spec, run_dir=tmp_path / "run")
    HOLDER.release((planned.port, *planned.internal_ports))
    return planned


def test_a_plan_has_it_absolute_on_its_frontends_command_line_and_keeps_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair = make(tmp_path, "own", ["localhost", "127.0.0.1"])
    monkeypatch.chdir(tmp_path)
    planned = _planned(tmp_path, tls_cert="own.pem", tls_key="own.key")
    argv = planned.processes[0].argv
    assert argv[argv.index("--tls-cert-path") + 1] == str(pair.certificate)
    assert argv[argv.index("--tls-key-path") + 1] == str(pair.key)
    assert planned.url == f"https://127.0.0.1:{planned.port}"
    assert Plan.from_json(json.loads(json.dumps(planned.to_json()))) == planned
    assert not [one for one in planned.workers if str(pair.key) in one.argv]


@pytest.mark.parametrize("lacked", ["tls_cert", "tls_key"])
def test_one_without_the_other_is_refused(lacked: str, tmp_path: Path) -> None:
    means_nothing = {
        "tls_cert": "tls_key has no effect without tls_cert",
        "tls_key": "tls_key is missing beside a certificate",
    }
    with pytest.raises(ValueError, match=means_nothing[lacked]):
        TopologySpec.model_validate({"tls_cert": "own.pem", "tls_key": "own.key", lacked: None})
    both = {"tls_cert": "own.pem", "tls_key": "own.key"}  # as hosts that join read it
    assert TopologySpec.model_validate_json(json.dumps(both), strict=True) == TopologySpec.model_validate(both)


@pytest.mark.parametrize(
    ("is_tls", "said"), [(False, "in clear text (--tls-cert and --tls-key) and without"), (True, "without")]
)
def test_whoever_opens_the_port_is_warned_of_what_it_lacks(is_tls: bool, said: str, tmp_path: Path) -> None:
    pair = make(tmp_path, "own", ["localhost"])
    files = {"tls_cert": pair.certificate, "tls_key": pair.key} if is_tls else {}
    planned = _planned(tmp_path, host="0.0.0.0", **files)
    (warning,) = planned.warnings
    assert f":{planned.port} {said} authentication" in warning and "docs/security.md" in warning
    assert not _planned(tmp_path, **files).warnings


def test_a_client_that_goes_by_names_is_asked_before_it_measures(tmp_path: Path) -> None:
    authority = make(tmp_path, "authority")
    public = make(tmp_path, "public", ["llm.example.com"])
    private = make(tmp_path, "private", ["127.0.0.1"], signer=authority)
    local = make(tmp_path, "local", ["127.0.0.1"])
    check_usual_client(_planned(tmp_path, tls_cert=local.certificate, tls_key=local.key))
    with pytest.raises(
        UsageError, match=r"is for llm\.example\.com, but aiperf verifies the name 127\.0\.0\.1.*--host"
    ):
        check_usual_client(_planned(tmp_path, tls_cert=public.certificate, tls_key=public.key))
    with pytest.raises(UsageError, match="aiperf would not trust it .*issuer.*SSL_CERT_FILE"):
        check_usual_client(_planned(tmp_path, tls_cert=private.certificate, tls_key=private.key))
    private.certificate.write_bytes(private.certificate.read_bytes() + authority.certificate.read_bytes())
    check_usual_client(_planned(tmp_path, tls_cert=private.certificate, tls_key=private.key))
