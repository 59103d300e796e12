"""Measures what it brings that decode workers prefill some prompts themselves (``--conditional-disagg``), on a CPU.

    python benchmarks/conditional_disagg.py                      # conversations of five turns, 5 min
    python benchmarks/conditional_disagg.py --turns 1 --clients 8 --policy prefill_load,prefill_busy_threshold=0.25

Three topologies of two workers run at the same time: two aggregated workers, a prefill and a decode worker, and the
same with ``--policy``. The clients send the same load to one after the other, in turn, ``--rounds`` times, so that
whatever else the machine does affects all alike. In a round each client has one conversation of ``--turns`` turns, with
``--words`` new random words in each turn and ``--tokens`` tokens in each answer.

TTFT and ITL (a request's mean) are measured by the clients. CPU time is that of all processes of the topology, without
the clients. The table has medians over requests, CPU time and tokens per second over rounds, and each figure's median
ratio to the topology without the policy, of the same round. The last line of stdout is one JSON document.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import random
import statistics
import sys
import tempfile
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal
from urllib.parse import urlsplit

import psutil

from trtx.config import TopologySpec
from trtx.launch import prepare, serve
from trtx.launch.processes import members
from trtx.topology import Plan

WORDS = ("river", "stone", "cloud", "seven", "house", "paper", "green", "early", "table", "sound", "first", "night")
TWO_AGG, REMOTE, POLICY = "two agg", "disagg", "disagg, policy"
FIGURES = ("ttft_p50_ms", "ttft_p90_ms", "itl_p50_ms", "tokens_s", "cpu_ms_a_request")


@dataclass
class Round:
    """What the clients of one way saw in one round."""

    first_s: list[float] = field(default_factory=list)
    between_s: list[float] = field(default_factory=list)
    tokens: int = 0
    outcomes: Counter[str] = field(default_factory=Counter)
    took_s: float = 0.0
    cpu_s: float = 0.0

    def figures(self) -> dict[str, float]:
        first = sorted(self.first_s)
        return {
            "ttft_p50_ms": 1e3 * statistics.median(first),
            "ttft_p90_ms": 1e3 * first[round(0.9 * (len(first) - 1))],
            "itl_p50_ms": 1e3 * statistics.median(self.between_s),
            "tokens_s": self.tokens / self.took_s,
            "cpu_ms_a_request": 1e3 * self.cpu_s / len(first),
        }


def ask(url: str, model: str, messages: list[dict[str, str]], tokens: int, seen: Round) -> str:
    """Sends the conversation; adds to ``seen``, and returns the answer's text."""
    body = {
        "model": model, "messages": messages, "max_tokens": tokens, "min_tokens": tokens, "ignore_eos": True,
        "temperature": 0.0, "stream": True, "nvext": {"extra_fields": ["engine_data"]},
    }  # fmt: skip
    place = urlsplit(url)
    connection = http.client.HTTPConnection(str(place.hostname), place.port, timeout=300)
    began, first, last, text, outcome = time.perf_counter(), 0.0, 0.0, "", "aggregated"
    try:
        connection.request("POST", "/v1/chat/completions", json.dumps(body), {"Content-Type": "application/json"})
        answer = connection.getresponse()
        if answer.status != 200:
            raise RuntimeError(f"HTTP {answer.status}: {answer.read(500).decode()}")
        for line in answer:
            if not line.startswith(b"data: {"):
                continue
            event, last = json.loads(line[6:]), time.perf_counter()
            first = first or last
            text += "".join(choice["delta"].get("content") or "" for choice in event["choices"])
            handoff = ((event.get("nvext") or {}).get("engine_data") or {}).get("handoff")
            outcome = outcome if handoff is None else handoff["outcome"]
    finally:
        connection.close()
    seen.first_s.append(first - began)
    seen.between_s.append((last - first) / max(1, tokens - 1))
    seen.tokens += tokens
    seen.outcomes[outcome] += 1
    return text


def converse(url: str, model: str, options: argparse.Namespace, seed: str, seen: Round) -> None:
    dice, messages = random.Random(seed), list[dict[str, str]]()
    for _ in range(options.turns):
        messages.append({"role": "user", "content": " ".join(dice.choices(WORDS, k=options.words))})
        messages.append({"role": "assistant", "content": ask(url, model, messages, options.tokens, seen)})


def cpu_seconds(plan: Plan) -> float:
    total = 0.0
    for pid in members(plan.marker, ()):
        with contextlib.suppress(psutil.Error):
            times = psutil.Process(pid).cpu_times()
            total += times.user + times.system
    return total


def measure(url: str, plan: Plan, options: argparse.Namespace, number: int, way: str) -> Round:
    seen, before, began = Round(), cpu_seconds(plan), time.perf_counter()
    with ThreadPoolExecutor(options.clients) as pool:
        # each way has conversations of its own, and each round new ones
        calls = [
            pool.submit(converse, url, plan.model, options, f"{way} {number} {client}", seen)
            for client in range(options.clients)
        ]
        for call in calls:
            call.result()
    seen.took_s, seen.cpu_s = time.perf_counter() - began, cpu_seconds(plan) - before
    return seen


def topology(way: str, options: argparse.Namespace) -> TopologySpec:
    mode: Literal["agg", "disagg"] = "agg" if way == TWO_AGG else "disagg"
    return TopologySpec(
        model=options.model, engine="torch", mode=mode, workers=2, router_mode="kv", port=0,
        conditional_disagg=options.policy if way == POLICY else None,
    )  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="synthetic:tiny-trained")
    parser.add_argument("--policy", default="isl_bounding,eff_isl_threshold=512")
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--words", type=int, default=100, help="new words of a turn")
    parser.add_argument("--tokens", type=int, default=32, help="of an answer")
    parser.add_argument("--clients", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=9)
    options = parser.parse_args()
    ways = [TWO_AGG, REMOTE, POLICY]
    rounds: dict[str, list[Round]] = {way: [] for way in ways}
    with tempfile.TemporaryDirectory(prefix="trtx-conditional-") as directory, contextlib.ExitStack() as serving:
        served = {}
        for index, way in enumerate(ways):
            plan = prepare(topology(way, options), run_dir=Path(directory) / str(index))
            served[way] = (serving.enter_context(serve(plan, on_event=lambda event: None)).url, plan)
        for number in range(-1, options.rounds):  # the first round is a warm-up
            for place in range(len(ways)):
                way = ways[(place + number) % len(ways)]
                found = measure(*served[way], options, number, way)
                if number >= 0:
                    rounds[way].append(found)
    rows = []
    print("| Topology | TTFT p50, ms | p90, ms | ITL p50, ms | tokens/s | CPU time a request, ms | outcomes |")
    print("|---|--:|--:|--:|--:|--:|---|")
    for way in ways:
        figures = [one.figures() for one in rounds[way]]
        base = [one.figures() for one in rounds[REMOTE]]
        median = {name: statistics.median(one[name] for one in figures) for name in FIGURES}
        ratio = {
            name: statistics.median(one[name] / other[name] for one, other in zip(figures, base, strict=True))
            for name in FIGURES
        }
        outcomes = sum((one.outcomes for one in rounds[way]), Counter[str]())
        rows.append({"way": way, "median": median, "ratio": ratio, "outcomes": outcomes})
        cells = " | ".join(f"{median[name]:.1f} ({ratio[name]:.2f})" for name in FIGURES)
        print(f"| {way} | {cells} | {', '.join(f'{count} {name}' for name, count in sorted(outcomes.items()))} |")
    print(json.dumps({"options": vars(options), "argv": sys.argv[1:], "rows": rows}))


if __name__ == "__main__":
    main()
