"""A real etcd over mutual TLS and a real NATS with a password: each wrong file is told in one sentence, before anything
is started."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml
from certificates import make
from processes import free_first_port, free_port
from services import EtcdService, Service, etcd, nats

from trtx.cli import app

_PASSWORD = "a-word-that-stands-nowhere-else"


@dataclass(frozen=True)
class Planes:
    directory: Path  # with all files, good and bad
    etcd: EtcdService
    nats: Service


@pytest.fixture(scope="module")
def planes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Planes]:
    directory = tmp_path_factory.mktemp("planes")
    authority, stranger = make(directory, "authority"), make(directory, "stranger")
    make(directory, "server", ["127.0.0.1"], signer=authority)
    make(directory, "client", ["client"], signer=authority)
    make(directory, "expired", ["client"], signer=authority, since_days=-9, until_days=-2)
    make(directory, "early", ["client"], signer=authority, since_days=2)
    make(directory, "foreign", ["client"], signer=stranger)
    for name, password in (("password", _PASSWORD), ("wrong", "another")):
        (directory / name).touch(mode=0o600)
        (directory / name).write_text(f"{password}\n")
    files = {"--cert-file": "server.pem", "--key-file": "server.key", "--trusted-ca-file": "authority.pem"}
    flags = [word for flag, name in files.items() for word in (flag, str(directory / name))]
    login = f"authorization {{user: trtx, password: {_PASSWORD}}}"
    with (
        etcd(directory / "etcd", *flags, "--client-cert-auth", scheme="https") as first,
        nats(directory / "nats", login) as second,
    ):
        yield Planes(directory, first, second)


def of(client: str = "client", ca: str = "authority", key: str | None = None) -> dict[str, str]:
    return {"ca": f"{ca}.pem", "certificate": f"{client}.pem", "key": f"{key or client}.key"}


_LOGIN = {"username": "trtx", "password_file": "password"}
_TLS_CASES = [
    (of(ca="stranger"), ("its certificate is not trusted: unable to get local issuer certificate", "etcd_auth")),
    (of("expired"), ("expired.pem", "the certificate expired on 20", "renew it")),
    (of("early"), ("early.pem", "is not in force before 20", "clock")),
    (of(key="server"), ("client.pem", "server.key", "certificate and key don't match")),
    # What etcd says of it comes with its hanging up, and not always before.
    (of("foreign"), ("the certificate of etcd_auth",)),
]


@pytest.mark.parametrize(
    ("etcd_auth", "nats_auth", "words"),
    [
        *((files, _LOGIN, words) for files, words in _TLS_CASES),
        (
            of(),
            {**_LOGIN, "password_file": "wrong"},
            ("refuses these credentials (Authorization Violation)", "nats_auth"),
        ),
        (of(), {**_LOGIN, "username": "ada"}, ("refuses these credentials (Authorization Violation)", "nats_auth")),
        (of(), None, ("refuses these credentials (Authorization Violation)", "nats_auth")),
    ],
)
def test_serve_says_which_file_of_credentials_is_wrong(
    etcd_auth: dict[str, str],
    nats_auth: dict[str, str] | None,
    words: tuple[str, ...],
    planes: Planes,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    document = {
        "name": "wrong-files",
        "etcd": [planes.etcd.url],
        "etcd_auth": etcd_auth,
        "nats": f"nats://127.0.0.1:{planes.nats.port}",
        **({} if nats_auth is None else {"nats_auth": nats_auth}),
        "hosts": [{"name": "here", "address": "127.0.0.1", "roles": {"agg": 1}, "first_port": free_first_port()}],
    }
    file = planes.directory / "hosts.yaml"
    file.write_text(yaml.safe_dump(document))
    words_of_serve = ("--engine", "paced", "--model", "synthetic:tiny", "--port", str(free_port()))
    code = app.run(["serve", "--hosts", str(file), *words_of_serve, "-o", str(tmp_path / "runs")])
    refused(code, words, capsys)
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(("etcd_auth", "words"), _TLS_CASES)
def test_join_says_the_same(
    etcd_auth: dict[str, str],
    words: tuple[str, ...],
    planes: Planes,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(planes.directory)
    typed = ",".join(f"{name}={file}" for name, file in etcd_auth.items())
    command = ["serve", "join", "--etcd", planes.etcd.url, "--name", "x", "-o", str(tmp_path / "runs")]
    refused(app.run([*command, "--etcd-auth", typed]), words, capsys)


def test_http_where_etcd_wants_tls_is_said(
    planes: Planes, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    plain = planes.etcd.url.replace("https:", "http:")
    refused(app.run(["serve", "join", "--etcd", plain, "--name", "x"]), ("like a TLS server", "https:"), capsys)


def refused(code: int, words: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    said = capsys.readouterr().err
    assert code in (2, 4) and said.startswith("trtx: ") and said.count("\n") == 1, said
    for word in words:
        assert word in said
    assert _PASSWORD not in said and "_ssl.c" not in said
