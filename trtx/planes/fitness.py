"""Gathers facts about an etcd and a NATS, and judges whether they are fit for a topology over hosts.

The judgements are pure functions of the facts. ``trtx serve --hosts`` checks before it starts anything; ``trtx doctor
--hosts`` shows the same results as rows.
"""

from __future__ import annotations

import contextlib
import ipaddress
import re
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal
from urllib.parse import urlsplit

import psutil
from packaging.version import InvalidVersion, Version

from trtx.errors import LaunchError
from trtx.planes.credentials import EtcdAuth
from trtx.planes.etcd import Etcd
from trtx.planes.etcd_errors import EtcdError, EtcdUnreachable
from trtx.planes.nats import NatsAnswer

_OLDEST_ETCD = "3.4"
"""The gateway's paths are ``/v3/`` since this release; 3.4.23 was tested."""
_ANSWERS_WITHIN_MS = 100.0
"""etcd's own heartbeat interval: a cluster whose reads take longer elects new leaders."""
_WAL_P99_MS = 10.0
"""etcd's documented requirement for disks: the 99th percentile of ``wal_fsync_duration_seconds``."""
_READS = 5
_CLOCKS_WITHIN_S = 2.0  # HTTP dates have whole seconds
EVENT_BYTES_PER_BLOCK = 64
"""Size per KV block of the event that reports a prompt's KV; 57 were seen with Dynamo 1.4.2."""
_EVENT_BYTES = 1024  # size of an event without its blocks
_WAL_BUCKET = re.compile(r'^etcd_disk_wal_fsync_duration_seconds_bucket\{le="([^"]+)"\} (\S+)$', re.MULTILINE)

Severity = Literal["failed", "warning"]


@dataclass(frozen=True, slots=True)
class Unfit:
    """One problem. ``failed``: a topology would not work with it, or not as requested."""

    severity: Severity
    seen: str
    expected: str
    fix: str

    def __str__(self) -> str:
        return f"{self.seen}; expected {self.expected}; {self.fix}"


@dataclass(frozen=True, slots=True)
class EtcdEndpoint:
    """The facts about one endpoint. None: unknown."""

    url: str
    problem: str | None = None  # why it did not answer, or its refusal
    version: str | None = None
    has_leader: bool | None = None
    alarms: tuple[str, ...] = ()
    answers_in_ms: float | None = None  # median of a few linearizable reads
    wal_p99_ms: float | None = None  # upper bound of the histogram bucket; infinite if beyond the last one
    is_open: bool | None = None  # any client may read all keys without credentials
    listens_on_all: bool | None = None  # listens on every interface; known only if it runs on this host
    ahead_s: float | None = None  # clock offset of its host, to a second; positive: ahead of this host


def look_at_etcd(url: str, auth: EtcdAuth | None, *, timeout_s: float = 2.0) -> EtcdEndpoint:
    """Gathers the facts about one endpoint.

    Only reads. Raises UsageError for an invalid address or unreadable files.
    """
    secrets = auth.read() if auth is not None else None
    with Etcd([url], secrets, timeout_s=timeout_s) as etcd:
        try:
            status = etcd.status()
            times = [_read_ms(etcd) for _ in range(_READS)]
        except EtcdError as error:
            return EtcdEndpoint(url, problem=str(error))
        fsync = None
        with contextlib.suppress(EtcdError):  # metrics may be served on another address (--listen-metrics-urls)
            fsync = wal_p99_ms(etcd.metrics())
        ahead_s = etcd.ahead_s
    return EtcdEndpoint(
        url,
        version=status.version,
        has_leader=status.has_leader,
        alarms=status.alarms,
        answers_in_ms=statistics.median(times),
        wal_p99_ms=fsync,
        is_open=_is_open(url, timeout_s),
        listens_on_all=_listens_on_all(url),
        ahead_s=ahead_s,
    )


def judge_cluster(endpoints: Sequence[EtcdEndpoint]) -> Iterator[tuple[EtcdEndpoint, tuple[Unfit, ...]]]:
    """The problems of each endpoint.

    An endpoint that does not answer is only a warning if another one does, because clients then use that one.
    """
    answers = any(endpoint.problem is None for endpoint in endpoints)
    for endpoint in endpoints:
        found = tuple(judge_etcd(endpoint))
        if endpoint.problem is not None and answers:
            found = tuple(replace(one, severity="warning") for one in found)
        yield endpoint, found


def judge_etcd(endpoint: EtcdEndpoint) -> Iterator[Unfit]:
    """The problems of one endpoint by itself; none if it is fit as far as the facts are known."""
    where = urlsplit(endpoint.url).netloc
    if endpoint.problem is not None:
        fix = "start it, open its port, or correct the address and etcd_auth in the hosts file"
        yield Unfit("failed", endpoint.problem, f"an etcd that answers at {where}", fix)
        return
    if not _at_least(endpoint.version, _OLDEST_ETCD):
        yield Unfit(
            "failed", f"etcd {endpoint.version or 'of no version'} at {where}", f"{_OLDEST_ETCD} or newer", "upgrade it"
        )
    if endpoint.has_leader is False:
        fix = "start its other members, or look at their logs"
        yield Unfit("failed", f"etcd at {where} has no leader", "a cluster with a majority of its members", fix)
    for alarm in endpoint.alarms:
        fix = "etcdctl alarm list; for NOSPACE: etcdctl compact and defrag, then etcdctl alarm disarm"
        yield Unfit("failed", f"etcd at {where} raises {alarm}", "no alarm", fix)
    if endpoint.answers_in_ms is not None and endpoint.answers_in_ms > _ANSWERS_WITHIN_MS:
        yield Unfit(
            "warning",
            f"etcd at {where} takes {endpoint.answers_in_ms:.0f} ms for a read",
            f"under {_ANSWERS_WITHIN_MS:g} ms",
            "give it a machine or a network of its own: leases expire if renewals are late",
        )
    if endpoint.wal_p99_ms is not None and endpoint.wal_p99_ms > _WAL_P99_MS:
        yield Unfit(
            "warning",
            f"etcd at {where} waits up to {endpoint.wal_p99_ms:g} ms for its disk (p99 of its log's fsync)",
            f"under {_WAL_P99_MS:g} ms",
            "put its data on a local SSD of its own",
        )
    if endpoint.ahead_s is not None and abs(endpoint.ahead_s) > _CLOCKS_WITHIN_S:
        side = "ahead of" if endpoint.ahead_s > 0 else "behind"
        yield Unfit(
            "warning",
            f"the clock of etcd's host at {where} is {abs(endpoint.ahead_s):.0f} s {side} this one's",
            f"within {_CLOCKS_WITHIN_S:g} s",
            "run chrony or another NTP client on both: logs and certificates go by clocks",
        )
    if endpoint.is_open and not _is_loopback(where):
        yield _judge_open(endpoint, where)


def _judge_open(endpoint: EtcdEndpoint, where: str) -> Unfit:
    expected = "certificates of both sides, or one private address"
    risk = "anyone who can reach it can read and redirect every topology's traffic, and choose what joining hosts serve"
    if endpoint.listens_on_all:
        fix = "give it --client-cert-auth and etcd_auth's three files, or --listen-client-urls with one private address"
        return Unfit(
            "warning", f"etcd at {where} listens on every interface without authentication: {risk}", expected, fix
        )
    fix = "give it --client-cert-auth and etcd_auth's three files, or keep its network to the topology's hosts"
    return Unfit("warning", f"etcd at {where} requires no authentication: {risk}", expected, fix)


def judge_nats(
    url: str, answer: NatsAnswer, *, context_length: int | None, block_tokens: int | None
) -> Iterator[Unfit]:
    """The problems of a NATS that carries events.

    ``context_length`` in tokens and ``block_tokens``, tokens per KV block, belong to the model to be served. If either
    is None, the payload limit is not checked.
    """
    where = urlsplit(url).netloc
    if answer.problem is not None:
        fix = "start nats-server there, open its port, or correct the address in the hosts file"
        yield Unfit("failed", f"NATS at {where} does not answer ({answer.problem})", f"a NATS server at {where}", fix)
        return
    if answer.tls_required:
        yield Unfit(
            "failed",
            f"NATS at {where} demands TLS, and Dynamo 1.6.1's processes end with a panic if they are asked without it",
            f"tls://{where} as its address",
            f"write tls://{where}, and set SSL_CERT_FILE if its certificate's authority is not one of this machine's",
        )
        return
    if answer.refusal is not None:
        fix = "set nats_auth to a user and a password file that it knows" if answer.auth_required else "look at its log"
        yield Unfit(
            "failed", f"NATS at {where} refuses these credentials ({answer.refusal})", "a login that it takes", fix
        )
    if not answer.auth_required and not _is_loopback(where):
        yield Unfit(
            "warning",
            f"NATS at {where} requires no authentication: anyone who can reach it can read and forge events",
            "a user and a password, on a private network",
            "give it authorization {user, password} and set nats_auth in the hosts file",
        )
    if answer.max_payload_bytes is not None and context_length is not None and block_tokens is not None:
        needed = -(-context_length // block_tokens) * EVENT_BYTES_PER_BLOCK + _EVENT_BYTES
        if answer.max_payload_bytes < needed:
            yield Unfit(
                "failed",
                f"NATS at {where} takes {answer.max_payload_bytes:,} bytes a message (max_payload)",
                f"{needed:,} bytes, an event of a prompt of {context_length:,} tokens in blocks of {block_tokens}",
                f"start it with max_payload: {needed} or more, or lower max_seq_len",
            )


def fit_or_refuse(found: Sequence[Unfit]) -> tuple[Unfit, ...]:
    """Returns the warnings. Raises LaunchError for the first failure; nothing has been started then."""
    for one in found:
        if one.severity == "failed":
            raise LaunchError(str(one))
    return tuple(found)


def wal_p99_ms(metrics: str) -> float | None:
    """Upper bound in ms of the bucket with the 99th percentile of etcd's fsync histogram; None without a histogram."""
    buckets = [(float(bound), float(count)) for bound, count in _WAL_BUCKET.findall(metrics)]
    if not buckets or buckets[-1][1] == 0:
        return None
    wanted = 0.99 * buckets[-1][1]
    return next(bound for bound, count in buckets if count >= wanted) * 1e3


def _read_ms(etcd: Etcd) -> float:
    began = time.perf_counter()
    etcd.range("v1/mdc/", is_prefix=True, keys_only=True)
    return (time.perf_counter() - began) * 1e3


def _is_open(url: str, timeout_s: float) -> bool | None:
    """Whether a request without credentials succeeds. Not tested over TLS, which requires a certificate."""
    if url.startswith("https:"):
        return False
    with Etcd([url], timeout_s=timeout_s) as anonymous:
        try:
            anonymous.range("v1/mdc/", is_prefix=True, keys_only=True)
        except EtcdUnreachable:
            return None
        except EtcdError:
            return False
    return True


def _listens_on_all(url: str) -> bool | None:
    """Whether the listener on this host's port is bound to a wildcard address; None: another host, or unknown."""
    address = urlsplit(url)
    own = {entry.address for entries in psutil.net_if_addrs().values() for entry in entries}
    if address.hostname not in own:
        return None
    try:
        listening = [entry for entry in psutil.net_connections("tcp") if entry.status == psutil.CONN_LISTEN]
    except (psutil.Error, OSError):
        return None
    bound = {ip for ip, port in (entry.laddr for entry in listening if entry.laddr) if port == address.port}
    return bool(bound & {"0.0.0.0", "::"}) if bound else None


def _is_loopback(where: str) -> bool:
    host = urlsplit(f"//{where}").hostname or ""
    with contextlib.suppress(ValueError):
        return ipaddress.ip_address(host).is_loopback
    return host == "localhost"


def _at_least(version: str | None, oldest: str) -> bool:
    try:
        return version is not None and Version(version) >= Version(oldest)
    except InvalidVersion:
        return False
