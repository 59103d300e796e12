"""Runs a long load, kills a worker in the middle, and reports the clients' results minute by minute.

    python benchmarks/soak.py --mode disagg --model synthetic:qwen3-8b --gpus 0,1 --seconds 600 --kill decode

It serves the topology as `trtx serve` does, loads it with aiperf at a fixed concurrency, and kills one worker of the
given role with SIGKILL half-way. It prints for each minute the successful and failed requests, output tokens/s, TTFT
and ITL, and then the reasons of failures, the time during which the topology was incomplete, restarts, and memory at
the start and at the end. The table is Markdown. The exit code is 1 if a request failed in any other minute than that of
the kill.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import psutil

from trtx.bench.aiperf.command import check_endpoint, tail
from trtx.bench.aiperf.process import Aiperf, AiperfHost
from trtx.bench.endpoint import ENDPOINT_TYPE
from trtx.bench.failures import count_reasons
from trtx.bench.records import RECORDS_FILE, RequestRecord, read_records
from trtx.config import TopologySpec
from trtx.launch import ServedTopology, prepare, serve

MINUTE_S = 60.0


@dataclass(slots=True)
class Watch:
    """The events during the load. Times are seconds since the epoch."""

    started_at: float
    killed_at: float | None = None
    killed: str = ""
    whole_at: float | None = None  # the first time after the kill when every worker served again


def main() -> int:
    arguments = _arguments()
    check_endpoint()
    run_dir = Path(arguments.output or tempfile.mkdtemp(prefix="trtx-soak-"))
    run_dir.mkdir(parents=True, exist_ok=True)
    counts = {"workers": arguments.workers} if arguments.mode == "agg" else {}
    if arguments.mode == "disagg":
        counts = {"prefill": arguments.prefill, "decode": arguments.decode}
    spec = TopologySpec(
        model=arguments.model,
        mode=arguments.mode,
        gpus=None if arguments.gpus is None else tuple(int(part) for part in arguments.gpus.split(",")),
        engine=arguments.engine,
        overrides=tuple(arguments.set or ()),
        port=0,
        **counts,
    )
    plan = prepare(spec, run_dir=run_dir)
    print(f"# {' '.join(sys.argv)}", flush=True)
    tokenizer = plan.workers[0].argv[plan.workers[0].argv.index("--model") + 1]
    with serve(plan, on_event=lambda event: print(f"- {event.message}", flush=True)) as topology:
        before = _memory(topology)
        watch = _drive(topology, arguments, run_dir, tokenizer)
        after = _memory(topology)
        restarts = topology.restarts
    path = run_dir / "load" / RECORDS_FILE
    if not (records := read_records(path) if path.exists() else ()):
        print("aiperf recorded no request")
        return 1
    failed_outside = _print_minutes(records, watch)
    _print_errors(records)
    if watch.killed_at is not None:
        outage = "never whole again" if watch.whole_at is None else f"{watch.whole_at - watch.killed_at:.1f} s"
        print(f"\nkilled {watch.killed} at {watch.killed_at - watch.started_at:.0f} s; whole again after {outage}")
    print(f"restarts: {[(restart.name, restart.exit) for restart in restarts]}")
    for name, (rss, device) in after.items():
        old = before.get(name, (0, 0))
        print(f"memory {name}: RSS {old[0] >> 20} -> {rss >> 20} MiB, device {old[1] >> 20} -> {device >> 20} MiB")
    return 1 if failed_outside or (watch.killed_at is not None and watch.whole_at is None) else 0


def _drive(topology: ServedTopology, arguments: argparse.Namespace, run_dir: Path, tokenizer: str) -> Watch:
    argv = [
        "aiperf", "profile",
        "--model", topology.model, "--tokenizer", tokenizer, "--url", topology.url,
        "--endpoint-type", ENDPOINT_TYPE, "--streaming", "--apply-chat-template", "--use-server-token-count",
        "--isl", str(arguments.isl), "--osl", str(arguments.osl),
        "--concurrency", str(arguments.concurrency), "--benchmark-duration", str(arguments.seconds),
        "--benchmark-grace-period", "60", "--num-dataset-entries", str(arguments.prompts), "--random-seed", "7",
        "--extra-inputs", json.dumps({"ignore_eos": True, "min_tokens": arguments.osl}),
        "--ui", "none", "--no-gpu-telemetry", "--no-server-metrics", "--artifact-dir", str(run_dir / "load"),
    ]  # fmt: skip
    records = run_dir / "load" / RECORDS_FILE
    log = run_dir / "aiperf.log"
    with AiperfHost(run_dir / "host.log") as host, Aiperf(host, argv, log) as aiperf:
        while not (records.exists() and records.stat().st_size) and aiperf.poll() is None:
            topology.wait(0.2)
        watch = Watch(started_at=time.time())
        kill_at = watch.started_at + arguments.seconds / 2
        while aiperf.poll() is None:
            topology.wait(0.1)
            if arguments.kill and watch.killed_at is None and time.time() >= kill_at:
                slot = next(slot for slot in topology.slots if slot.spec.role == arguments.kill)
                assert slot.child is not None
                os.kill(slot.child.pid, signal.SIGKILL)
                watch.killed_at, watch.killed = time.time(), slot.spec.name
                while topology.is_whole:  # wait until the supervisor has noticed the kill
                    topology.wait(0.01)
            elif watch.killed_at is not None and watch.whole_at is None and topology.is_whole:
                watch.whole_at = time.time()
        if aiperf.poll() != 0:
            print(f"aiperf exited {aiperf.poll()}:\n{tail(log, 20)}")
    return watch


def _memory(topology: ServedTopology) -> dict[str, tuple[int, int]]:
    """Returns the RSS of each process with its children, and the device memory in its status file, else 0; in bytes."""
    seen = {}
    for slot in topology.slots:
        if slot.child is None:
            continue
        rss = 0
        with contextlib.suppress(psutil.NoSuchProcess):
            process = psutil.Process(slot.child.pid)
            rss = sum(each.memory_info().rss for each in (process, *process.children(recursive=True)))
        device = slot.status.device_memory_bytes if slot.status is not None else None
        seen[slot.spec.name] = (rss, device or 0)
    return seen


def _print_minutes(records: tuple[RequestRecord, ...], watch: Watch) -> int:
    """Prints the table; returns the number of requests that failed in minutes other than that of the kill."""
    first_ns = min(record.start_ns for record in records)
    kill_minute = None
    if watch.killed_at is not None:
        kill_minute = int((watch.killed_at - first_ns / 1e9) // MINUTE_S)
    print("\n| minute | ok | failed | tokens/s | TTFT p50 ms | TTFT p99 ms | ITL p50 ms | |")
    print("|---|---|---|---|---|---|---|---|")
    failed_outside = 0
    last_ns = max(record.end_ns for record in records)
    for minute in range(int((last_ns - first_ns) / 1e9 // MINUTE_S) + 1):
        here = [record for record in records if int((record.end_ns - first_ns) / 1e9 // MINUTE_S) == minute]
        ok = [record for record in here if record.succeeded]
        failed = len(here) - len(ok)
        if minute != kill_minute:
            failed_outside += failed
        ttft = sorted(record.time_to_first_token for record in ok if record.time_to_first_token is not None)
        itl = [record.inter_token_latency for record in ok if record.inter_token_latency is not None]
        counts = [record.output_sequence_length for record in ok if record.output_sequence_length is not None]
        span_s = min(MINUTE_S, (last_ns - first_ns) / 1e9 - minute * MINUTE_S)
        p50 = f"{median(ttft):.1f}" if ttft else "–"
        p99 = f"{ttft[int(0.99 * (len(ttft) - 1))]:.1f}" if ttft else "–"
        itl_p50 = f"{median(itl):.2f}" if itl else "–"
        rate = f"{sum(counts) / span_s:.0f}" if counts and len(counts) == len(ok) else "–"  # unknown if one has none
        note = f"{watch.killed} killed" if minute == kill_minute else ""
        print(f"| {minute} | {len(ok)} | {failed} | {rate} | {p50} | {p99} | {itl_p50} | {note} |")
    return failed_outside


def _print_errors(records: tuple[RequestRecord, ...]) -> None:
    failed = [record for record in records if not record.succeeded]
    print(f"\n{len(records) - len(failed)} requests succeeded, {len(failed)} failed")
    for reason, count in count_reasons(record.error for record in failed if record.error is not None):
        print(f"- {count} × {reason}")
    if uncounted := sum(record.succeeded and not record.is_counted for record in records):
        print(f"- {uncounted} answers carry no usage")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mode", choices=("agg", "disagg"), default="agg")
    parser.add_argument("--model", default=None)
    parser.add_argument("--engine", default="auto")
    parser.add_argument("--gpus", default=None)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--prefill", type=int, default=1)
    parser.add_argument("--decode", type=int, default=1)
    parser.add_argument("--set", action="append")
    parser.add_argument("--concurrency", type=int, default=256)
    parser.add_argument("--isl", type=int, default=512)
    parser.add_argument("--osl", type=int, default=128)
    parser.add_argument("--prompts", type=int, default=4096)
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--kill", choices=("agg", "prefill", "decode"), default=None)
    parser.add_argument("-o", "--output", default=None)
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
