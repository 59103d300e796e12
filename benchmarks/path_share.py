"""Measures the share of an engine's tokens/s that reaches clients through worker, frontend and HTTP, and the CPU usage.

    python benchmarks/path_share.py --concurrency 1,64,256 --itl-ms 6.5,8.9,15.9 --ttft-ms 20,80,400

The engine is a clock (``--engine paced``), so its output is known: a client that sends its next request at the end of
the last answer gets ``osl`` tokens every ``ttft + (osl - 1) itl``. Any loss occurs on the way. aiperf generates the
load as in ``trtx bench``, and the steady part is compared. CPU seconds are per process over the whole load, warm-up
included, and per 1,000 tokens: the frontend, the worker with the paced engine, aiperf. The last line of stdout is one
JSON document.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import threading
from collections import defaultdict
from pathlib import Path
from typing import Any

import psutil

from trtx.config import TopologySpec
from trtx.launch import Interruption, prepare, serve

SAMPLE_S = 0.25


class CpuSeconds:
    """A context manager that measures the CPU seconds of the processes of one load, by kind.

    A thread samples them, because aiperf's processes end with each load, and their CPU times are lost then.
    """

    def __init__(self, bench_pid: int) -> None:
        self._bench_pid = bench_pid
        self._first: dict[int, float] = {}
        self._last: dict[int, tuple[str, float]] = {}
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> CpuSeconds:
        self._sample()
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._stop.set()
        self._thread.join()
        self._sample()

    @property
    def by_kind(self) -> dict[str, float]:
        found: defaultdict[str, float] = defaultdict(float)
        for pid, (kind, seconds) in self._last.items():
            found[kind] += seconds - self._first[pid]
        return dict(found)

    def _run(self) -> None:
        while not self._stop.wait(SAMPLE_S):
            self._sample()

    def _sample(self) -> None:
        for process, kind in self._processes():
            try:
                times = process.cpu_times()
            except psutil.Error:
                continue
            seconds = times.user + times.system
            self._first.setdefault(process.pid, seconds if kind != "aiperf" else 0.0)
            self._last[process.pid] = kind, seconds

    def _processes(self) -> list[tuple[psutil.Process, str]]:
        found = []
        own = psutil.Process(os.getpid()).children(recursive=True)
        try:
            bench = {child.pid for child in psutil.Process(self._bench_pid).children(recursive=True)}
        except psutil.NoSuchProcess:
            bench = set()
        for process in own:
            try:
                words = " ".join(process.cmdline())
            except psutil.Error:
                continue
            if process.pid in bench or words.startswith("aiperf"):
                found.append((process, "aiperf"))
            elif process.pid != self._bench_pid:
                found += [(process, kind) for kind in ("worker", "frontend") if f"trtx.{kind}" in words]
        return found


def measure(
    concurrency: int, itl_ms: float, ttft_ms: float, options: argparse.Namespace, output: Path
) -> dict[str, Any]:
    settings = (f"paced_ttft_ms={ttft_ms}", f"paced_itl_ms={itl_ms}")
    spec = TopologySpec(model=options.model, engine="paced", mode="agg", port=0, overrides=settings)
    plan = prepare(spec, run_dir=output)
    with serve(plan, on_event=lambda event: None, interruption=Interruption()) as topology:
        runs = output / "bench"
        command = [sys.executable, "-m", "trtx", "bench", "--url", topology.url, "--model", topology.model,
                   "--tokenizer", str(plan.model_path), "--concurrency", str(concurrency), "--isl", str(options.isl),
                   "--osl", str(options.osl), "-o", str(runs)]  # fmt: skip
        bench = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        with CpuSeconds(bench.pid) as cpu:
            _, said = bench.communicate()
    summaries = list(runs.glob("*/summary.json"))
    if not summaries:
        raise SystemExit(f"trtx bench ended with {bench.returncode}:\n{said[-2000:]}")
    (row,) = json.loads(summaries[0].read_text())["rows"]
    if row["request_count"] is None:
        raise SystemExit(f"concurrency {concurrency} has no figures: {row['problem'] or row['status']}")
    given = 1e3 * concurrency * options.osl / (ttft_ms + (options.osl - 1) * itl_ms)
    tokens = options.osl * (row["request_count"] + row["warmup_request_count"])
    reached = row["steady_output_token_throughput"]
    return {
        "concurrency": concurrency, "itl_ms": itl_ms, "ttft_ms": ttft_ms, "engine_tokens_per_s": given,
        "client_tokens_per_s": reached, "share": None if reached is None else reached / given,
        "client_ttft_p50_ms": row["time_to_first_token_p50"], "client_itl_p50_ms": row["inter_token_latency_p50"],
        "cpu_s_per_1000_tokens": {kind: 1e3 * s / tokens for kind, s in sorted(cpu.by_kind.items())},
        "status": row["status"], "validity": row["validity"],
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="synthetic:tiny", help="whose tokenizer is used")
    parser.add_argument("--concurrency", default="1,64,256")
    parser.add_argument(
        "--itl-ms", default="6.5,8.9,15.9", help="of each concurrency (default: a large GPU's 8B shape)"
    )
    parser.add_argument("--ttft-ms", default="20,80,400", help="of each concurrency")
    parser.add_argument("--isl", type=int, default=512)
    parser.add_argument("--osl", type=int, default=128)
    options = parser.parse_args()
    columns = [options.concurrency.split(","), options.itl_ms.split(","), options.ttft_ms.split(",")]
    if len({len(column) for column in columns}) != 1:
        parser.error("--concurrency, --itl-ms and --ttft-ms have other numbers of values; expected one of each a load")
    print(
        f"{'':>4} {'engine tok/s':>12} {'client':>8} {'share':>6} {'TTFT p50':>9} {'ITL p50':>8}  CPU s / 1,000 tokens"
    )
    rows = []
    for concurrency, itl_ms, ttft_ms in zip(*columns, strict=True):
        with tempfile.TemporaryDirectory(prefix="trtx-path-") as output:
            row = measure(int(concurrency), float(itl_ms), float(ttft_ms), options, Path(output))
        rows.append(row)
        numbers = [row[name] for name in ("client_tokens_per_s", "share", "client_ttft_p50_ms", "client_itl_p50_ms")]
        shown = "{:>8} {:>6} {:>9} {:>8}".format(*("–" if one is None else f"{one:,.4g}" for one in numbers))
        spent = ", ".join(f"{kind} {seconds:.3f}" for kind, seconds in row["cpu_s_per_1000_tokens"].items())
        print(f"{concurrency:>4} {row['engine_tokens_per_s']:>12,.0f} {shown}  {spent}", flush=True)
    print(json.dumps({"isl": options.isl, "osl": options.osl, "rows": rows}))


if __name__ == "__main__":
    main()
