"""``trtx serve --hosts`` as typed: what is refused, and what a dry run says of several machines."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml
from processes import free_port

from trtx.cli import app

HOST = {"address": "10.77.0.1", "device": "eth1"}


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setenv("COLUMNS", "80")


def written(tmp_path: Path, *hosts: dict[str, Any], **fields: Any) -> str:
    """A hosts file: node1, node2 … with ``hosts`` over what they have by themselves."""
    own = [
        {"name": f"node{number}", "address": f"10.77.0.{number}", "device": "eth1"} | host
        for number, host in enumerate(hosts, 1)
    ]
    document = {"name": "pair", "etcd": ["http://10.77.0.1:2379"], "nats": "nats://10.77.0.1:4222", "hosts": own}
    path = tmp_path / "hosts.yaml"
    path.write_text(yaml.safe_dump(document | fields), encoding="utf-8")
    return str(path)


def serve(tmp_path: Path, file: str, *arguments: str) -> int:
    return app.run(
        ["serve", "--hosts", file, "--dry-run", "--engine", "paced", "-o", str(tmp_path / "runs"), *arguments]
    )


ROLES = ({"roles": {"prefill": 1}}, {"roles": {"decode": 2}})


def test_a_dry_run_names_each_process_with_its_host_ports_and_environment_and_what_is_clear(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = written(tmp_path, *ROLES, lease_ttl_s=45)
    assert serve(tmp_path, file, "--mode", "disagg") == 0
    said = capsys.readouterr().out
    for words in (
        "node1 10.77.0.1, device eth1: frontend, prefill-0",
        "node2 10.77.0.2, device eth1: decode-0, decode-1",
        "decode-1: on node2, no GPU, listens on 10.77.0.2:17006 (requests), 10.77.0.2:17007 (system)",
        "frontend: on node1, no GPU, listens on 10.77.0.1:8000 (HTTP), 10.77.0.1:17000 (requests), "
        "10.77.0.1:17001 (responses), log",
        "etcd       http://10.77.0.1:2379, a lost host leaves after 45 s",
        "ETCD_LEASE_TTL=600",
        "ETCD_ENDPOINTS=http://10.77.0.1:2379",
        "NATS_SERVER=nats://10.77.0.1:4222",
        "DYN_TCP_RESPONSE_STREAM_HOST=10.77.0.1",
        "DYN_SYSTEM_HOST=10.77.0.2",
        "UCX_NET_DEVICES=eth1",
        "HTTP to the frontends: clear, no authentication",
        "etcd: clear, no authentication",
        "KV between prefill and decode workers: clear",
    ):
        assert words in said
    assert "DYN_ZMQ_BROKER_URL" not in said
    assert not (tmp_path / "runs").exists()


def test_a_dry_run_says_how_requests_and_events_are_protected(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("CERT", "KEY", "CA_CERT", "CLIENT_CA_CERT", "CLIENT_CERT", "CLIENT_KEY"):
        monkeypatch.setenv(f"DYN_TCP_TLS_{name}_PATH", f"/pem/{name}")
    file = written(tmp_path, *ROLES, nats="tls://10.77.0.1:4222")
    assert serve(tmp_path, file, "--mode", "disagg") == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "requests and answers between frontends and workers: TLS, clients need a certificate" in said
    assert "NATS, events with prompt token ids: TLS, no authentication" in said


def test_a_dry_run_of_one_host_shows_its_share_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = written(tmp_path, *ROLES)
    assert serve(tmp_path, file, "--mode", "disagg", "--this-host", "node2") == 0
    said = capsys.readouterr().out
    assert "decode-0: on node2" in said and "node1 10.77.0.1, device" not in said and "prefill-0:" not in said


def test_secrets_are_named_by_their_files_and_looked_for_beside_the_hosts_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "password").write_text("hunter2\n")
    auth = {"username": "trtx", "password_file": "password"}
    file = written(tmp_path, *ROLES, etcd_auth=auth, nats_auth=auth)
    assert serve(tmp_path, file, "--mode", "disagg") == 0
    said = capsys.readouterr().out
    assert "hunter2" not in said and "the password too" in said


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("", "hosts.yaml is empty"),
        ("# none yet\n", "hosts.yaml is empty"),
        ("- {name: node1, address: 10.77.0.1}\n", "hosts.yaml holds a list"),
        ("node1\n", "hosts.yaml holds text"),
    ],
)
def test_a_hosts_file_that_is_no_mapping_is_told_what_belongs_there(
    text: str, found: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "hosts.yaml"
    file.write_text(text, encoding="utf-8")
    assert serve(tmp_path, str(file)) == 2
    said = capsys.readouterr().err.replace("\n", " ")
    assert f"{found}; expected a mapping with etcd, nats and hosts (docs/hosts.md)" in said


@pytest.mark.parametrize(
    ("hosts", "fields", "words"),
    [
        (({"address": "127.0.0.1"}, {}), {}, ("127.0.0.1 of node1 is loopback", "network between")),
        (({"address": "169.254.1.1"}, {}), {}, ("169.254.1.1 of node1 is link-local",)),
        (({"address": "0.0.0.0"}, {}), {}, ("0.0.0.0 does not belong to one machine",)),
        (({"address": "fe80::1"}, {}), {}, ("fe80::1 is IPv6",)),
        (({"address": "node1.lan"}, {}), {}, ("'node1.lan' is no IP address",)),
        (({"address": "10.77.0.2"}, {}), {}, ("address 10.77.0.2 twice",)),
        (({"name": "node2"}, {}), {}, ("name node2 twice",)),
        (({"device": "lo"}, {}), {}, ("node1 has the device lo", "eth1 or mlx5_0:1")),
        (({"device": None}, {}), {}, ("node1 has no device",)),
        (({"device": "all"}, {}), {}, ("'all'",)),
        (({"gpus": [0, 0]}, {}), {}, ("names a GPU twice",)),
        (({"gpus": "4"}, {}), {}, ("hosts[0].gpus '4'",)),
        (({"speed": 4}, {}), {}, ("hosts[0].speed is not a field",)),
        (({"frontends": 0}, {}), {}, ("no frontend",)),
        (({}, {}), {"etcd": ["http://127.0.0.1:2379"]}, ("etcd http://127.0.0.1:2379 is another for each host",)),
        (({}, {}), {"nats": "nats://localhost:4222"}, ("nats nats://localhost:4222 is another",)),
        (({}, {}), {"nats": "ftp://10.77.0.1:4222"}, ("nats 'ftp://10.77.0.1:4222' is not one server's address",)),
        (({}, {}), {"nats": "nats://me:secret@10.77.0.1:4222"}, ("has a user in its address",)),
        (({}, {}), {"etcd": ["https://10.77.0.1:2379"]}, ("needs ca, certificate and key",)),
        (({}, {}), {"etcd": ["10.77.0.1:2379"]}, ("http://10.77.0.1:2379",)),
        (({}, {}), {"etcd": ["http://a,b:2379"]}, ("'http://a,b:2379' does not name exactly one host", "separately")),
        (({}, {}), {"nats": "nats://a,b:4222"}, ("nats 'nats://a,b:4222' does not name exactly one host",)),
        (({}, {}), {"etcd_auth": {"username": "u"}}, ("etcd_auth.password_file is missing; give it",)),
        (({}, {}), {"etcd_auth": {"username": "u", "more": 1}}, ("etcd_auth.password_file is missing; give it",)),
        (({}, {}), {"etcd_auth": {"ca": "a", "key": "k"}}, ("etcd_auth.certificate is missing; give it",)),
        (({}, {}), {"nats_auth": {"token_file": "t", "more": 1}}, ("nats_auth.more is not a field of a hosts file",)),
        (({}, {}), {"name": "a/b"}, ("name 'a/b'",)),
        (({}, {}), {"etcd": []}, ("etcd is empty; give at least one",)),
        (({}, {}), {"etcd": "http://10.77.0.1:2379"}, ("etcd is text; expected a valid list",)),
        (({}, {}), {"etcd": [""]}, ("etcd '' is not one server's address",)),
        (({}, {}), {"nats": ""}, ("nats '' is not one server's address",)),
        (({}, {}), {"nats_auth": {"username": "", "password_file": "p"}}, ("nats_auth.username is empty",)),
        (({}, {}), {"lease_ttl_s": 1}, ("lease_ttl_s 1", "greater than or equal to 5")),
        (({"roles": {"prefill": 1}}, {}), {}, ("names prefill, but --mode agg", "choose --mode disagg")),
        (({"roles": {"encode": 1}}, {}), {}, ("encode workers pass embeddings in files",)),
        (({}, {}), {}, ("no process would run on node2",)),
        (({"gpus": 1}, {}), {}, ("gpus of node1: engine paced uses no GPU",)),
        (({"first_port": 32760, "roles": {"agg": 2}}, {"roles": {"agg": 1}}), {}, ("agg-1 on node1", "above 32767")),
        (({"first_port": 7999, "roles": {"agg": 2}}, {"roles": {"agg": 1}}), {}, ("--port 8000 is one of",)),
    ],
)  # fmt: skip
def test_what_can_not_be_served_over_hosts_is_one_sentence(
    hosts: tuple[dict[str, Any], ...],
    fields: dict[str, Any],
    words: tuple[str, ...],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert serve(tmp_path, written(tmp_path, *hosts, **fields)) == 2
    said = capsys.readouterr().err
    assert said.startswith("trtx: ") and said.count("\n") == 1
    for word in words:
        assert word in said
    assert "secret" not in said


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--mode", "agg", "--port", "0"), ("--port 0 selects a different port at each start",)),
        (("--this-host", "node3"), ("--this-host 'node3' is not one of the hosts", "node1, node2")),
        (("--encode", "1"), ("--encode 1",)),
    ],
)
def test_options_that_make_no_sense_over_hosts_are_one_sentence(
    arguments: tuple[str, ...], words: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = written(tmp_path, {"roles": {"agg": 1}}, {"roles": {"agg": 1}})
    assert serve(tmp_path, file, *arguments) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    for word in words:
        assert word in said


def test_a_host_that_is_not_this_machine_serves_nothing_here(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = written(tmp_path, {"roles": {"agg": 1}}, {"roles": {"agg": 1}})
    command = ["serve", "--hosts", file, "--engine", "paced", "-o", str(tmp_path / "runs")]
    assert app.run(command) == 2
    assert "this machine has none of the hosts' addresses: 10.77.0.1 (node1)" in capsys.readouterr().err
    assert app.run([*command, "--this-host", "node2"]) == 2
    assert "--this-host node2 has address 10.77.0.2, but this machine does not" in capsys.readouterr().err
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("verb", "words"),
    [
        (("bench",), "trtx bench --url http://ADDRESS:PORT --etcd URL"),
        (("eval", "--tasks", "trtx"), "trtx eval --url http://ADDRESS:PORT"),
        (("eval", "fidelity"), "trtx eval fidelity --url http://ADDRESS:PORT"),
    ],
)
def test_what_measures_says_how_a_topology_over_hosts_is_measured(
    verb: tuple[str, ...], words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert app.run([*verb, "--hosts", written(tmp_path, *ROLES)]) == 2
    said = capsys.readouterr().err
    assert words in said and "trtx serve join" in said and said.count("\n") == 1


def test_a_device_over_which_no_kv_can_go_is_told_before_anything_starts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    down = [name for name, stats in psutil.net_if_stats().items() if not stats.isup]
    cases = {"lo:1": "and ports are of InfiniBand devices", "nowhere9": "but this machine does not (it has"}
    cases |= dict.fromkeys(down[:1], "which is down")
    for device, words in cases.items():
        host = {"address": "127.0.0.1", "device": device, "roles": {"agg": 1}}
        file = written(tmp_path, host, etcd=["http://127.0.0.1:9"], nats="nats://127.0.0.1:9")
        command = ["serve", "--hosts", file, "--engine", "paced", "--port", str(free_port())]
        assert app.run([*command, "-o", str(tmp_path / "runs")]) == 2
        said = capsys.readouterr().err
        assert f"node1 has device {device}, {words}" in said and "in the hosts file" in said, said
