"""Through HTTP and aiperf: trtx, then vLLM on the same GPU with its defaults, under the same loads.

    python benchmarks/http_beside_peer.py --model synthetic:qwen3-8b --peer-path DIR

Each is served once, in turn, and measured by the same ``trtx bench`` call (streaming, sampled as clients that say
nothing are, no SLO); the peer through ``--url``. ``--peer-path`` is a folder that holds vLLM and what it needs, on
the PYTHONPATH of its own process alone; without it only trtx is measured. The last line of stdout is one JSON
document: a row for each server and concurrency, and the seconds that each took to be ready.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx

from trtx.checkpoint import resolve_checkpoint

READY_S = 420.0  # vLLM compiles and captures for minutes
FIGURES = (
    "output_token_throughput", "time_to_first_token_p50", "time_to_first_token_p90", "inter_token_latency_p50",
    "inter_token_latency_p99",
)  # fmt: skip


def bench(arguments: Sequence[str], out: Path) -> dict[str, Any]:
    """``summary.json`` of one ``trtx bench`` run below ``out``. SystemExit where it measured nothing."""
    before = set(out.glob("*")) if out.exists() else set()
    command = [sys.executable, "-m", "trtx", "bench", *arguments, "-o", str(out)]
    ended = subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, check=False)
    summaries = [path / "summary.json" for path in set(out.glob("*")) - before]
    if ended.returncode not in (0, 1) or not summaries or not summaries[0].exists():
        raise SystemExit(f"{' '.join(command)} ended with {ended.returncode}:\n{ended.stderr[-2000:]}")
    document: dict[str, Any] = json.loads(summaries[0].read_text())
    return document


def rows_of(server: str, document: dict[str, Any]) -> list[dict[str, Any]]:
    """What the tables show; None where there is no figure, and how far the cell is valid."""
    return [
        {"server": server} | {name: row[name] for name in ("concurrency", "status", "validity", *FIGURES)}
        for row in document["rows"]
    ]


def load_arguments(options: argparse.Namespace) -> list[str]:
    arguments = ["--concurrency", options.concurrency, "--isl", str(options.isl), "--osl", str(options.osl)]
    return arguments + (["--request-count", str(options.request_count)] if options.request_count else [])


def measure_trtx(options: argparse.Namespace) -> tuple[list[dict[str, Any]], float]:
    document = bench(["--model", options.model, "--mode", "agg", *load_arguments(options)], options.out)
    ready_s = float(document["conditions"]["Time to load"].split()[1])
    return rows_of("trtx", document), ready_s


def measure_peer(options: argparse.Namespace, directory: Path) -> tuple[list[dict[str, Any]], float]:
    """Serves the checkpoint's shape with random weights, and ends the server by its process group."""
    command = [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", str(directory), "--load-format", "dummy",
               "--host", "127.0.0.1", "--port", str(options.peer_port), "--served-model-name", "peer"]  # fmt: skip
    environment = os.environ | {
        "PYTHONPATH": str(options.peer_path), "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_LEVEL": "WARNING",
    }  # fmt: skip
    url = f"http://127.0.0.1:{options.peer_port}"
    options.out.mkdir(parents=True, exist_ok=True)
    with (options.out / "peer.log").open("ab") as log:
        server = subprocess.Popen(command, env=environment, stdout=log, stderr=log, start_new_session=True)
    began = time.monotonic()
    try:
        while not _answers(f"{url}/health"):
            if server.poll() is not None or time.monotonic() - began > READY_S:
                tail = (options.out / "peer.log").read_text(errors="replace")[-2000:]
                raise SystemExit(f"the peer is not ready after {time.monotonic() - began:.0f} s:\n{tail}")
            time.sleep(0.5)
        ready_s = time.monotonic() - began
        arguments = ["--url", url, "--model", "peer", "--tokenizer", str(directory), *load_arguments(options)]
        document = bench(arguments, options.out)
        return rows_of("vllm", document), ready_s
    finally:
        if server.poll() is None:
            os.killpg(server.pid, signal.SIGTERM)
            try:
                server.wait(30)
            except subprocess.TimeoutExpired:
                os.killpg(server.pid, signal.SIGKILL)
                server.wait()


def _answers(url: str) -> bool:
    try:
        return httpx.get(url, timeout=2, trust_env=False).status_code == 200
    except httpx.HTTPError:
        return False


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="synthetic:qwen3-8b", help="synthetic:<shape> or a checkpoint directory")
    parser.add_argument("--peer-path", type=Path, help="folder that holds vLLM")
    parser.add_argument("--peer-port", type=int, default=18000)
    parser.add_argument("--concurrency", default="1,8,64,256")
    parser.add_argument("--isl", type=int, default=512)
    parser.add_argument("--osl", type=int, default=128)
    parser.add_argument("--request-count", type=int, help="of each cell; default: trtx bench's own")
    parser.add_argument("--out", type=Path, default=Path("runs"), help="parent of the runs (default: %(default)s)")
    options = parser.parse_args()
    rows, start_s = measure_trtx(options)
    starts = {"trtx": start_s}
    if options.peer_path is not None:
        directory = resolve_checkpoint(options.model, on_gpu=True).path
        peer_rows, starts["vllm"] = measure_peer(options, directory)
        rows += peer_rows
    print(f"{'':>6} {'concurrency':>11} {'tokens/s':>10} {'TTFT p50':>9} {'p90':>9} {'ITL p50':>8} {'p99':>8}")
    for row in rows:
        cells = ("–" if row[figure] is None else f"{row[figure]:,.1f}" for figure in FIGURES)
        shown = "{:>10} {:>9} {:>9} {:>8} {:>8}".format(*cells)
        print(f"{row['server']:>6} {row['concurrency']:>11} {shown}  {row['status']}, {row['validity']}")
    print(json.dumps({"model": options.model, "start_s": starts, "rows": rows}))


if __name__ == "__main__":
    main()
