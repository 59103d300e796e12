"""What makes an etcd or a NATS unfit, of real ones: an open one, one that demands TLS, one that lets nobody in."""

from __future__ import annotations

import math
import socket
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from processes import free_port
from services import certificates, etcd, nats

from trtx.errors import LaunchError, UsageError
from trtx.planes.credentials import EtcdAuth, NatsAuth
from trtx.planes.fitness import (
    EtcdEndpoint,
    Unfit,
    fit_or_refuse,
    judge_cluster,
    judge_etcd,
    judge_nats,
    look_at_etcd,
    wal_p99_ms,
)
from trtx.planes.nats import NatsAnswer, ask_nats

pytestmark = pytest.mark.slow


def told(found: Iterator[Unfit]) -> list[tuple[str, str]]:
    return [(one.severity, one.seen) for one in found]


def of_nats(answer: NatsAnswer, context_length: int | None = 4096) -> list[tuple[str, str]]:
    return told(judge_nats("nats://10.0.0.1:4222", answer, context_length=context_length, block_tokens=32))


def test_an_etcd_on_every_interface_is_seen_to_be_open_and_one_with_certificates_is_not(tmp_path: Path) -> None:
    with etcd(tmp_path / "open", host="0.0.0.0") as service:
        seen = look_at_etcd(f"http://127.0.0.1:{service.port}", None)
        assert (seen.is_open, seen.listens_on_all, seen.has_leader) == (True, True, True)
        assert seen.answers_in_ms is not None and seen.wal_p99_ms is not None
        assert (
            told(judge_etcd(replace(seen, answers_in_ms=1.0, wal_p99_ms=1.0))) == []
        )  # loopback: nobody else is there
        [(severity, sentence)] = told(
            judge_etcd(replace(seen, url="http://10.0.0.1:2379", answers_in_ms=1.0, wal_p99_ms=1.0))
        )
        assert severity == "warning"
        assert "listens on every interface without authentication" in sentence
    certificates(tmp_path)
    flags = ["--cert-file", "server.pem", "--key-file", "server-key.pem", "--trusted-ca-file", "ca.pem"]
    flags = [str(tmp_path / flag) if flag.endswith(".pem") else flag for flag in flags]
    auth = EtcdAuth(tmp_path / "ca.pem", tmp_path / "client.pem", tmp_path / "client-key.pem")
    with etcd(tmp_path / "closed", *flags, "--client-cert-auth", scheme="https") as service:
        seen = look_at_etcd(service.url, auth, timeout_s=10.0)
        assert (seen.problem, seen.is_open, seen.listens_on_all) == (None, False, False)
    gone = look_at_etcd(service.url, auth)
    [(severity, sentence)] = told(judge_etcd(gone))
    assert severity == "failed"
    assert "Connection refused" in sentence


def test_an_etcd_that_is_away_is_a_risk_where_another_answers_and_a_refusal_where_none_does() -> None:
    away = EtcdEndpoint("http://10.0.0.1:2379", problem="etcd does not answer")
    here = EtcdEndpoint("http://10.0.0.2:2379", version="3.5.1", is_open=False)
    assert [[one.severity for one in amiss] for _, amiss in judge_cluster([away, here])] == [["warning"], []]
    assert [[one.severity for one in amiss] for _, amiss in judge_cluster([away])] == [["failed"]]


def test_nats_tells_its_payload_and_whom_it_lets_in(tmp_path: Path) -> None:
    (tmp_path / "right").write_text("right word\n")
    (tmp_path / "wrong").write_text("wrong word\n")
    with nats(tmp_path / "open", "max_payload: 8192") as service:
        answer = ask_nats(f"nats://127.0.0.1:{service.port}")
        assert (answer.problem, answer.refusal, answer.auth_required, answer.max_payload_bytes) == (
            None,
            None,
            False,
            8192,
        )
        # 128 blocks of 64 bytes and 1 KiB.
        assert [severity for severity, _ in of_nats(answer)] == ["warning", "failed"]
        assert "takes 8,192 bytes a message" in of_nats(answer)[1][1]
        assert [severity for severity, _ in of_nats(replace(answer, max_payload_bytes=9216))] == ["warning"]
        assert [severity for severity, _ in of_nats(answer, None)] == ["warning"]
    with nats(tmp_path / "login", "authorization {user: trtx, password: 'right word'}") as service:
        url = f"nats://127.0.0.1:{service.port}"
        assert of_nats(ask_nats(url, NatsAuth(username="trtx", password_file=tmp_path / "right"))) == []
        for auth in (None, NatsAuth(username="trtx", password_file=tmp_path / "wrong")):
            answer = ask_nats(url, auth)
            assert answer.refusal == "Authorization Violation"
            [(severity, sentence)] = of_nats(answer)
            assert severity == "failed"
            assert "word" not in sentence
    with nats(tmp_path / "token", "authorization {token: 'right word'}") as service:
        answer = ask_nats(f"nats://127.0.0.1:{service.port}", NatsAuth(token_file=tmp_path / "right"))
        assert (answer.refusal, answer.auth_required) == (None, True)


def test_a_nats_that_demands_tls_is_refused_before_dynamo_panics_over_it(tmp_path: Path) -> None:
    certificates(tmp_path, ["server"])
    tls = f"tls {{cert_file: '{tmp_path / 'server.pem'}', key_file: '{tmp_path / 'server-key.pem'}'}}"
    with nats(tmp_path / "nats", tls) as service:
        answer = ask_nats(f"nats://127.0.0.1:{service.port}")
    assert answer.tls_required
    [(severity, sentence)] = of_nats(answer)
    assert severity == "failed"
    assert "end with a panic" in sentence


def test_a_nats_over_tls_is_asked_for_its_login_by_its_authority(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    certificates(tmp_path, ["server"])
    tls = f"tls {{cert_file: '{tmp_path / 'server.pem'}', key_file: '{tmp_path / 'server-key.pem'}'}}"
    (tmp_path / "right").write_text("right word")
    (tmp_path / "wrong").write_text("wrong word")
    with nats(tmp_path / "nats", tls + "\nauthorization {user: trtx, password: 'right word'}") as service:
        url = f"tls://127.0.0.1:{service.port}"
        stranger = ask_nats(url)
        monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "ca.pem"))
        right, wrong = (ask_nats(url, NatsAuth("trtx", tmp_path / name)) for name in ("right", "wrong"))
    assert stranger.problem is not None and "is not trusted" in stranger.problem and "SSL_CERT_FILE" in stranger.problem
    assert (right.problem, right.refusal, right.tls_required) == (None, None, False)
    assert wrong.refusal == "Authorization Violation"
    with nats(tmp_path / "plain") as service:
        assert (
            ask_nats(f"tls://127.0.0.1:{service.port}").problem
            == "the server there speaks no TLS; write nats:// for it"
        )


def test_what_is_no_nats_or_away_is_said_so() -> None:
    assert ask_nats(f"nats://127.0.0.1:{free_port()}").problem == "Connection refused"
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        assert ask_nats(f"nats://127.0.0.1:{silent.getsockname()[1]}", timeout_s=0.3).problem == "no answer in time"
    for url in ("tls://h", "nats://h", "nats://me:secret-word@h:4222", "h:4222"):
        with pytest.raises(UsageError, match="expected nats://HOST:PORT, or tls://HOST:PORT") as error:
            ask_nats(url)
        assert "secret-word" not in str(error.value)


def test_what_fails_is_refused_with_its_fix_and_warnings_are_handed_on() -> None:
    bad = Unfit("failed", "it is away", "one that answers", "start it")
    risk = Unfit("warning", "it is open", "a password", "give it one")
    assert fit_or_refuse([risk]) == (risk,)
    with pytest.raises(LaunchError, match="^it is away; expected one that answers; start it$"):
        fit_or_refuse([risk, bad])


@pytest.mark.parametrize(
    ("counts", "p99"),
    [((99, 100, 100), 1.0), ((98, 99, 100), 2.0), ((0, 0, 100), math.inf), ((0, 0, 0), None), ((), None)],
)
def test_the_disk_is_judged_by_the_bucket_of_the_99th_percentile(counts: tuple[int, ...], p99: float | None) -> None:
    name = "etcd_disk_wal_fsync_duration_seconds_bucket"
    lines = [f'{name}{{le="{le}"}} {count}' for le, count in zip(("0.001", "0.002", "+Inf"), counts, strict=False)]
    assert wal_p99_ms("\n".join(["# HELP", *lines])) == p99
