"""Measures the ITL of a text stream, and the memory of the serving processes, while other clients send hostile media.

    python benchmarks/hostile_media.py [--mode disagg] [--encode 1] [--rounds 5] [--seconds 20] [--ways now before]

It serves the model as `trtx serve` does, and streams text from it, one answer after the other. In every other stretch
of time, hostile clients send only media that must be refused: endless, silent and dripping servers, redirects in loops
and to private addresses, truncated files, decompression bombs of pixels and of bytes, animated images, no image at all.
The stretches alternate, so that other load on the machine affects both alike. ``--ways`` serves several topologies at
once, which differ in how they protect the text (``WAYS``), and runs each stretch on each of them in turn. ITL is the
time between arrivals of chunks at the client. The hostile clients and their servers run in a separate process on the
same machine. The exit code is 1 if a text stream failed or if hostile media were accepted.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path

import httpx
import numpy as np
import psutil

from trtx.config import TopologySpec
from trtx.config.media import MediaLimits
from trtx.launch import Event, ServedTopology, prepare, serve
from trtx.topology import Plan, body_mib

CLIENTS = Path(__file__).with_name("hostile_clients.py")
LIMITS = MediaLimits(allow_http_media=True, allow_private_media=True, media_timeout_s=3, media_idle_s=1)


@dataclass(frozen=True, slots=True)
class Way:
    """One way to protect the text: niceness and policy of the decoders, and the environment of every process."""

    media: MediaLimits
    environment: Mapping[str, str] = field(default_factory=dict)
    niceness: int = 10
    policy: int = os.SCHED_OTHER


_EACH = {"DYN_TCP_CHANNEL_BUFFER": "1", "DYN_TCP_POOL_SIZE": "32"}
WAYS = {
    "now": Way(LIMITS),
    "now, a connection each": Way(LIMITS, _EACH),
    "16 MiB, a connection each": Way(LIMITS.model_copy(update={"max_media_bytes": 16 << 20}), _EACH),
    "niceness 19": Way(LIMITS, niceness=19),
    "batch": Way(LIMITS, policy=os.SCHED_BATCH),
    "idle": Way(LIMITS, policy=os.SCHED_IDLE),
    "before": Way(LIMITS, niceness=0),
    "before, one decoder": Way(LIMITS.model_copy(update={"decode_processes": 1}), niceness=0),
    "before, 5 s": Way(LIMITS, {"DYN_TCP_REQUEST_TIMEOUT": "5"}, niceness=0),
}
"""now: decoders have a higher niceness. batch: in addition they don't preempt others (SCHED_BATCH). niceness 19, idle:
decoders run last. before: decoders run like all other processes. 16 MiB: the largest file. 5 s: the time after which a
worker that has not acknowledged a request counts as dead. a connection each: each request that waits for its
acknowledgement has its own connection, while in Dynamo 1.4.2 up to 50 share one."""


@dataclass(slots=True)
class Stretch:
    """The measurements with, or without, hostile clients."""

    itl_ms: list[float] = field(default_factory=list)
    rounds: list[int] = field(default_factory=list)  # the index in ``itl_ms`` at which each round ends
    answers: int = 0
    failed: list[str] = field(default_factory=list)
    refused: Counter[str] = field(default_factory=Counter)  # requests with hostile media, by status
    others: Counter[str] = field(default_factory=Counter)  # responses that were no refusals, by medium
    rss: dict[str, int] = field(default_factory=dict)  # peak bytes by process
    # CPU seconds by process
    cpu_s: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))


async def stream(http: httpx.AsyncClient, model: str, until: float, seen: Stretch, tokens: int) -> None:
    """Streams text, one answer after the other."""
    for number in itertools.count():
        if time.perf_counter() >= until:
            return
        content = f"tell me of {number} and of {seen.answers}"
        body = {"model": model, "messages": [{"role": "user", "content": content}], "stream": True}
        body |= {"max_tokens": tokens, "ignore_eos": True, "temperature": 0}
        try:
            async with http.stream("POST", "/v1/chat/completions", json=body) as answer:
                last: float | None = None
                async for line in answer.aiter_lines():
                    if not line.startswith("data: {"):
                        continue
                    now = time.perf_counter()
                    if '"error"' in line:
                        raise httpx.HTTPError(line[:200])
                    if last is not None:
                        seen.itl_ms.append((now - last) * 1e3)
                    last = now
            seen.answers += 1
        except httpx.HTTPError as error:
            seen.failed.append(f"{type(error).__name__}: {error}")


def processes_of(topology: ServedTopology) -> list[tuple[str, psutil.Process]]:
    """Returns the live processes with their names; the decoders of one worker share a name."""
    found: list[tuple[str, psutil.Process]] = []
    for slot in topology.slots:
        if slot.child is None:
            continue
        try:
            parent = psutil.Process(slot.child.pid)
            found.append((slot.spec.name, parent))
            for process in parent.children(recursive=True):
                command = " ".join(process.cmdline())
                what = "decoders" if "media.decoder" in command else "encoder" if "vision" in command else "engine"
                found.append((f"{slot.spec.name}, {what}", process))
        except psutil.Error:
            continue
    return found


def order_cores(process: psutil.Process, way: Way) -> None:
    """Sets niceness and policy of every thread; a new thread inherits those of the thread that starts it."""
    for thread in process.threads():
        if os.getpriority(os.PRIO_PROCESS, thread.id) != way.niceness:
            os.setpriority(os.PRIO_PROCESS, thread.id, way.niceness)
        if os.sched_getscheduler(thread.id) != way.policy:
            os.sched_setscheduler(thread.id, way.policy, os.sched_param(0))


async def watch(topology: ServedTopology, way: Way, until: float, seen: Stretch) -> None:
    """Records the peak memory and the CPU time of each of the topology's processes.

    It keeps the decoders at the way's niceness, which needs root if it is lower than their own setting.
    """
    before: dict[int, float] = {}
    after: dict[int, tuple[str, float]] = {}
    begins = True
    while time.perf_counter() < until:
        now: Counter[str] = Counter()
        for name, process in processes_of(topology):
            try:
                now[name] += process.memory_info().rss
                taken = sum(process.cpu_times()[:2])
                if name.endswith("decoders"):
                    order_cores(process, way)
            except (psutil.NoSuchProcess, ProcessLookupError):
                continue
            before.setdefault(process.pid, taken if begins else 0.0)
            after[process.pid] = name, taken
        begins = False
        for name, rss in now.items():
            seen.rss[name] = max(rss, seen.rss.get(name, 0))
        await asyncio.sleep(0.2)
    for pid, (name, taken) in after.items():
        seen.cpu_s[name] += taken - before[pid]


@dataclass(frozen=True, slots=True)
class Side:
    """A served topology with its clients."""

    topology: ServedTopology
    way: Way
    hostile: asyncio.subprocess.Process
    http: httpx.AsyncClient

    @classmethod
    async def begin(cls, topology: ServedTopology, way: Way, clients: int, tokens: int) -> Side:
        command = [str(CLIENTS), topology.url, topology.model, str(clients), str(body_mib(way.media) - 1)]
        pipe = asyncio.subprocess.PIPE
        hostile = await asyncio.create_subprocess_exec(sys.executable, *command, stdin=pipe, stdout=pipe)
        assert hostile.stdout is not None and await hostile.stdout.readline() == b"ready\n"
        http = httpx.AsyncClient(base_url=topology.url, timeout=120, trust_env=False)
        await stream(http, topology.model, time.perf_counter() + 3, Stretch(), tokens)
        return cls(topology, way, hostile, http)

    async def stretch(self, sizes: str | None, seconds: float, tokens: int, seen: Stretch) -> None:
        """Measures one stretch of time. ``sizes``: the kind of hostile bodies; None: no hostile clients."""
        assert self.hostile.stdin is not None and self.hostile.stdout is not None
        until = time.perf_counter() + seconds
        if sizes is not None:
            self.hostile.stdin.write(f"{seconds} {sizes}\n".encode())
        await asyncio.gather(
            stream(self.http, self.topology.model, until, seen, tokens), watch(self.topology, self.way, until, seen)
        )
        seen.rounds.append(len(seen.itl_ms))
        if sizes is not None:
            refused, others = json.loads(await self.hostile.stdout.readline())
            seen.refused.update(refused)
            seen.others.update(others)

    async def end(self) -> None:
        assert self.hostile.stdin is not None
        self.hostile.stdin.close()
        await self.hostile.wait()
        await self.http.aclose()


KINDS = {"quiet": None, "beside hostile media": "small", "beside these and large bodies": "large"}


async def measure(served: Mapping[str, ServedTopology], arguments: argparse.Namespace) -> dict[str, Stretch]:
    sides = {
        name: await Side.begin(topology, WAYS[name], arguments.clients, arguments.tokens)
        for name, topology in served.items()
    }
    order = [(f"{kind}: {name}", sizes, side) for kind, sizes in KINDS.items() for name, side in sides.items()]
    stretches = {title: Stretch() for title, _, _ in order}
    for number in range(arguments.rounds):
        for title, sizes, side in order[:: 1 if number % 2 == 0 else -1]:
            await side.stretch(sizes, arguments.seconds, arguments.tokens, seen := stretches[title])
            last = seen.itl_ms[seen.rounds[-2] if number else 0 :]
            p99 = np.percentile(last, 99) if last else np.nan
            print(f"- {number}, {title}: {len(last)} tokens, p99 {p99:.1f} ms", file=sys.stderr, flush=True)
    for side in sides.values():
        await side.end()
    return stretches


def p99_of_rounds(seen: Stretch) -> list[float]:
    """Returns the 99th percentile of ITL of each round in ms, without rounds of fewer than two tokens."""
    parts = np.split(np.array(seen.itl_ms), seen.rounds[:-1])
    return [float(np.percentile(part, 99)) for part in parts if len(part)]


def table(stretches: dict[str, Stretch]) -> None:
    print("| | answers | tokens | of a round, median | ITL p50 ms | p90 | p99 | of a round, median | longest |")
    print("|---|--:|--:|--:|--:|--:|--:|--:|--:|")
    for name, seen in stretches.items():
        if not seen.itl_ms:
            print(f"| {name} | {seen.answers} | 0 | | | | | | |")
            continue
        p50, p90, p99 = np.percentile(seen.itl_ms, (50, 90, 99))
        print(
            f"| {name} | {seen.answers} | {len(seen.itl_ms)} | {np.median(np.diff([0, *seen.rounds])):.0f} | "
            f"{p50:.2f} | {p90:.2f} | {p99:.2f} | {np.median(p99_of_rounds(seen)):.2f} | {max(seen.itl_ms):.1f} |"
        )
    for what, unit in (("most RSS, MiB", "rss"), ("CPU seconds", "cpu_s")):
        print(f"\n| {what} | {' | '.join(stretches)} |\n|---|{'--:|' * len(stretches)}")
        for process in sorted({process for seen in stretches.values() for process in seen.rss}):
            found = [
                seen.rss.get(process, 0) >> 20 if unit == "rss" else seen.cpu_s[process] for seen in stretches.values()
            ]
            print(f"| {process} | {' | '.join(f'{one:.1f}' if unit == 'cpu_s' else str(one) for one in found)} |")
    print()
    for name, seen in stretches.items():
        said = ", ".join(f"{count} x {status}" for status, count in sorted(seen.refused.items()))
        print(f"{name}: {len(seen.failed)} text streams failed; hostile requests by status: {said or 'none'}")
        for line in (*seen.failed[:3], *(f"{count} x {what}" for what, count in seen.others.most_common(5))):
            print(f"  {line}")


def planned(way: Way, arguments: argparse.Namespace) -> Plan:
    spec = TopologySpec(
        model=arguments.model, engine="torch", mode=arguments.mode, encode=arguments.encode, media=way.media, port=0
    )
    plan = prepare(spec, run_dir=Path(tempfile.mkdtemp(prefix="trtx-hostile-media-")))
    return replace(plan, processes=tuple(replace(one, env={**one.env, **way.environment}) for one in plan.processes))


def told(event: Event) -> None:
    print(f"- {event.message}", file=sys.stderr, flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="synthetic:tiny-vl")
    parser.add_argument("--mode", choices=("agg", "disagg"), default="agg")
    parser.add_argument("--encode", type=int, default=0)
    parser.add_argument("--rounds", type=int, default=5, help="of a stretch of each kind")
    parser.add_argument("--seconds", type=float, default=20, help="of a stretch")
    parser.add_argument("--clients", type=int, default=4, help="that send hostile media, one request at a time each")
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=["now"], help="default: %(default)s")
    parser.add_argument("--tokens", type=int, default=128, help="of a streamed answer")
    arguments = parser.parse_args()
    print(
        f"# {' '.join(sys.argv)}; load average before: {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores", flush=True
    )
    with ExitStack() as stack:
        served = {
            name: stack.enter_context(serve(planned(WAYS[name], arguments), on_event=told)) for name in arguments.ways
        }
        stretches = asyncio.run(measure(served, arguments))
        restarts = [(name, one.name, one.exit) for name, topology in served.items() for one in topology.restarts]
    table(stretches)
    print(f"restarts: {restarts}")
    are_refused = all(status.startswith("4") for seen in stretches.values() for status in seen.refused)
    has_failed = any(seen.failed for seen in stretches.values())
    return 0 if are_refused and not has_failed and not restarts else 1


if __name__ == "__main__":
    sys.exit(main())
