"""The client of etcd's gateway, against a real etcd: keys, leases, other endpoints, passwords, certificates."""

from __future__ import annotations

import os
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from processes import free_port
from services import EtcdService, certificates, etcd

from trtx.errors import UsageError
from trtx.planes.credentials import EtcdAuth, EtcdSecrets
from trtx.planes.etcd import Absent, Delete, Etcd, KeyValue, Put, Unchanged
from trtx.planes.etcd_errors import EtcdError, EtcdUnreachable
from trtx.planes.published_plan import (
    Standing,
    add_share,
    publish_plan,
    published_names,
    read_hosts,
    read_plan,
    read_standing,
    remove_share,
    withdraw_plan,
)

pytestmark = pytest.mark.slow
PATIENT_S = 30.0  # where no limit is what is asked: a busy machine answers late


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EtcdService]:
    with etcd(tmp_path_factory.mktemp("etcd")) as running:
        yield running


@pytest.fixture
def client(service: EtcdService) -> Iterator[Etcd]:
    with Etcd([service.url], timeout_s=PATIENT_S) as etcd:
        yield etcd
        etcd.delete("t/", is_prefix=True)


def test_keys_are_put_read_in_order_and_deleted(client: Etcd) -> None:
    value = bytes(range(256))
    client.put("t/b", value)
    client.put("t/a", b"")
    assert client.get("t/b") == value
    assert client.get("t/absent") is None
    assert client.range("t/", is_prefix=True) == (KeyValue("t/a", b"", 0), KeyValue("t/b", value, 0))
    assert [entry.value for entry in client.range("t/", is_prefix=True, keys_only=True)] == [b"", b""]
    assert client.delete("t/", is_prefix=True) == 2
    assert client.range("t/", is_prefix=True) == ()


def test_a_lease_that_is_revoked_takes_all_its_keys_along_and_no_others(client: Etcd) -> None:
    lease = client.grant(60)
    client.put("t/leased", b"1", lease=lease)
    client.put("t/kept", b"2")
    assert client.range("t/leased")[0].lease == lease
    found = client.lease(lease)
    assert found is not None
    assert found.granted_s == 60
    assert 0 < found.left_s <= 60
    assert client.revoke(lease)
    assert [entry.key for entry in client.range("t/", is_prefix=True)] == ["t/kept"]
    assert client.lease(lease) is None
    assert not client.revoke(lease)


def test_its_status_names_a_version_and_a_leader(client: Etcd) -> None:
    status = client.status()
    assert status.version.count(".") == 2
    assert status.has_leader
    assert status.alarms == ()
    assert "etcd_disk_wal_fsync_duration_seconds_bucket" in client.metrics()
    assert client.ahead_s is not None
    assert abs(client.ahead_s) < 30  # the same machine's clock, to a second, read while it may be busy


def test_an_endpoint_that_is_away_costs_its_share_of_the_time_and_the_next_answers(service: EtcdService) -> None:
    with socket.socket() as silent:  # it listens, and its backlog takes connections that nobody answers
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        nobody = f"http://127.0.0.1:{free_port()}"
        endpoints = [nobody, f"http://127.0.0.1:{silent.getsockname()[1]}", service.url]
        with Etcd(endpoints, timeout_s=6.0) as client:
            assert client.get("t/absent") is None
            silent.setblocking(False)
            silent.accept()[0].close()
            assert client.get("t/absent") is None  # the one that answered is asked first
            with pytest.raises(BlockingIOError):
                silent.accept()


def test_where_nobody_answers_each_is_told_with_its_reason_within_the_time() -> None:
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        port = silent.getsockname()[1]
        nobody = free_port()
        client = Etcd([f"http://127.0.0.1:{nobody}", f"http://127.0.0.1:{port}"], timeout_s=0.5)
        with pytest.raises(EtcdUnreachable) as error:
            client.get("a")
    assert f"127.0.0.1:{nobody}: Connection refused" in str(error.value)
    assert f"127.0.0.1:{port}: no answer in time" in str(error.value)


def test_it_answers_again_after_etcd_was_restarted(tmp_path: Path) -> None:
    with etcd(tmp_path) as service, Etcd([service.url], timeout_s=PATIENT_S) as client:
        client.put("t/a", b"1")
        service.end()
        with pytest.raises(EtcdUnreachable):
            client.get("t/a")
        service.start()
        assert _soon(client) == b"1"


def _soon(client: Etcd) -> bytes | None:
    """It listens before it has a leader, and says so until then."""
    deadline = time.monotonic() + 60
    while True:
        try:
            return client.get("t/a")
        except EtcdUnreachable:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.05)


def test_what_is_no_etcd_is_said_to_be_none(tmp_path: Path) -> None:
    server = subprocess.Popen(
        ["python3", "-c", "import http.server as h; s = h.HTTPServer(('127.0.0.1', 0), h.SimpleHTTPRequestHandler); "
         "print(s.server_port, flush=True); s.serve_forever()"],
        stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, cwd=tmp_path,
    )  # fmt: skip
    try:
        assert server.stdout is not None
        port = int(server.stdout.readline())
        with pytest.raises(EtcdError, match="refuses /v3/kv/range"):
            Etcd([f"http://127.0.0.1:{port}"]).get("a")
    finally:
        server.kill()
        server.wait()


@pytest.mark.parametrize(
    ("endpoints", "uses_tls", "expected"),
    [
        ([], False, "no etcd is named"),
        (["127.0.0.1:2379"], False, "expected http://HOST:PORT"),
        (["http://me:secret-word@h:2379"], False, "etcd is 'http://h:2379' and more"),
        (["http://h:2379/v3"], False, "nothing else in it"),
        (["http://h"], False, "expected http://HOST:PORT"),
        (["https://h:2379"], False, "etcd_auth with ca, certificate and key"),
        (["http://h:2379"], True, "expected https://"),
    ],
)
def test_an_address_that_dynamo_could_not_use_is_refused(
    endpoints: list[str], uses_tls: bool, expected: str, tmp_path: Path
) -> None:
    secrets = None
    if uses_tls:
        certificates(tmp_path, ["client"])
        auth = EtcdAuth(tmp_path / "ca.pem", tmp_path / "client.pem", tmp_path / "client-key.pem")
        secrets = auth.read()
    with pytest.raises(UsageError, match=expected) as error:
        Etcd(endpoints, secrets)
    assert "secret-word" not in str(error.value)


def test_over_mtls_the_right_certificate_gets_in_and_none_or_anothers_does_not(tmp_path: Path) -> None:
    ours, others = tmp_path / "ours", tmp_path / "others"
    certificates(ours)
    certificates(others, ["client"])
    flags = ["--cert-file", "server.pem", "--key-file", "server-key.pem", "--trusted-ca-file", "ca.pem"]
    flags = [str(ours / flag) if flag.endswith(".pem") else flag for flag in flags]
    with etcd(tmp_path / "etcd", *flags, "--client-cert-auth", scheme="https") as service:
        auth = EtcdAuth(ours / "ca.pem", ours / "client.pem", ours / "client-key.pem")
        with Etcd([service.url], auth.read(), timeout_s=PATIENT_S) as client:
            client.put("t/a", b"1")
            assert client.get("t/a") == b"1"
            lease = client.grant(60)
            assert client.revoke(lease)
        again = EtcdSecrets.of_environment(auth.read().environment())
        assert again is not None
        with Etcd([service.url], again, timeout_s=PATIENT_S) as client:
            assert client.get("t/a") == b"1"
        stranger = EtcdAuth(ours / "ca.pem", others / "client.pem", others / "client-key.pem")
        with pytest.raises(EtcdUnreachable):
            Etcd([service.url], stranger.read()).get("t/a")
        mistrusting = EtcdAuth(others / "ca.pem", ours / "client.pem", ours / "client-key.pem")
        with pytest.raises(EtcdUnreachable, match="its certificate is not trusted"):
            Etcd([service.url], mistrusting.read()).get("t/a")
        with pytest.raises(EtcdUnreachable):
            Etcd([service.url.replace("https", "http")]).get("t/a")


def test_an_etcd_whose_certificate_keeps_its_own_gateway_out_is_told_so(tmp_path: Path) -> None:
    certificates(tmp_path, server_usage="serverAuth")
    flags = ["--cert-file", "server.pem", "--key-file", "server-key.pem", "--trusted-ca-file", "ca.pem"]
    flags = [str(tmp_path / flag) if flag.endswith(".pem") else flag for flag in flags]
    secrets = EtcdAuth(tmp_path / "ca.pem", tmp_path / "client.pem", tmp_path / "client-key.pem").read()
    with (
        etcd(tmp_path / "etcd", *flags, "--client-cert-auth", scheme="https") as service,
        pytest.raises(EtcdUnreachable, match="certificate lacks extendedKeyUsage clientAuth"),
    ):
        Etcd([service.url], secrets, timeout_s=10.0).get("t/a")


def test_a_password_gets_in_again_after_its_token_has_ended_and_a_wrong_one_never(tmp_path: Path) -> None:
    with etcd(tmp_path / "etcd", "--auth-token-ttl", "1") as service:
        _protect(service, "right word")
        (tmp_path / "password").write_text("right word\n")
        (tmp_path / "wrong").write_text("wrong word")
        auth = EtcdAuth(username="trtx", password_file=tmp_path / "password")
        with Etcd([service.url], auth.read(), timeout_s=PATIENT_S) as client:
            client.put("v1/a", b"1")
            time.sleep(2.5)  # a simple token of 1 s has ended then
            assert client.get("v1/a") == b"1"
            with pytest.raises(EtcdError, match="give it a role with v1/ and trtx/"):
                client.put("elsewhere", b"1")
        with pytest.raises(EtcdError, match="rejects the credentials") as error:
            Etcd([service.url], EtcdAuth(username="trtx", password_file=tmp_path / "wrong").read()).get("v1/a")
        assert "wrong word" not in str(error.value)
        with pytest.raises(EtcdError, match="rejects the credentials"):
            Etcd([service.url]).get("v1/a")


def _protect(service: EtcdService, password: str) -> None:
    """User trtx with all of v1/, and root; by the gateway, as etcdctl is of another package."""
    with Etcd([service.url], timeout_s=PATIENT_S) as client:
        for path, body in (
            ("user/add", {"name": "root", "password": "root"}),
            ("role/add", {"name": "root"}),
            ("user/grant", {"user": "root", "role": "root"}),
            ("user/add", {"name": "trtx", "password": password}),
            ("role/add", {"name": "v1"}),
            ("role/grant", {"name": "v1", "perm": {"permType": "READWRITE", "key": "djEv", "range_end": "djEw"}}),
            ("user/grant", {"user": "trtx", "role": "v1"}),
            ("enable", {}),
        ):
            client._ask(f"/v3/auth/{path}", body)


def test_a_lease_that_is_kept_alive_has_its_whole_time_again_and_one_that_ended_has_none(client: Etcd) -> None:
    lease = client.grant(60)
    assert client.keep_alive(lease)
    client.revoke(lease)
    assert not client.keep_alive(lease)


def test_changes_are_made_together_or_not_at_all(client: Etcd) -> None:
    assert client.commit([Absent("t/a")], [Put("t/a", b"1"), Put("t/b", b"2")])
    assert not client.commit([Absent("t/a"), Absent("t/c")], [Put("t/c", b"3"), Delete("t/b")])
    assert not client.commit([Unchanged("t/a", b"other")], [Delete("t/b")])
    assert not client.commit([Unchanged("t/absent", b"")], [Delete("t/b")])
    assert not client.commit([Absent("t/", is_prefix=True)], [Delete("t/b")])
    assert client.range("t/", is_prefix=True) == (KeyValue("t/a", b"1", 0), KeyValue("t/b", b"2", 0))
    assert client.commit([Unchanged("t/a", b"1"), Absent("t/c", is_prefix=True)], [Delete("t/b"), Put("t/a", b"4")])
    assert client.range("t/", is_prefix=True) == (KeyValue("t/a", b"4", 0),)


def test_a_plan_is_kept_until_it_is_withdrawn_which_a_share_that_runs_prevents(client: Etcd) -> None:
    lease = client.grant(60)
    assert read_plan(client, "qwen3") is None
    assert not publish_plan(client, "qwen3", b"", "node1", lease, instead_of=b"one that is not there")
    assert publish_plan(client, "qwen3", b"\x00first", "node1", lease, instead_of=None)
    assert read_plan(client, "qwen3") == b"\x00first"
    assert not publish_plan(client, "qwen3", b"\x00second", "node2", lease, instead_of=b"\x00first")
    assert not add_share(client, "qwen3", "node2", lease, plan=b"\x00second")
    assert add_share(client, "qwen3", "node2", lease, plan=b"\x00first")
    assert read_standing(client, "qwen3") == Standing(b"\x00first", frozenset({"node1", "node2"}))
    assert read_hosts(client, "qwen3") == (True, {"node1", "node2"})
    assert published_names(client) == ("qwen3",)
    assert not withdraw_plan(client, "qwen3")
    client.revoke(lease)
    assert publish_plan(client, "qwen3", b"\x00second", "node2", client.grant(60), instead_of=b"\x00first")
    remove_share(client, "qwen3", "node2")
    assert withdraw_plan(client, "qwen3")
    assert read_standing(client, "qwen3") == Standing(None, frozenset())
    assert published_names(client) == ()


def test_a_plan_that_etcd_takes_is_as_large_as_is_said(client: Etcd) -> None:
    assert publish_plan(client, "large", os.urandom(1 << 20), "node1", 0, instead_of=None)
    remove_share(client, "large", "node1")
    assert withdraw_plan(client, "large")
    with pytest.raises(UsageError, match="1,048,577 bytes"):
        publish_plan(client, "large", bytes((1 << 20) + 1), "node1", 0, instead_of=None)


@pytest.mark.parametrize("name", ["", "a/b", "../etc", "-a", "a" * 64, "a\n"])
def test_a_name_that_would_be_another_key_is_refused(client: Etcd, name: str) -> None:
    with pytest.raises(UsageError, match="is not a valid topology name"):
        publish_plan(client, name, b"", "node1", 0, instead_of=None)
