"""Measures what metrics and traces cost a served topology, at many streams.

    python benchmarks/observed_serving.py --model synthetic:qwen3-8b --concurrency 256 --rounds 3

Two topologies of the same model run on one GPU (or CPU): a plain one, and one that sends traces to a collector on this
machine and whose metrics are read every second, frontend and workers. They are loaded in turn, ``plain, observed,
observed, plain, …``, by the same ``trtx bench --url`` calls, so that drifts of the machine affect both alike; the other
one is idle meanwhile. The table has the median of the rounds. The last line of stdout is one JSON document.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import sys
import tempfile
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
from hostile_media import told
from http_beside_peer import FIGURES, Clock, bench
from peer_servers import Failed, Server
from user_loads import UserLoad

from trtx.checkpoint import resolve_checkpoint
from trtx.config import TopologySpec
from trtx.launch import ServedTopology, prepare, serve

KINDS = ("plain", "observed")


@dataclass(slots=True)
class Seen:
    """What the observed topology told: bodies and bytes of traces, and answered reads of metrics."""

    trace_bodies: int = 0
    trace_bytes: int = 0
    scrapes: int = 0


@contextlib.contextmanager
def collector(seen: Seen) -> Iterator[str]:
    """Yields the URL of an OTLP collector that counts what it gets."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            seen.trace_bodies += 1
            seen.trace_bytes += len(self.rfile.read(int(self.headers.get("Content-Length", 0))))
            self.send_response(200)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, format: str, *arguments: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()


@contextlib.contextmanager
def scraped(served: ServedTopology, seen: Seen) -> Iterator[None]:
    """Reads the metrics of every process each second."""
    ports = [process.env["DYN_SYSTEM_PORT"] for process in served.plan.processes if "DYN_SYSTEM_PORT" in process.env]
    urls = [f"{served.url}/metrics", *(f"http://127.0.0.1:{port}/metrics" for port in ports)]
    over = threading.Event()

    def read() -> None:
        with httpx.Client(trust_env=False, timeout=10) as http:
            while not over.wait(1.0):
                for url in urls:
                    seen.scrapes += http.get(url).status_code == 200

    thread = threading.Thread(target=read, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def spec_of(options: argparse.Namespace, endpoint: str | None) -> TopologySpec:
    return TopologySpec(
        model=options.model, engine="torch", port=0, overrides=tuple(options.set), otlp_endpoint=endpoint
    )


def measure(topologies: dict[str, ServedTopology], options: argparse.Namespace) -> list[dict[str, Any]]:
    clock, rows = Clock(None), []
    for number in range(options.rounds):
        for kind in KINDS[:: 1 if number % 2 == 0 else -1]:
            served = topologies[kind]
            server = Server(kind, "", [], {}, options.out, served.plan.port)
            load = UserLoad(f"round {number}", {
                "concurrency": str(options.concurrency), "isl": str(options.isl), "osl": str(options.osl),
                "request-count": str(options.request_count), "seed": str(number),
            })  # fmt: skip
            row = bench(server, served.model, load, options, clock)
            clock.say(f"{kind}: {row['output_token_throughput']:,.0f} tokens/s, {row['status']}, {row['validity']}")
            rows.append(row)
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="synthetic:tiny")
    parser.add_argument("--set", action="append", default=[], help="engine config field, as trtx serve has it")
    parser.add_argument("--concurrency", type=int, default=256)
    parser.add_argument("--isl", type=int, default=256)
    parser.add_argument("--osl", type=int, default=128)
    parser.add_argument("--request-count", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    options.tokenizer = resolve_checkpoint(options.model).path
    options.out = Path(tempfile.mkdtemp(prefix="trtx-observed-"))
    seen = Seen()
    try:
        with contextlib.ExitStack() as stack:
            endpoints = {"plain": None, "observed": stack.enter_context(collector(seen))}
            topologies = {}
            for kind in KINDS:
                (options.out / f"served-{kind}").mkdir()
                plan = prepare(spec_of(options, endpoints[kind]), run_dir=options.out / f"served-{kind}")
                topologies[kind] = stack.enter_context(serve(plan, on_event=told))
            stack.enter_context(scraped(topologies["observed"], seen))
            rows = measure(topologies, options)
    except Failed as failure:
        raise SystemExit(f"observed_serving.py: {failure}") from None
    medians = {
        kind: {name: statistics.median(row[name] for row in rows if row["server"] == kind) for name in FIGURES}
        for kind in KINDS
    }
    print(f"{'':>34} {'plain':>10} {'observed':>10} {'ratio':>7}")
    for name in FIGURES:
        plain, observed = (medians[kind][name] for kind in KINDS)
        print(f"{name:>34} {plain:>10,.2f} {observed:>10,.2f} {observed / plain:>7.4f}")
    print(f"{seen.trace_bodies} bodies of traces with {seen.trace_bytes} bytes, {seen.scrapes} reads of metrics")
    print(json.dumps({"medians": medians, "rows": rows, "trace_bytes": seen.trace_bytes, "scrapes": seen.scrapes}))
    return 0 if seen.trace_bodies and seen.scrapes else 1


if __name__ == "__main__":
    sys.exit(main())
