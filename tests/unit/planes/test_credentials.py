"""Credentials: which files make some, what a child gets of them, and that nothing shows what is in them."""

from __future__ import annotations

from pathlib import Path

import pytest
from services import certificates, openssl

from trtx.errors import UsageError
from trtx.planes.credentials import EtcdAuth, EtcdSecrets, NatsAuth, secret_environment

pytestmark = pytest.mark.slow
_WORD = "hush-hush"


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("files")
    certificates(directory, ["client", "other"])
    locked = ("ec", "-in", "client-key.pem", "-out", "locked-key.pem", "-aes256", "-passout", f"pass:{_WORD}")
    openssl(*locked, directory=directory)
    (directory / "password").write_text(f"{_WORD}\n")
    (directory / "windows").write_bytes(f"{_WORD}\r\n".encode())
    (directory / "lines").write_text(f"{_WORD}\n{_WORD}\n")
    (directory / "empty").write_text("\n")
    (directory / "no-pem").write_text("nothing of the kind")
    return directory


def mtls(files: Path, ca: str = "ca.pem", certificate: str = "client.pem", key: str = "client-key.pem") -> EtcdAuth:
    return EtcdAuth(files / ca, files / certificate, files / key)


def test_a_child_gets_the_text_of_pem_files_and_the_words_of_the_others(files: Path) -> None:
    found = secret_environment(mtls(files), NatsAuth(username="me", password_file=files / "password"))
    assert found["ETCD_AUTH_CLIENT_KEY"] == (files / "client-key.pem").read_text()
    assert {name: value for name, value in found.items() if "CLIENT" not in name and "CA" not in name} == {
        "NATS_AUTH_USERNAME": "me",
        "NATS_AUTH_PASSWORD": _WORD,
    }
    assert sorted(found)[:3] == ["ETCD_AUTH_CA", "ETCD_AUTH_CLIENT_CERT", "ETCD_AUTH_CLIENT_KEY"]
    assert secret_environment(EtcdAuth(username="me", password_file=files / "windows"), None) == {
        "ETCD_AUTH_USERNAME": "me",
        "ETCD_AUTH_PASSWORD": _WORD,
    }
    assert secret_environment(None, NatsAuth(token_file=files / "password")) == {"NATS_AUTH_TOKEN": _WORD}
    assert secret_environment(None, None) == {}


def test_what_a_child_got_is_read_back_and_never_shown(files: Path) -> None:
    secrets = mtls(files).read()
    again = EtcdSecrets.of_environment(secrets.environment())
    assert again == secrets
    assert again is not None and again.uses_tls
    assert "PRIVATE KEY" not in repr(secrets)
    with_password = EtcdSecrets.of_environment(
        {**secrets.environment(), "ETCD_AUTH_USERNAME": "me", "ETCD_AUTH_PASSWORD": _WORD}
    )
    assert with_password is not None and not with_password.uses_tls  # as Dynamo has it
    assert EtcdSecrets.of_environment({"ETCD_AUTH_CA": "a"}) is None


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        ({"ca": "absent.pem"}, "etcd_auth.ca .* can't be read .No such file"),
        ({"ca": "no-pem"}, "etcd_auth.ca .* is not a PEM file"),
        ({"key": "other-key.pem"}, "can't be used .certificate and key don't match"),
        ({"key": "locked-key.pem"}, "the key is encrypted"),
        ({"certificate": "client-key.pem"}, "can't be used"),
        ({"ca": "client-key.pem"}, "can't be used"),
    ],
)
def test_files_that_make_no_connection_are_told_by_name(files: Path, changed: dict[str, str], expected: str) -> None:
    with pytest.raises(UsageError, match=expected) as error:
        mtls(files, **changed).read()
    assert "PRIVATE" not in str(error.value)


@pytest.mark.parametrize(("name", "expected"), [("lines", "has several lines"), ("empty", "is empty")])
def test_a_file_of_a_password_has_one_line_and_is_never_quoted(files: Path, name: str, expected: str) -> None:
    with pytest.raises(UsageError, match=expected) as error:
        NatsAuth(username="me", password_file=files / name).environment()
    assert _WORD not in str(error.value)


@pytest.mark.parametrize(
    "given",
    [
        {},
        {"ca": Path("a")},
        {"username": "me"},
        {"ca": Path("a"), "certificate": Path("b"), "key": Path("c"), "username": "me", "password_file": Path("d")},
    ],
)
def test_half_or_twice_the_credentials_of_etcd_are_none(given: dict[str, object]) -> None:
    with pytest.raises(UsageError, match="expected .*ca, certificate and key, or username and password_file"):
        EtcdAuth(**given)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "given",
    [{}, {"username": "me"}, {"token_file": Path("a"), "username": "me", "password_file": Path("b")}],
)
def test_half_or_twice_the_credentials_of_nats_are_none(given: dict[str, object]) -> None:
    with pytest.raises(UsageError, match="expected username and password_file, or token_file"):
        NatsAuth(**given)  # type: ignore[arg-type]
