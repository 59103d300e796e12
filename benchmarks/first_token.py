"""Breaks down the time to first token, and the clients' time between requests, by timestamps in each process.

    python benchmarks/first_token.py --model synthetic:qwen3-0.6b --concurrency 1,64,256

It starts one ``trtx serve`` whose worker and engine record a timestamp at each stage of a request
(``stamps/sitecustomize.py``). A closed loop of aiperf, as ``trtx bench`` runs it, and one of ``raw_client.py``, which
needs almost no CPU, load it in turn; the difference between them is due to the client. ``--clients paced-raw`` is the
latter with prompts as token ids, which need no tokenizer. All processes use the same clock, so each stage is the
difference of two timestamps of one request. If a client's requests have no id, its first and last stage are means over
all requests. CPU usage is per thread, as a share of a core over the middle half of a load. The last line of stdout is
one JSON document.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import os
import random
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import mean, median
from typing import Any

import psutil
import raw_client
from tokenizers import Tokenizer

from trtx.config import TopologySpec
from trtx.launch import Interruption, prepare, serve

STAMPS = Path(__file__).with_name("stamps")
SAMPLE_S = 0.25
STAGES = {
    "client to worker": ("start", "called"),
    "until the loop has it": ("called", "began"),
    "worker": ("began", "submitted"),
    "to the engine's loop": ("submitted", "came"),
    "engine": ("came", "reported"),
    "engine to worker": ("reported", "delivered"),
    "until it is a chunk": ("delivered", "yielded"),
    "chunk to client": ("yielded", "first"),
    "of it until it was taken": ("yielded", "taken"),
    "last token to client": ("ended", "end"),
}
"""Each stage with its two timestamps, in the order in which a request passes them."""

Row = dict[str, Any]


class ThreadCpu:
    """Samples the CPU ticks of each thread of the server's processes."""

    def __init__(self) -> None:
        self._samples: list[tuple[int, dict[tuple[str, int, str], int]]] = []
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> ThreadCpu:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._stop.set()
        self._thread.join()

    def shares(self, begin_ns: int, end_ns: int) -> list[tuple[str, float]]:
        """Returns each thread's share of a core, the busiest first."""
        within = [sample for sample in self._samples if begin_ns <= sample[0] <= end_ns]
        if len(within) < 2:
            return []
        (first_ns, first), (last_ns, last) = within[0], within[-1]
        seconds = (last_ns - first_ns) / 1e9
        ticks = os.sysconf("SC_CLK_TCK")
        found = [
            (f"{kind} {name} {thread}", (last[key] - first.get(key, 0)) / ticks / seconds)
            for key in last
            for kind, thread, name in (key,)
        ]
        return sorted(found, key=lambda one: -one[1])

    def _run(self) -> None:
        while not self._stop.wait(SAMPLE_S):
            now: dict[tuple[str, int, str], int] = {}
            for process, kind in _processes():
                for task in Path(f"/proc/{process.pid}/task").glob("*/stat"):
                    try:
                        head, _, tail = task.read_text().rpartition(")")
                    except OSError:
                        continue
                    words = tail.split()
                    now[kind, int(task.parent.name), head.partition("(")[2]] = int(words[11]) + int(words[12])
            self._samples.append((time.monotonic_ns(), now))


def _processes() -> list[tuple[psutil.Process, str]]:
    found = []
    for process in psutil.Process().children(recursive=True):
        try:
            words = " ".join(process.cmdline())
        except psutil.Error:
            continue
        kinds = {"trtx.worker": "worker", "trtx.frontend": "frontend", "trtx.torch_engine.core": "engine"}
        found += [
            (process, kind) for word, kind in kinds.items() if f"-m {word}" in words or f"{word}.process" in words
        ]
    return found


def pin(cores: set[int]) -> None:
    for process, kind in _processes():
        if kind == "worker":
            for thread in Path(f"/proc/{process.pid}/task").iterdir():
                os.sched_setaffinity(int(thread.name), cores)


def by_aiperf(url: str, model: str, tokenizer: Path, concurrency: int, options: argparse.Namespace) -> list[Row]:
    offset = time.time_ns() - time.monotonic_ns()
    with tempfile.TemporaryDirectory(prefix="trtx-first-") as out:
        command = [sys.executable, "-m", "trtx", "bench", "--url", url, "--model", model, "--tokenizer", str(tokenizer),
                   "--concurrency", str(concurrency), "--isl", str(options.isl), "--osl", str(options.osl),
                   "--request-count", str(concurrency * options.requests), "-o", out]  # fmt: skip
        done = subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        files = sorted(Path(out).glob("*/cells/*/*/profile_export.jsonl"))
        if done.returncode != 0 or not files:
            raise SystemExit(f"trtx bench ended with {done.returncode}:\n{done.stderr[-2000:]}")
        rows = []
        # Use the last trial: a trial that was not steady is repeated with a longer one.
        for line in files[-1].read_text().splitlines():
            record = json.loads(line)
            said = record["metadata"]
            if said["benchmark_phase"] != "profiling" or "time_to_first_token" not in record["metrics"]:
                continue
            start = said["request_start_ns"] - offset
            rows.append({
                "id": said["x_request_id"], "start": start, "end": said["request_end_ns"] - offset,
                "first": start + int(1e6 * record["metrics"]["time_to_first_token"]["value"]),
                "credit": said["credit_issued_ns"] - offset,
            })  # fmt: skip
    return rows


def by_raw(
    url: str, model: str, tokenizer: Path, concurrency: int, options: argparse.Namespace, *, as_ids: bool
) -> list[Row]:
    encoder = Tokenizer.from_file(str(tokenizer / "tokenizer.json"))
    dice = random.Random(concurrency)
    bodies = []
    for _ in range(concurrency * options.requests):
        ids = [dice.randrange(encoder.get_vocab_size()) for _ in range(options.isl)]
        if not as_ids:
            ids = encoder.encode(encoder.decode(ids), add_special_tokens=False).ids[: options.isl]
        common = {"model": model, "stream": True, "max_tokens": options.osl, "ignore_eos": True,
                  "stream_options": {"include_usage": True}}  # fmt: skip
        if as_ids:
            bodies.append(("/v1/completions", {**common, "prompt": ids}))
        else:
            message = {"role": "user", "content": encoder.decode(ids)}
            bodies.append(("/v1/chat/completions", {**common, "messages": [message]}))
    processes = min(options.processes, concurrency)
    port = int(url.rpartition(":")[2])
    shares: list[list[list[Any]]] = [[[] for _ in range(concurrency)[n::processes]] for n in range(processes)]
    for number, body in enumerate(bodies):
        client = number % concurrency
        shares[client % processes][client // processes].append(body)
    with multiprocessing.get_context("spawn").Pool(processes) as pool:
        answers = [one for part in pool.starmap(in_turn, [(port, share) for share in shares]) for one in part]
    return [{"start": int(1e9 * one.sent), "first": int(1e9 * one.first_event), "end": int(1e9 * one.done)}
            for one in answers]  # fmt: skip


def in_turn(port: int, clients: list[list[tuple[str, dict[str, Any]]]]) -> list[raw_client.Answer]:
    """Sends each client's requests one after another, with all clients in parallel."""

    async def client(bodies: list[tuple[str, dict[str, Any]]]) -> list[raw_client.Answer]:
        connection = await raw_client.connect(port)
        return [await connection.ask(path, body) for path, body in bodies]

    async def all_of_them() -> list[raw_client.Answer]:
        return [one for part in await asyncio.gather(*map(client, clients)) for one in part]

    return asyncio.run(all_of_them())


def read_stamps(folder: Path) -> tuple[list[Row], dict[int, Row], list[Row]]:
    workers, engine, collections = [], {}, []
    for path in folder.glob("*.jsonl"):
        for line in path.read_text().splitlines():
            row = json.loads(line)
            if row["at"] == "gc":
                collections.append(row | {"pid": int(path.stem)})
            elif row["at"] == "worker":
                workers.append(row)
            else:
                engine[row["sequence"]] = row
    return workers, engine, collections


def joined(clients: list[Row], workers: list[Row], engine: dict[int, Row]) -> list[Row]:
    """Returns one row per request with all its timestamps, matched by id or, without ids, by the order of start."""
    inside = [{**engine.get(row.get("sequence", 0), {}), **row} for row in workers]
    begin, end = min(row["start"] for row in clients), max(row["end"] for row in clients)
    inside = sorted((row for row in inside if begin <= row["called"] <= end), key=lambda row: row["called"])
    by_id = {row["id"]: row for row in inside}
    if all(row.get("id") in by_id for row in clients):
        return [{**by_id[row["id"]], **row} for row in clients]
    if len(inside) != len(clients):
        raise SystemExit(f"the worker saw {len(inside)} requests of {len(clients)}")
    # Without ids, the mean of a difference is still right, because it needs no pairs; its spread is not.
    return [{**row, **one, "is_paired": False} for row, one in zip(inside, sorted(clients, key=lambda r: r["start"]),
                                                                   strict=True)]  # fmt: skip


def account(rows: list[Row], concurrency: int) -> dict[str, Any]:
    """Returns mean, median and 90th percentile of each stage in the middle half of a load, in milliseconds."""
    begin, end = min(row["start"] for row in rows), max(row["end"] for row in rows)
    low, high = begin + (end - begin) / 4, end - (end - begin) / 4
    middle = [row for row in rows if low <= row["start"] <= high]
    found: dict[str, Any] = {}
    for name, (first, last) in {"TTFT": ("start", "first"), **STAGES, "request": ("start", "end")}.items():
        spans = sorted((row[last] - row[first]) / 1e6 for row in middle if first in row and last in row)
        if spans:
            found[name] = [mean(spans), median(spans), spans[int(0.9 * (len(spans) - 1))]]
    open_ns = sum(
        min(row["end"], high) - max(row["start"], low) for row in rows if row["end"] > low and row["start"] < high
    )
    in_engine = [row for row in rows if "came" in row and row["ended"] > low and row["came"] < high]
    engine_ns = sum(min(row["ended"], high) - max(row["came"], low) for row in in_engine)
    ended = sorted((row for row in rows if low <= row.get("ended", 0) <= high), key=lambda row: row["ended"])
    steps, steps_ms, in_steps = 0, None, None
    if len(ended) > 1 and (steps := ended[-1]["steps"] - ended[0]["steps"]):
        steps_ms = (ended[-1]["ended"] - ended[0]["ended"]) / 1e6 / steps
        in_steps = (ended[-1]["steps_ns"] - ended[0]["steps_ns"]) / 1e6 / steps
    return {
        "steps": steps, "ms_a_step": steps_ms, "ms_in_a_step": in_steps,
        "stages_ms": found, "requests": len(middle), "prompt_tokens": mean(row["tokens"] for row in middle),
        "open_at_clients": open_ns / (high - low), "open_in_engine": engine_ns / (high - low),
        "requests_per_s": 1e9 * sum(low <= row["end"] <= high for row in rows) / (high - low),
        "window_ns": [int(low), int(high)], "concurrency": concurrency,
    }  # fmt: skip


def collected(rows: list[Row], begin_ns: int, end_ns: int) -> dict[str, list[float]]:
    """Returns garbage collections by process and generation: number per second, share of time, longest in ms."""
    found: dict[str, list[float]] = {}
    seconds = (end_ns - begin_ns) / 1e9
    for row in rows:
        if begin_ns <= row["began"] <= end_ns:
            one = found.setdefault(f"process {row['pid']}, generation {row['generation']}", [0.0, 0.0, 0.0])
            one[0] += 1 / seconds
            one[1] += row["ns"] / 1e9 / seconds
            one[2] = max(one[2], row["ns"] / 1e6)
    return found


@contextmanager
def stamped(folder: Path, modelled: str | None) -> Iterator[None]:
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join([str(STAMPS), *([before] if before else [])])
    os.environ["TRTX_STAMPS"] = str(folder)
    if modelled:
        os.environ["TRTX_MODELLED"] = modelled
    try:
        yield
    finally:
        del os.environ["TRTX_STAMPS"]
        os.environ.pop("TRTX_MODELLED", None)
        if before is None:
            del os.environ["PYTHONPATH"]
        else:
            os.environ["PYTHONPATH"] = before


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="synthetic:qwen3-0.6b", help="synthetic:<shape> or a checkpoint directory")
    parser.add_argument("--concurrency", default="1,64,256")
    parser.add_argument("--clients", default="aiperf,raw,raw-ids", help="of them, with commas (default: %(default)s)")
    parser.add_argument("--isl", type=int, default=512, help="prompt tokens")
    parser.add_argument("--osl", type=int, default=128, help="generated tokens")
    parser.add_argument("--requests", type=int, default=8, help="of each client")
    parser.add_argument("--processes", type=int, default=4, help="of the raw clients")
    parser.add_argument("--modelled", metavar="MS,US", help="an engine that sleeps: a step, and a prompt token more")
    parser.add_argument("--worker-cores", help="those of the worker's threads under the loads, such as 0,1")
    parser.add_argument("--set", action="append", default=[], help="setting of the engine")
    options = parser.parse_args()
    found = []
    with tempfile.TemporaryDirectory(prefix="trtx-first-") as directory:
        folder = Path(directory) / "stamps"
        folder.mkdir()
        spec = TopologySpec(model=options.model, mode="agg", port=0, overrides=tuple(options.set))
        plan = prepare(spec, run_dir=Path(directory) / "serve")
        with (
            stamped(folder, options.modelled),
            serve(plan, on_event=lambda event: None, interruption=Interruption()) as topology,
        ):
            loads = []
            if options.worker_cores:
                pin({int(core) for core in options.worker_cores.split(",")})
            with ThreadCpu() as cpu:
                for concurrency in map(int, options.concurrency.split(",")):
                    for client in options.clients.split(","):
                        model_path = Path(plan.model_path)
                        if client == "aiperf":
                            rows = by_aiperf(topology.url, topology.model, model_path, concurrency, options)
                        else:
                            rows = by_raw(topology.url, topology.model, model_path, concurrency, options,
                                          as_ids=client == "raw-ids")  # fmt: skip
                        loads.append((concurrency, client, rows))
        workers, engine, collections = read_stamps(folder)
        for concurrency, client, rows in loads:
            all_of_it = joined(rows, workers, engine)
            one = account(all_of_it, concurrency) | {"client": client}
            one["threads"] = cpu.shares(*one["window_ns"])[:12]
            one["collections"] = collected(collections, *one["window_ns"])
            found.append(one)
            show(one)
    print(json.dumps({"model": options.model, "isl": options.isl, "osl": options.osl, "loads": found}))


def show(one: dict[str, Any]) -> None:
    print(f"\n{one['concurrency']} clients, {one['client']}: {one['requests_per_s']:.1f} requests/s, "
          f"{one['requests']} in the middle, {one['prompt_tokens']:.0f} prompt tokens; "
          f"open at clients {one['open_at_clients']:.1f}, in the engine {one['open_in_engine']:.1f}")  # fmt: skip
    if one["steps"]:
        print(f"  {one['steps']} steps, {one['ms_a_step']:.2f} ms each, {one['ms_in_a_step']:.2f} of it in step()")
    for name, (average, half, tenth) in one["stages_ms"].items():
        print(f"  {name:<26} {average:>9.2f} {half:>9.2f} {tenth:>9.2f}")
    for name, (rate, share, longest) in sorted(one["collections"].items()):
        print(f"  garbage, {name}: {rate:.1f} a second, {share:.1%} of the time, the longest {longest:.1f} ms")
    print("  threads: " + ", ".join(f"{name} {share:.2f}" for name, share in one["threads"][:8]), flush=True)


if __name__ == "__main__":
    main()
