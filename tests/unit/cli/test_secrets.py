"""Secrets typed where none belongs: each is refused, and neither shown nor written."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from trtx.cli import app
from trtx.config.wording import shown_address

SECRET = "hunter2-Geheim"
_NOBODY = "http://127.0.0.1:9"
_SERVE = ("--dry-run", "--engine", "paced")
_AS_AUTH = (
    SECRET,
    f"me:{SECRET}",
    f"username=me,password={SECRET}",
    f"token={SECRET}",
    f"{SECRET}=x",
    f"ca={SECRET}",
    f"username=me,password_file=p,{SECRET}",
)
_IN_ADDRESS = (
    f"//me:{SECRET}@h:2379",
    f"//me:{SECRET}@h:2379/",
    f"//me:{SECRET}/x@h:2379",
    f"//me:{SECRET}@h,i:2379",
    f"//me:{SECRET}@h",
    f"//me:{SECRET}@[::1",
    f"//{SECRET}@h:2379?x",
    f"//h:2379?password={SECRET}",
    f"//h:2379/{SECRET}",
    f"//h:2379#{SECRET}",
    f"//me:{SECRET}@127.0.0.1:port",
)


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.chdir(tmp_path)


def refused(capsys: pytest.CaptureFixture[str], *arguments: str, written: Path | None = None) -> str:
    """What is said to ``arguments``. ``written``: the one file that holds the secret, as the test wrote it."""
    code = app.run([*arguments])
    said = capsys.readouterr()
    assert code == 2, said
    assert SECRET not in said.out + said.err
    assert said.err.startswith("trtx: ") and said.err.count("\n") == 1
    files = [path for path in Path.cwd().rglob("*") if path.is_file() and path != written]
    assert not [path for path in files if SECRET in path.read_text(errors="replace")]
    return said.err


def hosts(tmp_path: Path, **fields: Any) -> Path:
    own = [{"name": f"node{n}", "address": f"10.77.0.{n}", "device": "eth1", "roles": {"agg": 1}} for n in (1, 2)]
    document = {"name": "pair", "etcd": ["http://10.77.0.1:2379"], "nats": "nats://10.77.0.1:4222", "hosts": own}
    path = tmp_path / "hosts.yaml"
    path.write_text(yaml.safe_dump(document | fields), encoding="utf-8")
    return path


@pytest.mark.parametrize(
    "fields",
    [
        *({name: value} for name in ("etcd_auth", "nats_auth") for value in (SECRET, [SECRET], {"password": SECRET})),
        {"etcd_auth": {"username": "me", "password": SECRET}},
        {"etcd_auth": {"username": [SECRET], "password_file": "p"}},
        {"etcd_auth": {"username": "me", "password_file": {"x": SECRET}}},
        {"nats_auth": {"token_file": [SECRET]}},
        {"etcd": f"http://me:{SECRET}@h:2379"},
        {"etcd": [{"user": SECRET}]},
        {"nats": [f"nats://me:{SECRET}@h:4222"]},
        {"nats": f"tls://me:{SECRET}@h:4222"},
        {"nats_password": SECRET},
        *({"etcd": [f"http:{where}"]} for where in _IN_ADDRESS),
        *({"nats": f"nats:{where}"} for where in _IN_ADDRESS),
    ],
)
def test_of_a_hosts_file_that_holds_a_secret_the_field_is_named_alone(
    fields: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = hosts(tmp_path, **fields)
    (name,) = fields
    for verb in (("serve", *_SERVE), ("doctor",), ("export", "nginx")):
        assert name in refused(capsys, *verb, "--hosts", str(path), written=path)


@pytest.mark.parametrize("text", _AS_AUTH)
@pytest.mark.parametrize(
    "arguments",
    [
        ("serve", "join", "--etcd", _NOBODY, "--name", "x", "--etcd-auth"),
        ("serve", "join", "--etcd", _NOBODY, "--name", "x", "--nats-auth"),
        ("bench", "--url", _NOBODY, "--etcd", _NOBODY, "--etcd-auth"),
    ],
)
def test_what_is_typed_as_authentication_and_is_none_is_not_repeated(
    arguments: tuple[str, ...], text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    said = refused(capsys, *arguments, text)
    assert arguments[-1] in said and "password_file=FILE" in said


@pytest.mark.parametrize("where", _IN_ADDRESS)
@pytest.mark.parametrize(
    "arguments", [("serve", "join", "--name", "x", "--etcd"), ("bench", "--url", _NOBODY, "--etcd")]
)
def test_an_address_of_etcd_with_a_secret_in_it_is_not_repeated(
    arguments: tuple[str, ...], where: str, capsys: pytest.CaptureFixture[str]
) -> None:
    refused(capsys, *arguments, f"http:{where}")


@pytest.mark.parametrize("where", [one for one in _IN_ADDRESS if "2379/h" not in one])  # a path is a place there
@pytest.mark.parametrize(
    "arguments",
    [
        ("bench", "--url"),
        ("bench", "--dry-run", "--url"),
        ("eval", "--tasks", "trtx_copying", "--url"),
        ("eval", "fidelity", "--reference", "synthetic:tiny", "--url"),
        ("eval", "parity", "--against", "synthetic:tiny", "--url"),
    ],
)
def test_an_address_with_a_secret_in_it_is_not_repeated(
    arguments: tuple[str, ...], where: str, capsys: pytest.CaptureFixture[str]
) -> None:
    refused(capsys, *arguments, f"http:{where}")


@pytest.mark.parametrize(
    "attach",
    [
        SECRET,
        {"url": _NOBODY, "api_key": SECRET},
        {"url": [f"http://me:{SECRET}@h:1"]},
        {"url": f"http://me:{SECRET}@h:1"},
        {"url": _NOBODY, "etcd": f"http://me:{SECRET}@h:1"},
        {"url": _NOBODY, "etcd": [f"http://me:{SECRET}@h:1"]},
        {"url": _NOBODY, "etcd": [[f"http://me:{SECRET}@h:1"]]},
        {"url": _NOBODY, "etcd": [_NOBODY], "etcd_auth": SECRET},
        {"url": _NOBODY, "etcd": [_NOBODY], "etcd_auth": {"password": SECRET}},
    ],
)
def test_a_secret_in_a_sweep_file_is_not_repeated(
    attach: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "sweep.yaml"
    path.write_text(yaml.safe_dump({"attach": attach}), encoding="utf-8")
    assert "sweep.yaml" in refused(capsys, "bench", str(path), written=path)


@pytest.mark.parametrize(
    "text",
    [
        f"--api-key {SECRET}",
        f"--api-key={SECRET} --bogus",
        f"--header Authorization:{SECRET}",
        f"--header X-Api-Key:{SECRET}",
        f"-H Cookie:{SECRET}",
        f"--header {SECRET}",
        f"--bogus {SECRET}",
    ],
)
def test_no_key_reaches_aiperfs_command_line(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    refused(capsys, "bench", "--dry-run", "--engine", "paced", "--model", "synthetic:tiny", "--aiperf-args", text)


@pytest.mark.parametrize(
    "arguments",
    [
        ("bench", f"--api-key={SECRET}"),
        ("eval", "--tasks", "trtx", "--api-key", SECRET),
        ("export", "nginx", "--api-keys", f"sk-{SECRET}"),
        ("export", "nginx", "--api-keys", f'"Bearer {SECRET}" ada;'),
        ("serve", "--engine", "paced", "--model", f"https://me:{SECRET}@hub.example/model"),
        *(
            ("export", "kubernetes", "--image", "r/t:1.4.2", "--engine", "torch", option, SECRET)
            for option in ("--hub-secret", "--image-pull-secret", "--tls-secret")
        ),
    ],
)
def test_a_secret_in_place_of_its_name_is_not_repeated(
    arguments: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    refused(capsys, *arguments)


def test_an_address_without_a_secret_is_shown_as_it_stands() -> None:
    assert shown_address("http://10.77.0.1:2379") == "'http://10.77.0.1:2379'"
    assert shown_address("10.77.0.1") == "'10.77.0.1'"
    assert shown_address(f"ftp://me:{SECRET}@h:1/x").startswith("'ftp://h:1' and more")


def test_bench_warns_of_a_password_file_that_others_can_read(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    command = ["bench", "--url", _NOBODY, "--etcd", _NOBODY, "--etcd-auth", "username=me,password_file=password"]
    file = tmp_path / "password"
    file.write_text(SECRET)
    for mode, warns in ((0o600, False), (0o644, True), (0o660, True)):
        file.chmod(mode)
        assert app.run([*command]) == 2
        said = capfd.readouterr().err
        assert (f"trtx: warning: other users can read or change {file}; " in said) == warns
        assert said.endswith("check --url\n") and (f"chmod 600 {file}" in said) == warns and SECRET not in said
