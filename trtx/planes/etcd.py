"""A small client of etcd's HTTP gateway (``/v3/…``) for keys, leases and status. Uses only the standard library.

Dynamo's own client uses gRPC. This one does what Dynamo's processes can't do themselves: remove a dead one, inspect
etcd from outside, store a plan. A request goes to the endpoint that answered last, then to the others, within one
timeout in total.
"""

from __future__ import annotations

import base64
import contextlib
import email.utils
import http.client
import json
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from trtx.config.wording import shown
from trtx.planes.credentials import EtcdSecrets, check_endpoints
from trtx.planes.etcd_errors import (
    NOT_FOUND,
    UNAUTHENTICATED,
    UNAVAILABLE,
    EtcdError,
    EtcdRefusal,
    EtcdUnreachable,
    refusal_of,
    unreachable_because,
)

# maximum size of a response; etcd limits requests to 1.5 MiB, and a topology has tens of records
_MOST_BYTES = 64 << 20


@dataclass(frozen=True, slots=True)
class KeyValue:
    """A key and its current value. ``lease`` 0: the key stays until it is deleted."""

    key: str
    value: bytes
    lease: int


@dataclass(frozen=True, slots=True)
class EtcdLease:
    """A lease's granted and remaining time in whole seconds, as reported by etcd."""

    granted_s: int
    left_s: int


@dataclass(frozen=True, slots=True)
class Absent:
    """Condition: the key does not exist or, with ``is_prefix``, no key has this prefix."""

    key: str
    is_prefix: bool = False


@dataclass(frozen=True, slots=True)
class Unchanged:
    """Condition: the key has this value."""

    key: str
    value: bytes


@dataclass(frozen=True, slots=True)
class Put:
    """Writes a key. ``lease`` 0: it stays until it is deleted."""

    key: str
    value: bytes
    lease: int = 0


@dataclass(frozen=True, slots=True)
class Delete:
    key: str


@dataclass(frozen=True, slots=True)
class Status:
    """Status of the etcd member that answered."""

    version: str
    has_leader: bool
    alarms: tuple[str, ...]  # such as "memberID:1 alarm:NOSPACE"; reported since etcd 3.4


class Etcd:
    """A client of one etcd cluster. Thread-safe; requests are serialised."""

    def __init__(self, endpoints: Sequence[str], secrets: EtcdSecrets | None = None, *, timeout_s: float = 2.0) -> None:
        """Opens no connection yet. ``timeout_s``: per request, over all endpoints.

        Raises UsageError for invalid addresses, ValueError for unusable certificates.
        """
        uses_tls = secrets is not None and secrets.uses_tls
        check_endpoints(endpoints, uses_tls=uses_tls)
        self.endpoints = tuple(endpoint.rstrip("/") for endpoint in endpoints)
        self._secrets = secrets
        self._context = secrets.context() if secrets is not None and uses_tls else None
        self._timeout_s = timeout_s
        # clock offset of the host that answered last, to a second; positive: ahead of this host
        self.ahead_s: float | None = None
        self._first = 0  # the endpoint that answered last
        self._connection: http.client.HTTPConnection | None = None  # connection to that endpoint
        self._token: str | None = None
        self._lock = threading.Lock()

    def __enter__(self) -> Etcd:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        with self._lock:
            self._hang_up()

    def range(self, key: str, *, is_prefix: bool = False, keys_only: bool = False) -> tuple[KeyValue, ...]:
        """The key, or all keys with this prefix, in key order. Raises EtcdError."""
        body = _keys(key, is_prefix) | ({"keys_only": True} if keys_only else {})
        entries = self._ask("/v3/kv/range", body).get("kvs", ())
        return tuple(
            KeyValue(
                base64.b64decode(entry["key"]).decode(errors="replace"),
                base64.b64decode(entry.get("value", "")),
                int(entry.get("lease", 0)),
            )
            for entry in entries
        )

    def get(self, key: str) -> bytes | None:
        """The key's value, or None. Raises EtcdError."""
        found = self.range(key)
        return found[0].value if found else None

    def put(self, key: str, value: bytes, *, lease: int = 0) -> None:
        """Writes a key. ``lease`` 0: it stays until it is deleted. Raises EtcdError."""
        self._ask("/v3/kv/put", {"key": _text(key.encode()), "value": _text(value), "lease": str(lease)})

    def delete(self, key: str, *, is_prefix: bool = False) -> int:
        """Deletes the key, or all keys with this prefix. Returns the number of deleted keys. Raises EtcdError."""
        return int(self._ask("/v3/kv/deleterange", _keys(key, is_prefix)).get("deleted", 0))

    def commit(self, conditions: Sequence[Absent | Unchanged], changes: Sequence[Put | Delete]) -> bool:
        """Applies all ``changes`` atomically if all ``conditions`` hold; else changes nothing and returns False.

        Raises EtcdError.
        """
        body = {"compare": [_condition(one) for one in conditions], "success": [_change(one) for one in changes]}
        return bool(self._ask("/v3/kv/txn", body).get("succeeded", False))

    def grant(self, ttl_s: int) -> int:
        """Creates a lease, which the caller has to renew. Returns its id. Raises EtcdError."""
        return int(self._ask("/v3/lease/grant", {"TTL": str(ttl_s)})["ID"])

    def keep_alive(self, lease: int) -> bool:
        """Renews a lease for its whole time; False if it has ended. Raises EtcdError."""
        answer = self._ask("/v3/lease/keepalive", {"ID": str(lease)}).get("result", {})
        return int(answer.get("TTL", 0)) > 0

    def revoke(self, lease: int) -> bool:
        """Ends a lease, which deletes all keys attached to it; False if it does not exist. Raises EtcdError."""
        try:
            self._ask("/v3/lease/revoke", {"ID": str(lease)})
        except EtcdRefusal as error:
            if error.code == NOT_FOUND:
                return False
            raise
        return True

    def lease(self, lease: int) -> EtcdLease | None:
        """The lease's times, or None if it has ended. Raises EtcdError."""
        answer = self._ask("/v3/lease/timetolive", {"ID": str(lease)})
        left = int(answer.get("TTL", 0))
        return None if left < 0 else EtcdLease(int(answer.get("grantedTTL", 0)), left)

    def status(self) -> Status:
        """Status of the member that answers. Raises EtcdError."""
        answer = self._ask("/v3/maintenance/status", {})
        return Status(
            version=str(answer.get("version", "")),
            has_leader=int(answer.get("leader", 0)) != 0,
            alarms=tuple(str(error) for error in answer.get("errors", ())),
        )

    def metrics(self) -> str:
        """Metrics of the member that answers, in Prometheus's text format. Raises EtcdError."""
        with self._lock:
            return self._send("GET", "/metrics", None, time.monotonic() + self._timeout_s).decode(errors="replace")

    def _ask(self, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
        with self._lock:
            content, deadline = json.dumps(body).encode(), time.monotonic() + self._timeout_s
            try:
                answer = self._send("POST", path, content, deadline)
            except (EtcdRefusal, EtcdUnreachable) as error:
                # A token is valid for 5 minutes. For an invalid one, some releases close the connection instead of
                # answering (etcd-io/etcd #20332).
                is_old = isinstance(error, EtcdUnreachable) or error.code == UNAUTHENTICATED
                if self._token is None or not is_old:
                    raise
                self._token = None
                answer = self._send("POST", path, content, deadline)
        try:
            document = json.loads(answer)
        except ValueError:
            document = None
        if not isinstance(document, dict):
            raise EtcdError(f"etcd at {self._where} answers {path} with {shown(answer.decode(errors='replace'))!r}")
        return document

    def _send(self, method: str, path: str, content: bytes | None, deadline: float) -> bytes:
        """Sends a request to each endpoint in turn until one answers."""
        problems = []
        for number in range(len(self.endpoints)):
            # The remaining endpoints share the remaining time, so that one that drops packets can't use up all of it.
            limit = time.monotonic() + max(0.0, deadline - time.monotonic()) / (len(self.endpoints) - number)
            try:
                return self._send_to_first(method, path, content, limit)
            except EtcdRefusal as error:
                if error.code != UNAVAILABLE:
                    raise
                problems.append(f"{self._where}: {error.message}{self._hint(error)}")
            except (OSError, http.client.HTTPException, ValueError, LookupError) as error:
                problems.append(f"{self._where}: {unreachable_because(error)}")
            self._hang_up()
            self._first = (self._first + 1) % len(self.endpoints)
        raise EtcdUnreachable(f"etcd does not answer ({'; '.join(problems)})")

    def _send_to_first(self, method: str, path: str, content: bytes | None, limit: float) -> bytes:
        secrets = self._secrets
        if secrets is not None and not secrets.uses_tls and self._token is None and path.startswith("/v3/"):
            name = {"name": secrets.username, "password": secrets.password}
            answer = self._exchange("POST", "/v3/auth/authenticate", json.dumps(name).encode(), limit)
            self._token = str(json.loads(answer)["token"])
        return self._exchange(method, path, content, limit)

    def _exchange(self, method: str, path: str, content: bytes | None, limit: float) -> bytes:
        headers = {"Content-Type": "application/json"} if content is not None else {}
        if self._token is not None:
            headers["Authorization"] = self._token
        was_open = self._connection is not None
        try:
            return self._exchange_once(method, path, content, headers, limit)
        except ConnectionError:
            self._hang_up()
            if not was_open:  # on an open connection, etcd may have restarted since the last request
                raise
            return self._exchange_once(method, path, content, headers, limit)

    def _exchange_once(
        self, method: str, path: str, content: bytes | None, headers: Mapping[str, str], limit: float
    ) -> bytes:
        connection = self._connection or self._connect(limit)
        try:
            assert connection.sock is not None
            connection.sock.settimeout(_left(limit))
            connection.request(method, path, content, dict(headers))
            response = connection.getresponse()
            parts, size = [], 0
            while part := response.read1(1 << 16):
                parts.append(part)
                size += len(part)
                if size > _MOST_BYTES:
                    raise ValueError(f"its answer is longer than {_MOST_BYTES >> 20} MiB")
                if connection.sock is not None:
                    connection.sock.settimeout(_left(limit))
        except BaseException:
            self._hang_up()
            raise
        response.close()  # after read1, a response with a length stays open and would block the next request
        self.ahead_s = _ahead_s(response.getheader("Date"))
        if connection.sock is None:  # the server closes the connection after this response
            self._connection = None
        if response.status != 200:
            raise refusal_of(self._where, path, response.status, b"".join(parts))
        return b"".join(parts)

    def _connect(self, limit: float) -> http.client.HTTPConnection:
        address = urlsplit(self.endpoints[self._first])
        host, port, seconds = address.hostname or "", address.port, _left(limit)
        connection: http.client.HTTPConnection
        if self._context is not None:
            connection = http.client.HTTPSConnection(host, port, timeout=seconds, context=self._context)
        else:
            connection = http.client.HTTPConnection(host, port, timeout=seconds)
        connection.connect()
        self._connection = connection
        return connection

    def _hint(self, error: EtcdRefusal) -> str:
        """A remedy for an etcd whose HTTP gateway can't connect to etcd itself, or "".

        The gateway is a client of its own etcd and uses the server's certificate (etcd-io/etcd #16590). Seen with 3.4:
        it reports "connection error: …" or "connection closed".
        """
        if self._context is None or not error.message.startswith(("connection error", "connection closed")):
            return ""
        return ": etcd rejects its own HTTP gateway, because etcd's certificate lacks extendedKeyUsage clientAuth"

    def _hang_up(self) -> None:
        if self._connection is not None:
            with contextlib.suppress(OSError):
                self._connection.close()
            self._connection = None

    @property
    def _where(self) -> str:
        return urlsplit(self.endpoints[self._first]).netloc


def _keys(key: str, is_prefix: bool) -> dict[str, Any]:
    encoded = key.encode()
    if not is_prefix:
        return {"key": _text(encoded)}
    return {"key": _text(encoded), "range_end": _text(encoded[:-1] + bytes((encoded[-1] + 1,)))}


def _condition(one: Absent | Unchanged) -> dict[str, Any]:
    if isinstance(one, Unchanged):
        return _keys(one.key, False) | {"target": "VALUE", "result": "EQUAL", "value": _text(one.value)}
    return _keys(one.key, one.is_prefix) | {"target": "CREATE", "result": "EQUAL", "create_revision": "0"}


def _change(one: Put | Delete) -> dict[str, Any]:
    if isinstance(one, Delete):
        return {"request_delete_range": _keys(one.key, False)}
    return {"request_put": _keys(one.key, False) | {"value": _text(one.value), "lease": str(one.lease)}}


def _text(value: bytes) -> str:
    return base64.b64encode(value).decode()


def _ahead_s(date: str | None) -> float | None:
    """Clock offset from an HTTP Date header. The header has whole seconds, so ignore differences below one second."""
    try:
        # The header truncates to whole seconds: on average, half a second has passed.
        return None if date is None else email.utils.parsedate_to_datetime(date).timestamp() + 0.5 - time.time()
    except ValueError:
        return None


def _left(limit: float) -> float:
    """Seconds until ``limit``. Raises TimeoutError once it has passed."""
    if (left := limit - time.monotonic()) <= 0:
        raise TimeoutError("no answer in time")
    return left
