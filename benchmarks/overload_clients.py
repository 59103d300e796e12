"""Loads a server with more clients than it has slots, and reports how long its answers and its refusals take.

    trtx serve --model synthetic:tiny-trained --engine paced --workers 2 --set max_batch_size=4 --set paced_itl_ms=5 \
        --set paced_ttft_ms=20 --router-mode least-loaded --max-queued-requests 16 --max-queue-s 3 --port 8000
    python benchmarks/overload_clients.py --url http://127.0.0.1:8000 --model tiny-trained --clients 400 --seconds 60

All clients connect at once and send a request. Each sends the next one when its answer has ended, or when the
``Retry-After`` of its refusal has passed. Each duration is measured twice. ``server``: until the kernel puts the
first bytes of the answer (TTFT: of the first event) into the client's socket, by the kernel's timestamp, so the time in
which the client itself is busy doesn't count. ``client``: until the client has read them. Both begin before the client
connects or sends. The clients run in one process with one thread, without asyncio. The last line of stdout is one JSON
document; the exit code is 1 if an answer was cut off, was no 200 and no overload, or an overload had no Retry-After.
"""

from __future__ import annotations

import argparse
import heapq
import json
import selectors
import socket
import struct
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from urllib.parse import urlsplit

_TIMESTAMPS = 35  # SO_TIMESTAMPNS: each recvmsg tells when the kernel received its data; Python has no name for it
_TIMESPEC = struct.Struct("qq")
_OVERLOADED = frozenset({429, 503, 529})
_END = b"\r\n0\r\n\r\n"
_EVENT = b"data: {"
_TAIL_BYTES = 2048


@dataclass(slots=True)
class Durations:
    """Of one kind of answer, in milliseconds."""

    server: list[float] = field(default_factory=list)
    client: list[float] = field(default_factory=list)

    def add(self, began_ns: int, arrived_ns: int) -> None:
        self.server.append((arrived_ns - began_ns) / 1e6)
        self.client.append((time.time_ns() - began_ns) / 1e6)

    def document(self) -> dict[str, object]:
        return {"count": len(self.server)} | {
            f"{name}_ms": {f"p{round(100 * share)}": _share(values, share) for share in (0.5, 0.99, 1)}
            for name, values in (("server", self.server), ("client", self.client))
        }


def _share(values: list[float], share: float) -> float | None:
    return round(sorted(values)[min(len(values) - 1, int(len(values) * share))], 2) if values else None


@dataclass(slots=True)
class Results:
    ttft: Durations = field(default_factory=Durations)
    refused_on_connect: Durations = field(default_factory=Durations)  # the first request of each client: all at once
    refused_later: Durations = field(default_factory=Durations)
    statuses: Counter[int] = field(default_factory=Counter)
    retry_after_s: Counter[str] = field(default_factory=Counter)
    messages: set[str] = field(default_factory=set)
    problems: list[str] = field(default_factory=list)

    def document(self) -> dict[str, object]:
        return {
            "ttft": self.ttft.document(),
            "refused_on_connect": self.refused_on_connect.document(),
            "refused_later": self.refused_later.document(),
            "statuses": {str(status): count for status, count in sorted(self.statuses.items())},
            "retry_after_s": dict(sorted(self.retry_after_s.items())),
            "messages": sorted(self.messages)[:5],
            "problems": self.problems[:5],
        }


class Client:
    """One client with one keep-alive connection."""

    def __init__(self, address: tuple[str, int], request: bytes, results: Results) -> None:
        self._address, self._request, self._results = address, request, results
        self.socket: socket.socket | None = None
        self._is_first = True

    def send(self) -> socket.socket | None:
        """Sends a request. Returns the socket if it is a new one."""
        self._head, self._tail, self._status, self._has_event = b"", b"", 0, False
        self._began_ns, made = time.time_ns(), None
        if self.socket is None:
            made = self.socket = socket.create_connection(self._address)
            self.socket.setsockopt(socket.SOL_SOCKET, _TIMESTAMPS, 1)
            self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.socket.sendall(self._request)
        return made

    def read(self) -> float | None:
        """Reads what has arrived. Returns the seconds until the next request once the answer has ended, -1: never."""
        assert self.socket is not None
        try:
            data, stamps, _, _ = self.socket.recvmsg(1 << 16, 64)
        except OSError as error:
            return self._fails(f"{type(error).__name__}: {error}")
        if not data:
            return self._fails(f"the connection was closed after {self._tail[-200:]!r}")
        arrived_ns = time.time_ns()
        if stamps:  # the kernel may begin to give them a moment late
            seconds, nanoseconds = _TIMESPEC.unpack(stamps[0][2])
            arrived_ns = seconds * 10**9 + nanoseconds
        self._tail += data
        if not self._status:
            head, end, _ = self._tail.partition(b"\r\n\r\n")
            if not end:
                return None
            self._head, self._status = head.lower(), int(head[9:12])
            if self._status != 200:
                durations = self._results.refused_on_connect if self._is_first else self._results.refused_later
                durations.add(self._began_ns, arrived_ns)
        if self._status == 200:
            return self._streams(arrived_ns)
        return self._refused()

    def _streams(self, arrived_ns: int) -> float | None:
        if not self._has_event and _EVENT in self._tail:
            self._has_event = True
            self._results.ttft.add(self._began_ns, arrived_ns)
        self._tail = self._tail[-_TAIL_BYTES:]
        if not self._tail.endswith(_END):
            return None
        self._is_first = False
        if b'"finish_reason":"length"' not in self._tail or b"data: [DONE]" not in self._tail:
            return self._fails(f"an answer was cut off: {self._tail[-200:]!r}")
        return 0.0

    def _refused(self) -> float | None:
        names = dict(line.split(b": ", 1) for line in self._head.split(b"\r\n")[1:])
        body = self._tail.partition(b"\r\n\r\n")[2]
        if len(body) < int(names[b"content-length"]):
            return None
        self._is_first = False
        retry = names.get(b"retry-after", b"").decode()
        self._results.statuses[self._status] += 1
        self._results.retry_after_s[retry] += 1
        self._results.messages.add(json.loads(body)["message"])
        if self._status not in _OVERLOADED or not retry:
            return self._fails(f"HTTP {self._status}: {body[:200]!r}")
        return float(retry)

    def _fails(self, problem: str) -> float:
        self._results.problems.append(problem)
        return -1.0


def load(address: tuple[str, int], request: bytes, clients: int, seconds: float) -> Results:
    """Runs the clients until ``seconds`` have passed and every request has its answer."""
    results, selector = Results(), selectors.DefaultSelector()
    end = time.monotonic() + seconds
    due = [(0.0, number, Client(address, request, results)) for number in range(clients)]
    open_answers = 0
    while open_answers or (due and time.monotonic() < end):
        now = time.monotonic()
        is_due = bool(due) and due[0][0] <= now < end
        if is_due:
            _, number, client = heapq.heappop(due)
            if (made := client.send()) is not None:
                selector.register(made, selectors.EVENT_READ, (number, client))
            open_answers += 1
        for key, _ in selector.select(0 if is_due else 0.005):
            number, client = key.data
            if (wait := client.read()) is None:
                continue
            open_answers -= 1
            if wait < 0:
                selector.unregister(key.fileobj)
            else:
                heapq.heappush(due, (time.monotonic() + wait, number, client))
    return results


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", required=True)
    parser.add_argument("--model", required=True)
    parser.add_argument("--clients", type=int, default=400)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--tokens", type=int, default=40, help="of each answer")
    asked = parser.parse_args()
    url = urlsplit(asked.url)
    body = json.dumps({"model": asked.model, "prompt": "a client of an overloaded server", "max_tokens": asked.tokens,
                       "stream": True, "ignore_eos": True}).encode()  # fmt: skip
    head = f"POST /v1/completions HTTP/1.1\r\nHost: {url.netloc}\r\nContent-Type: application/json\r\n"
    request = f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body
    results = load((url.hostname or "127.0.0.1", url.port or 80), request, asked.clients, asked.seconds)
    print(json.dumps(results.document()))
    return 1 if results.problems else 0


if __name__ == "__main__":
    sys.exit(main())
