"""Through HTTP and aiperf: trtx, then vLLM on the same GPU with its defaults, under the same loads.

    python benchmarks/http_beside_peer.py --model synthetic:qwen3-8b --peer-path DIR

Each is served once, in turn, and measured by the same ``trtx bench --url`` calls: streaming, sampled as clients that
say nothing are, prompts of one seed, figures over all measured requests, no SLO. Both listen on 127.0.0.1. The next one
is started when the last has ended and its GPU memory is seen free. ``--peer-path`` is a folder that holds vLLM and what
it needs, on the PYTHONPATH of its own process alone; without it only trtx is measured. vLLM makes random weights in the
shape of the same directory, whose tokenizer it reads too.

What fails, or does not fit into ``--budget-s``, costs its own cells: the finished ones are printed, and the exit code
is 1. ``--results FILE`` keeps what is measured as it comes. Servers that it has under the same load are shown beside
those of this call, so ``--servers trtx`` and ``--servers vllm`` may be two calls. The last line of stdout is one JSON
document: a row for each server and concurrency, the seconds from each server's start to its first answer, and what went
wrong.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any

import httpx

from trtx.checkpoint import resolve_checkpoint
from trtx.errors import TrtxError

READY_S = 420.0  # vLLM compiles and captures for minutes
END_S = 60.0  # a server that is told to end, and the memory that it held
RENDER_S = 60.0  # a bench that is told to end still writes what it has
FREED_MIB = 1024  # more than before the server, with room for what a driver keeps
SERVERS = ("trtx", "vllm")
FIGURES = (
    "output_token_throughput", "time_to_first_token_p50", "time_to_first_token_p90", "inter_token_latency_p50",
    "inter_token_latency_p99",
)  # fmt: skip

STEADY = "steady_output_token_throughput"  # without the first requests and the last; not shown, for who compares it


class Failed(Exception):
    """One sentence, and the end of a log: why a server or a load has no figures."""


@dataclass(frozen=True, slots=True)
class Server:
    """How one is started, and in which directory."""

    name: str
    command: list[str]
    environment: dict[str, str]
    directory: Path
    port: int

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"


@dataclass(slots=True)
class Measured:
    """What there is so far; ``path``: where it is written after each step, if anywhere."""

    load: dict[str, Any]
    path: Path | None
    rows: list[dict[str, Any]] = field(default_factory=list)
    start_s: dict[str, float] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)

    def document(self) -> dict[str, Any]:
        return {**self.load, "start_s": self.start_s, "rows": self.rows, "problems": self.problems}

    def keep(self) -> None:
        if self.path is not None:
            making = self.path.with_suffix(".tmp")
            making.write_text(json.dumps(self.document()))
            making.replace(self.path)


class Clock:
    """Seconds since the start, and what is left of the budget."""

    def __init__(self, budget_s: float | None) -> None:
        self.began, self.budget_s = time.monotonic(), budget_s

    @property
    def left_s(self) -> float:
        return float("inf") if self.budget_s is None else self.budget_s - (time.monotonic() - self.began)

    def say(self, text: str) -> None:
        print(f"[{time.monotonic() - self.began:5.0f} s] {text}", flush=True)


def trtx_server(options: argparse.Namespace) -> Server:
    settings = [word for one in options.set for word in ("--set", one)]
    command = [sys.executable, "-m", "trtx", "serve", "--model", options.model, "--mode", "agg",
               "--port", str(options.port), "-o", str(options.out), *settings]  # fmt: skip
    return Server("trtx", command, dict(os.environ), Path.cwd(), options.port)


def peer_server(options: argparse.Namespace, model: Path) -> Server:
    """Its defaults. Without a network it looks for names of the hub and reports usage for minutes unless told not to;
    a kernel that it compiles at the start takes ninja from beside the interpreter."""
    command = [sys.executable, "-P", "-m", "vllm.entrypoints.cli.main", "serve", str(model), "--load-format", "dummy",
               "--host", "127.0.0.1", "--port", str(options.peer_port), "--served-model-name", "peer"]  # fmt: skip
    environment = os.environ | {
        "PYTHONPATH": str(options.peer_path.resolve()), "HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1", "PYTHONUNBUFFERED": "1",
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}",
    }  # fmt: skip
    return Server("vllm", command, environment, options.out, options.peer_port)


@contextlib.contextmanager
def served(server: Server, log: Path, clock: Clock, problems: list[str]) -> Iterator[tuple[str, float]]:
    """(name of the model that it serves, seconds from its start to its first answer). Raises Failed."""
    before = gpu_memory_mib()
    began = time.monotonic()
    with log.open("ab") as output:
        process = subprocess.Popen(
            server.command,
            env=server.environment,
            cwd=server.directory,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
    try:
        while (model := answering(server.url)) is None:
            waited = time.monotonic() - began
            if process.poll() is not None:
                raise Failed(f"{server.name} ended with {process.returncode} after {waited:.0f} s; {end_of(log)}")
            if waited > READY_S or clock.left_s <= 0:
                raise Failed(f"{server.name} gave no answer within {waited:.0f} s; {end_of(log)}")
            time.sleep(0.1)
        yield model, time.monotonic() - began
    finally:
        end(process)
        if before is not None and (still := until_free(before)) is not None:
            problems.append(
                f"{still - before} MiB of the GPU were still held {END_S:g} s after {server.name} had ended"
            )


def answering(url: str) -> str | None:
    """The model's name, once a request for one token has gone through."""
    try:
        models = httpx.get(f"{url}/v1/models", timeout=2, trust_env=False).json()["data"]
        if not models:
            return None
        name = str(models[0]["id"])
        asked = {"model": name, "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 1}
        answer = httpx.post(f"{url}/v1/chat/completions", json=asked, timeout=120, trust_env=False)
        return name if answer.status_code == 200 else None
    except (httpx.HTTPError, ValueError, KeyError, TypeError):
        return None


def end(process: subprocess.Popen[bytes]) -> None:
    """The server ends its own processes; what is left of its session is killed after it."""
    process.terminate()
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(END_S)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def gpu_memory_mib() -> int | None:
    """In use on the GPUs that this process sees; None where nobody can tell."""
    asked = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    asked += ["-i", visible] if (visible := os.environ.get("CUDA_VISIBLE_DEVICES")) else []
    try:
        told = subprocess.run(asked, capture_output=True, text=True, check=True, timeout=20).stdout
        return sum(int(line) for line in told.split())
    except (OSError, ValueError, subprocess.SubprocessError):
        return None


def until_free(before: int) -> int | None:
    """None once no more is in use than ``before``, within END_S; else what is, in MiB."""
    deadline = time.monotonic() + END_S
    while (used := gpu_memory_mib()) is not None and used > before + FREED_MIB:
        if time.monotonic() > deadline:
            return used
        time.sleep(0.5)
    return None


def bench(server: Server, model: str, concurrencies: list[int], count: int | None, options: argparse.Namespace,
          clock: Clock) -> Iterator[dict[str, Any]]:  # fmt: skip
    """One ``trtx bench --url`` call's rows with a result; ended early where the budget is. Raises Failed after them
    where not all have one."""
    out = options.out / f"{server.name}-{'-'.join(map(str, concurrencies))}-{time.time_ns()}"
    command = [sys.executable, "-m", "trtx", "bench", "--url", server.url, "--model", model,
               "--tokenizer", str(options.tokenizer), "--concurrency", ",".join(map(str, concurrencies)),
               "--isl", str(options.isl), "--osl", str(options.osl), "-o", str(out)]  # fmt: skip
    command += [] if count is None else ["--request-count", str(count)]
    log = out.with_suffix(".log")
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=output)
    try:
        process.wait(None if clock.left_s == float("inf") else max(clock.left_s, 0))
    except subprocess.TimeoutExpired:
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(RENDER_S)
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()
    summaries = list(out.glob("*/summary.json"))
    rows = json.loads(summaries[0].read_text())["rows"] if summaries else []
    whole = [row for row in rows if row["output_token_throughput"] is not None and row["status"] != "failed"]
    for row in whole:
        yield {"server": server.name} | {
            name: row[name] for name in ("concurrency", "request_count", "status", "validity", *FIGURES, STEADY)
        }
    found = {row["concurrency"] for row in whole}
    if missing := [str(one) for one in concurrencies if one not in found]:
        why = "the budget was used up" if clock.left_s <= 0 else f"trtx bench ended with {process.returncode}"
        raise Failed(f"{server.name} has no figures at concurrency {', '.join(missing)}: {why}; {end_of(log)}")


def end_of(log: Path) -> str:
    text = log.read_text(errors="replace")[-2000:].strip() if log.exists() else ""
    return f"the end of {log}:\n{text}"


def measure(server: Server, options: argparse.Namespace, measured: Measured, clock: Clock) -> None:
    """Adds its rows, and what went wrong."""
    clock.say(f"{server.name}: starting, GPU memory in use: {gpu_memory_mib()} MiB")
    log = options.out / f"{server.name}.log"
    try:
        with served(server, log, clock, measured.problems) as (model, start_s):
            measured.start_s[server.name] = start_s
            clock.say(f"{server.name}: first answer after {start_s:.1f} s")
            for count, group in groupby(options.concurrency, lambda one: options.requests.get(one)):
                concurrencies = list(group)
                try:
                    for row in bench(server, model, concurrencies, count, options, clock):
                        measured.rows.append(row)
                        clock.say(f"{server.name}: concurrency {row['concurrency']}: "
                                  f"{row['output_token_throughput']:,.0f} tokens/s, {row['status']}")  # fmt: skip
                except Failed as failure:
                    measured.problems.append(str(failure))
                    clock.say(str(failure))
                measured.keep()
    except Failed as failure:
        measured.problems.append(str(failure))
        clock.say(str(failure))
    clock.say(f"{server.name}: ended, GPU memory in use: {gpu_memory_mib()} MiB")
    measured.keep()


def earlier(path: Path | None, load: dict[str, Any], servers: list[str]) -> Measured:
    """What the file of an earlier call has under the same load, of servers that this call does not measure."""
    measured = Measured(load, path)
    if path is None or not path.exists():
        return measured
    kept = json.loads(path.read_text())
    if {name: kept.get(name) for name in load} == load:
        measured.rows = [row for row in kept["rows"] if row["server"] not in servers]
        measured.start_s = {name: s for name, s in kept["start_s"].items() if name not in servers}
    return measured


def show(rows: list[dict[str, Any]]) -> None:
    print(f"{'':>6} {'concurrency':>11} {'tokens/s':>10} {'TTFT p50':>9} {'p90':>9} {'ITL p50':>8} {'p99':>8} "
          f"{'to vLLM':>8}")  # fmt: skip
    rate = {(row["server"], row["concurrency"]): row["output_token_throughput"] for row in rows}
    for row in sorted(rows, key=lambda row: (row["concurrency"], row["server"])):
        cells = ("–" if row[figure] is None else f"{row[figure]:,.1f}" for figure in FIGURES)
        shown = "{:>10} {:>9} {:>9} {:>8} {:>8}".format(*cells)
        peer = rate.get(("vllm", row["concurrency"]))
        ratio = f"{rate['trtx', row['concurrency']] / peer:.3f}" if peer and row["server"] == "trtx" else ""
        print(f"{row['server']:>6} {row['concurrency']:>11} {shown} {ratio:>8}  {row['status']}, {row['validity']}")


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="synthetic:qwen3-8b", help="synthetic:<shape> or a checkpoint directory")
    parser.add_argument("--set", action="append", default=[], help="engine config field of trtx, as trtx serve has it")
    parser.add_argument("--peer-path", type=Path, help="folder that holds vLLM")
    parser.add_argument("--servers", help="trtx, vllm or both in their order; default: trtx, and vllm with --peer-path")
    parser.add_argument("--port", type=int, default=18001, help="of trtx (default: %(default)s)")
    parser.add_argument("--peer-port", type=int, default=18000, help="of vLLM (default: %(default)s)")
    parser.add_argument("--concurrency", default="1,8,64,256", help="in the order of measuring (default: %(default)s)")
    parser.add_argument("--isl", type=int, default=512)
    parser.add_argument("--osl", type=int, default=128)
    parser.add_argument("--request-count", type=int, help="measured in each cell; default: trtx bench's own")
    parser.add_argument("--requests", default="", metavar="1=24,8=64", help="the same of some concurrencies")
    parser.add_argument("--budget-s", type=float, help="end by then with what is finished (default: no limit)")
    parser.add_argument("--results", type=Path, help="file that keeps what is measured")
    parser.add_argument("--out", type=Path, default=Path("runs"), help="parent of the runs (default: %(default)s)")
    options = parser.parse_args()
    options.servers = (options.servers or ("trtx,vllm" if options.peer_path else "trtx")).split(",")
    if unknown := [name for name in options.servers if name not in SERVERS]:
        parser.error(f"no server {unknown[0]!r}; there are {', '.join(SERVERS)}")
    if "vllm" in options.servers:
        if options.peer_path is None:
            parser.error("--servers has vllm, and nothing says where it is; add --peer-path DIR")
        if not (options.peer_path / "vllm").is_dir():
            parser.error(f"--peer-path {options.peer_path} has no package vllm; expected the folder that it lies in")
    options.concurrency = [int(text) for text in options.concurrency.split(",")]
    pairs = (pair.split("=") for pair in options.requests.split(",") if pair)
    counts = {int(concurrency): int(count) for concurrency, count in pairs}
    options.requests = {one: counts.get(one, options.request_count) for one in options.concurrency}
    options.out = options.out.resolve()
    return options


def main() -> int:
    options = parsed()
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # what was started is ended
    clock = Clock(options.budget_s)
    options.out.mkdir(parents=True, exist_ok=True)
    try:
        options.tokenizer = resolve_checkpoint(options.model, on_gpu=True).path
    except TrtxError as error:
        raise SystemExit(f"http_beside_peer.py: {error}") from None
    load = {"model": options.model, "isl": options.isl, "osl": options.osl}
    measured = earlier(options.results, load, options.servers)
    try:
        for name in options.servers:
            if clock.left_s <= 0:
                measured.problems.append(f"{name} was not measured: the budget was used up")
                continue
            server = trtx_server(options) if name == "trtx" else peer_server(options, options.tokenizer)
            measure(server, options, measured, clock)
    except SystemExit:
        measured.problems.append("told to end: what was not finished by then is not here")
        raise
    finally:
        measured.keep()
        show(measured.rows)
        for problem in measured.problems:
            print(f"not as asked: {problem.splitlines()[0]}")
        print(json.dumps(measured.document()), flush=True)
    return 1 if measured.problems else 0


if __name__ == "__main__":
    sys.exit(main())
