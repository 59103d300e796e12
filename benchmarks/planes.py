"""Compares the planes of a topology over hosts (etcd, TCP, NATS) with those of one machine (file, TCP, ZMQ).

    python benchmarks/planes.py --address 10.0.0.5 --device eth0 [--rounds 20] [--requests 100]

It serves the same topology twice at once on this machine, as ``trtx serve`` and as ``trtx serve --hosts`` with one host
and its own etcd and NATS servers. It loads them in turn (A B B A A B …), so only one has work at a time. The engine is
the paced one without delay, so only the path of a request takes time.

Each round sends ``--requests`` streams of 32 tokens on one keep-alive connection (medians of time to first token and of
the whole request), then ``--streams`` streams at once (tokens/s). A ratio divides a round's result over etcd, TCP and
NATS by that of the same round over file, TCP and ZMQ. The table shows its median and its 95 % confidence interval
(bootstrap over rounds). Other load on the machine affects both alike.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import platform
import random
import re
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import yaml
from raw_client import one_after_another
from raw_client import together as at_once

_TOKENS = 32
_READY = re.compile(r"Ready: (http://\S+?)/?(?:\s|$)")
_START_S = 120.0
_END_S = 45.0
_ENGINE = ("--engine", "paced", "--set", "paced_ttft_ms=0", "--set", "paced_itl_ms=0")
_RESAMPLES = 2_000


@dataclass(slots=True)
class Arm:
    """One topology, with its results of each round in the order of ``_FIGURES``."""

    name: str
    host: str
    port: int
    rounds: list[tuple[float, float, float]] = field(default_factory=list)

    def measure(self, requests: int, streams: int) -> None:
        body = _body()
        answers = one_after_another(self.port, body, requests, self.host)
        together = at_once(self.port, body, streams, self.host)
        seconds = max(a.done for a in together) - min(a.sent for a in together)
        self.rounds.append(
            (
                1000 * statistics.median(a.first_event - a.sent for a in answers),
                1000 * statistics.median(a.done - a.sent for a in answers),
                sum(a.tokens for a in together) / seconds,
            )
        )


_FIGURES = ("TTFT p50, ms", "whole request p50, ms", "tokens/s")


def _body() -> dict[str, Any]:
    body = {"model": "planes", "prompt": "How are you?", "max_tokens": _TOKENS, "min_tokens": _TOKENS, "stream": True}
    return body | {"ignore_eos": True, "stream_options": {"include_usage": True}}


@contextlib.contextmanager
def _process(argv: list[str], log: Path, is_up: Callable[[str], bool]) -> Iterator[None]:
    """A context manager that runs ``argv``, entered once ``is_up`` accepts its log. Raises SystemExit on failure."""
    with log.open("wb") as out:
        process = subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=out, stderr=out, start_new_session=True)
    try:
        deadline = time.monotonic() + _START_S
        while not is_up(text := log.read_text(errors="replace")):
            if process.poll() is not None or time.monotonic() > deadline:
                raise SystemExit(f"{' '.join(argv)} did not start:\n{text[-3000:]}")
            time.sleep(0.1)
        yield
    finally:
        process.send_signal(signal.SIGINT)
        try:
            process.wait(_END_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _listens(address: str, port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_connection((address, port), timeout=1):
        return True
    return False


def _free_port(address: str) -> int:
    while True:
        port = random.randrange(20_000, 32_000)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind((address, port))
            return port


@contextlib.contextmanager
def _servers(address: str, directory: Path) -> Iterator[tuple[str, str]]:
    """Starts an etcd and a NATS server for this run, and yields their URLs."""
    client, peer = (f"http://{address}:{_free_port(address)}" for _ in range(2))
    nats_port = _free_port(address)
    etcd = ["etcd", "--data-dir", str(directory / "etcd"), "--log-level", "warn", "--name", "planes"]
    etcd += ["--listen-client-urls", client, "--advertise-client-urls", client, "--listen-peer-urls", peer]
    etcd += ["--initial-advertise-peer-urls", peer, "--initial-cluster", f"planes={peer}"]
    nats = ["nats-server", "-a", address, "-p", str(nats_port)]
    etcd_port = urlsplit(client).port or 0
    with (
        _process(etcd, directory / "etcd.log", lambda _: _listens(address, etcd_port)),
        _process(nats, directory / "nats.log", lambda _: _listens(address, nats_port)),
    ):
        yield client, f"nats://{address}:{nats_port}"


@contextlib.contextmanager
def _serving(name: str, directory: Path, args: argparse.Namespace, *more: str) -> Iterator[Arm]:
    log = directory / f"{re.sub(r'[^a-z]+', '-', name)}.log"
    argv = [sys.executable, "-m", "trtx", "serve", *_ENGINE, "--workers", str(args.workers)]
    argv += ["--served-model-name", "planes", "--router-mode", args.router_mode, "-o", str(directory / "runs"), *more]
    with _process(argv, log, lambda text: _READY.search(text) is not None):
        found = _READY.search(log.read_text(errors="replace"))
        assert found is not None
        address = urlsplit(found[1])
        yield Arm(name, address.hostname or "", address.port or 0)


def _ratio(ratios: list[float]) -> str:
    dice = random.Random(7)
    medians = sorted(statistics.median(dice.choices(ratios, k=len(ratios))) for _ in range(_RESAMPLES))
    low, high = (medians[int(_RESAMPLES * share)] for share in (0.025, 0.975))
    return f"{statistics.median(ratios):.3f} ({low:.3f} to {high:.3f})"


def _table(one: Arm, several: Arm) -> str:
    lines = [f"| | {one.name} | {several.name} | ratio, 95 % |", "|---|--:|--:|--:|"]
    for at, figure in enumerate(_FIGURES):
        before, after = ([values[at] for values in arm.rounds] for arm in (one, several))
        ratios = [second / first for first, second in zip(before, after, strict=True)]
        shown = [f"{statistics.median(values):,.2f}" for values in (before, after)]
        lines.append(f"| {figure} | {shown[0]} | {shown[1]} | {_ratio(ratios)} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--address", required=True, help="an IPv4 address of this machine, for all that listens")
    parser.add_argument("--device", required=True, help="the device that has it")
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--router-mode", choices=("kv", "round-robin"), default="kv")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--requests", type=int, default=100, help="of each round, one after another")
    parser.add_argument("--streams", type=int, default=32, help="of each round, at once")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="trtx-planes-") as name, contextlib.ExitStack() as stack:
        directory = Path(name)
        etcd, nats = stack.enter_context(_servers(args.address, directory))
        host = {"name": "here", "address": args.address, "device": args.device, "frontends": 1}
        hosts = directory / "hosts.yaml"
        hosts.write_text(yaml.safe_dump({"etcd": [etcd], "nats": nats, "hosts": [host]}), encoding="utf-8")
        one = stack.enter_context(_serving("file, tcp, zmq", directory, args, "--port", "0"))
        several = stack.enter_context(
            _serving("etcd, tcp, nats", directory, args, "--hosts", str(hosts), "--this-host", "here")
        )
        for number in range(args.rounds + 1):
            for arm in (one, several) if number % 2 else (several, one):
                arm.measure(args.requests, args.streams)
        for arm in (one, several):
            del arm.rounds[0]  # the first round is a warm-up
        load = ", ".join(f"{value:.1f}" for value in os.getloadavg())
        print(f"{platform.machine()}, {os.cpu_count()} cores, load over 1, 5 and 15 min {load}; {args.rounds} rounds\n")
        print(_table(one, several))


if __name__ == "__main__":
    main()
