r"""Compares trtx with its peers on the same GPUs, through HTTP and under the same loads.

    python benchmarks/http_beside_peer.py --model synthetic:qwen3-8b --peer vllm=DIR --peer sglang=DIR
    python benchmarks/http_beside_peer.py --peer vllm=DIR --load drawn --load long:concurrency=8 --temperature 0
    python benchmarks/http_beside_peer.py --peer vllm=DIR --model synthetic:qwen3-32b --tp 2
    python benchmarks/http_beside_peer.py --peer vllm=DIR --set kv_cache_config.host_cache_size=20000000000 \
        --peer-word vllm=--kv-offloading-size --peer-word vllm=20 --load turns

The servers run one after the other on 127.0.0.1; each starts once the previous one has freed its GPU memory. Peers run
with their own defaults, and with what ``--peer-word`` adds. All are measured with the same ``trtx bench --url`` calls:
streaming, the same prompts, no SLO, and the server's own sampling or ``--temperature``. Metrics are over all measured
requests. ``--peer`` names a folder with a peer and its dependencies (``benchmarks/peer_servers.py``); without it, only
trtx is measured. ``benchmarks/user_loads.py`` defines the loads; without ``--load`` it is ``fixed`` at each
``--concurrency``.

A cell that fails or exceeds ``--budget-s`` stays empty, the other cells are printed, and the exit code is 1.
``--results FILE`` stores every result at once. Results of the same model from earlier calls are shown too, so each
server and each load can have a call of its own. The last line of stdout is one JSON document: a row for each server and
load, the version and start-up time of each server, and all problems.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from peer_servers import Failed, Server, end_of, gpu_memory_mib, peer_server, peers_of, served, trtx_server
from user_loads import KINDS, UserLoad, user_loads

from trtx.checkpoint import resolve_checkpoint
from trtx.errors import TrtxError

RENDER_S = 60.0  # for a terminated bench to write its results
FIGURES = (
    "output_token_throughput", "time_to_first_token_p50", "time_to_first_token_p90", "time_to_first_token_p99",
    "inter_token_latency_p50", "inter_token_latency_p99",
)  # fmt: skip
STEADY = "steady_output_token_throughput"  # without the first and last requests; only in the JSON document
SHOWN = ("concurrency", "request_rate", "request_count", "status", "validity", *FIGURES, STEADY)
OF_FIXED = ("concurrency", "isl", "osl", "request_count", "requests")  # options of the load without --load


@dataclass(slots=True)
class Measured:
    """The results so far. ``path``: the file that gets them after each step, or None."""

    about: dict[str, Any]
    path: Path | None
    rows: list[dict[str, Any]] = field(default_factory=list)
    start_s: dict[str, float] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)

    def document(self) -> dict[str, Any]:
        known = {"versions": self.versions, "start_s": self.start_s, "rows": self.rows, "problems": self.problems}
        return {**self.about, **known}

    def keep(self) -> None:
        if self.path is not None:
            making = self.path.with_suffix(".tmp")
            making.write_text(json.dumps(self.document()))
            making.replace(self.path)


class Clock:
    """Measures the time since the start and the rest of the budget."""

    def __init__(self, budget_s: float | None) -> None:
        self.began, self.budget_s = time.monotonic(), budget_s

    def left_s(self) -> float:
        return float("inf") if self.budget_s is None else self.budget_s - (time.monotonic() - self.began)

    def say(self, text: str) -> None:
        print(f"[{time.monotonic() - self.began:5.0f} s] {text}", flush=True)


def bench(server: Server, model: str, load: UserLoad, options: argparse.Namespace, clock: Clock) -> dict[str, Any]:
    """Runs ``trtx bench --url`` and returns its row. Ends it when the budget is used up. Raises Failed."""
    out = options.out / f"{server.name}-{time.time_ns()}"
    command = [sys.executable, "-m", "trtx", "bench", "--url", server.url, "--model", model,
               "--tokenizer", str(options.tokenizer), *load.words(), "-o", str(out)]  # fmt: skip
    log = out.with_suffix(".log")
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=output)
    try:
        process.wait(None if clock.left_s() == float("inf") else max(clock.left_s(), 0))
    except subprocess.TimeoutExpired:
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(RENDER_S)
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()
    for summary in out.glob("*/summary.json"):
        for row in json.loads(summary.read_text())["rows"]:
            if row["output_token_throughput"] is not None and row["status"] != "failed":
                measured = datetime.now(UTC).date().isoformat()
                told = {"server": server.name, "version": server.version, "load": load.name, "measured": measured}
                words = {"options": load.options, "peer_words": options.words.get(server.name, [])}
                return told | {name: row.get(name) for name in SHOWN} | words
    why = "the budget was used up" if clock.left_s() <= 0 else f"trtx bench ended with {process.returncode}"
    raise Failed(f"{server.name} has no figures of {load.name}: {why}; {end_of(log)}")


def measure(server: Server, options: argparse.Namespace, measured: Measured, clock: Clock) -> None:
    """Serves and measures one server; adds its rows and problems to ``measured``."""
    clock.say(f"{server.name} {server.version}: starting, GPU memory in use: {gpu_memory_mib()} MiB")
    measured.versions[server.name] = server.version
    log = options.out / f"{server.name}.log"
    try:
        with served(server, log, clock.left_s, measured.problems) as (model, start_s):
            measured.start_s[server.name] = start_s
            clock.say(f"{server.name}: first answer after {start_s:.1f} s")
            for load in options.loads:
                try:
                    row = bench(server, model, load, options, clock)
                    measured.rows.append(row)
                    rate = f"{row['output_token_throughput']:,.0f} tokens/s"
                    clock.say(f"{server.name}: {load.name}: {rate}, {row['status']}, {row['validity']}")
                except Failed as failure:
                    measured.problems.append(str(failure))
                    clock.say(str(failure))
                measured.keep()
    except Failed as failure:
        measured.problems.append(str(failure))
        clock.say(str(failure))
    clock.say(f"{server.name}: ended, GPU memory in use: {gpu_memory_mib()} MiB")
    measured.keep()


def earlier(path: Path | None, about: dict[str, Any], options: argparse.Namespace) -> Measured:
    """Returns the results of earlier calls for the same model, without those that this call measures again."""
    measured = Measured(about, path)
    if path is None or not path.exists():
        return measured
    kept = json.loads(path.read_text())
    if {name: kept.get(name) for name in about} == about:
        anew = {(server, load.name) for server in options.servers for load in options.loads}
        measured.rows = [row for row in kept["rows"] if (row["server"], row["load"]) not in anew]
        measured.start_s, measured.versions = kept["start_s"], kept["versions"]
    return measured


def show(rows: list[dict[str, Any]]) -> None:
    """Prints a table for each load, trtx first, with the ratio of trtx's tokens/s to each peer's."""
    heads = f"{'tokens/s':>10} {'trtx to it':>10} {'TTFT p50':>9} {'p90':>9} {'p99':>9} {'ITL p50':>8} {'p99':>8}"
    ours = {row["load"]: row for row in rows if row["server"] == "trtx"}
    for load in dict.fromkeys(row["load"] for row in rows):
        print(f"\n{load}\n{'':>18} {heads}")
        for row in sorted((one for one in rows if one["load"] == load), key=lambda one: one["server"] != "trtx"):
            mine, own = ours.get(load), row["output_token_throughput"]
            beside = mine is not None and row["server"] != "trtx" and mine["options"] == row["options"]
            ratio = f"{mine['output_token_throughput'] / own:.3f}" if beside and mine is not None and own else ""
            cells = ["–" if row[figure] is None else f"{row[figure]:,.1f}" for figure in FIGURES]
            shown = "{:>10} {:>10} {:>9} {:>9} {:>9} {:>8} {:>8}".format(cells[0], ratio, *cells[1:])
            print(f"{row['server'] + ' ' + row['version']:>18} {shown}  {row['status']}, {row['validity']}, "
                  f"{row['measured']}")  # fmt: skip


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="synthetic:qwen3-8b", help="synthetic:<shape> or a checkpoint directory")
    parser.add_argument("--set", action="append", default=[], help="engine config field of trtx, as trtx serve has it")
    parser.add_argument(
        "--peer", action="append", default=[], metavar="NAME=DIR", help="vllm, sglang or such as vllm-0.24; repeatable"
    )
    parser.add_argument("--tp", type=int, default=1, help="GPUs of each server (default: %(default)s)")
    parser.add_argument(
        "--peer-word",
        action="append",
        default=[],
        metavar="NAME=WORD",
        help="one more word of a peer's command, such as vllm=--enforce-eager; repeatable, in order",
    )
    parser.add_argument("--servers", help="some of trtx and the peers, in their order; default: all, trtx first")
    parser.add_argument("--port", type=int, default=18001, help="of trtx (default: %(default)s)")
    parser.add_argument("--peer-port", type=int, default=18000, help="of the peers (default: %(default)s)")
    parser.add_argument(
        "--load", action="append", default=[], metavar="KIND:option=value,…", help=f"{', '.join(KINDS)}; repeatable"
    )
    parser.add_argument("--temperature", type=float, help="of every request; 0 is greedy (default: the server's)")
    parser.add_argument("--concurrency", help="without --load: fixed at each (default: 1,8,64,256)")
    parser.add_argument("--isl", type=int, help="without --load (default: 512)")
    parser.add_argument("--osl", type=int, help="without --load (default: 128)")
    parser.add_argument("--request-count", type=int, help="without --load; default: trtx bench's own")
    parser.add_argument("--requests", metavar="1=24,8=64", help="the same of some concurrencies")
    parser.add_argument("--budget-s", type=float, help="end by then with what is finished (default: no limit)")
    parser.add_argument("--results", type=Path, help="file that keeps what is measured")
    parser.add_argument("--out", type=Path, default=Path("runs"), help="parent of the runs (default: %(default)s)")
    options = parser.parse_args()
    try:
        options.peers = peers_of(options.peer)
        if options.load and (of_fixed := [name for name in OF_FIXED if getattr(options, name) is not None]):
            flag = f"--{of_fixed[0].replace('_', '-')}"
            raise ValueError(f"{flag} is for calls without --load; say it in the load, such as fixed:concurrency=8")
        common = {} if options.temperature is None else {"temperature": f"{options.temperature:g}"}
        options.loads = user_loads(options.load or fixed_loads(options), common)
    except ValueError as error:
        parser.error(str(error))
    if options.tp < 1:
        parser.error(f"--tp {options.tp}: expected at least 1 GPU")
    options.words = {name: [] for name in options.peers}
    for text in options.peer_word:
        name, is_pair, word = text.partition("=")
        if not is_pair or name not in options.words:
            parser.error(f"--peer-word {text} is not NAME=WORD with the NAME of a --peer")
        options.words[name].append(word)
    known = ["trtx", *options.peers]
    options.servers = known if options.servers is None else options.servers.split(",")
    if unknown := [name for name in options.servers if name not in known]:
        parser.error(f"no server {unknown[0]!r}; there are {', '.join(known)}; a peer takes --peer NAME=DIR")
    options.out = options.out.resolve()
    return options


def fixed_loads(options: argparse.Namespace) -> list[str]:
    counts = dict(pair.split("=", 1) for pair in (options.requests or "").split(",") if pair)
    found = []
    for concurrency in (options.concurrency or "1,8,64,256").split(","):
        said = {"concurrency": concurrency, "isl": options.isl, "osl": options.osl,
                "request-count": counts.pop(concurrency, options.request_count)}  # fmt: skip
        found.append("fixed:" + ",".join(f"{name}={value}" for name, value in said.items() if value is not None))
    if counts:
        raise ValueError(f"--requests has {', '.join(counts)}, which is no concurrency of this call")
    return found


def main() -> int:
    options = parsed()
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # what was started is ended
    clock = Clock(options.budget_s)
    options.out.mkdir(parents=True, exist_ok=True)
    try:
        options.tokenizer = resolve_checkpoint(options.model, on_gpu=True).path
    except TrtxError as error:
        raise SystemExit(f"http_beside_peer.py: {error}") from None
    measured = earlier(options.results, {"model": options.model, "settings": options.set, "tp": options.tp}, options)
    try:
        for name in options.servers:
            if clock.left_s() <= 0:
                measured.problems.append(f"{name} was not measured: the budget was used up")
                continue
            server = (
                trtx_server(options.model, options.set, options.port, options.out, tp=options.tp)
                if name == "trtx"
                else peer_server(
                    name,
                    options.peers[name],
                    options.tokenizer,
                    options.peer_port,
                    options.out,
                    tp=options.tp,
                    more=options.words[name],
                )
            )
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
