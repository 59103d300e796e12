"""Compares KV-aware routing with round-robin: TTFT, tokens/s and prefix hit rate of a prefix-heavy load on agg workers.

    python benchmarks/kv_routing.py --model synthetic:qwen3-8b --gpus 0,1 --concurrency 32 --isl 128 --osl 32 \
        --prefix-length 2048 --prefixes 64 --requests 256 --rounds 2

It serves one topology for each router variant, all on the same GPUs at once, and loads them in turn (A B C A B C), so
only one has work at a time. aiperf generates the load: each request is a random one of ``--prefixes`` prefixes,
followed by ``--isl`` tokens of its own. All variants get the same requests. Each round has new prefixes and starts with
cold caches.

The variants are round-robin; kv with Dynamo's default weights; and kv as trtx serves it, with ``KV_ROUTER_FLAGS``,
where the reasons are documented.

Each worker's KV pool is set in tokens (``--pool-tokens``, by default 0.6 of all prefixes together plus the running
requests). One worker can't hold all prefixes; two can, if each keeps to its share. Round-robin sends every prefix to
every worker, so each worker evicts prefixes that it will need again. With ``--pool-tokens`` above the working set, the
only remaining difference is that round-robin computes each prefix once per worker instead of once.

The hit rate is cached prompt tokens / prompt tokens, from the workers' own counters. The script writes a Markdown table
to standard output, and to ``-o`` if given. The exit code is 1 if a request failed.
"""

from __future__ import annotations

import argparse
import contextlib
import re
import shlex
import sys
import tempfile
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

from trtx.bench import Figures, LoadSpec, Target
from trtx.bench.aiperf.command import TrialFiles, check_endpoint, command, tail
from trtx.bench.aiperf.process import Aiperf, AiperfHost
from trtx.bench.metrics import error_request_count, most_common_errors, output_token_throughput, time_to_first_token
from trtx.bench.records import RECORDS_FILE, RequestRecord, read_records
from trtx.config import RouterMode, TopologySpec
from trtx.launch import Event, ServedTopology, prepare, serve
from trtx.launch.interruption import Interruption
from trtx.topology import Plan
from trtx.topology.commands import KV_ROUTER_FLAGS

_BLOCK = 32
_TEMPLATE_TOKENS = 32  # room for the tokens that the chat template adds to a prompt
_COUNTER = re.compile(r"^trtx_(prompt_tokens|cached_tokens|requests)_total(?:\{[^}]*\})? ([\d.e+]+)$", re.MULTILINE)


@dataclass(slots=True)
class Variant:
    """One router variant, and the results of its rounds."""

    name: str
    router_mode: RouterMode
    has_own_weights: bool = False  # uses Dynamo's default weights, not trtx's
    rounds: list[tuple[RequestRecord, ...]] = field(default_factory=list)
    prompt_tokens: int = 0
    cached_tokens: int = 0
    requests: dict[str, int] = field(default_factory=dict)  # worker -> number of completed requests

    @property
    def directory(self) -> str:
        return re.sub(r"\W+", "-", self.name)

    def row(self) -> str:
        result = Figures.over(self.rounds)
        ttft, throughput = result[time_to_first_token], result[output_token_throughput]
        hit = f"{self.cached_tokens / self.prompt_tokens:.1%}" if self.prompt_tokens else "–"
        cells = [
            self.name,
            f"{ttft[50]:.1f}" if ttft else "–",
            f"{ttft[90]:.1f}" if ttft and ttft.supports(90) else "–",
            f"{throughput:,.0f}" if throughput is not None else "–",
            hit,
            " / ".join(str(count) for _, count in sorted(self.requests.items())),
            str(result[error_request_count]),
        ]
        return f"| {' | '.join(cells)} |"


def main() -> int:
    arguments = _arguments()
    check_endpoint()
    working_set = arguments.prefixes * arguments.prefix_length
    own = arguments.isl + arguments.osl + _TEMPLATE_TOKENS
    pool = (arguments.pool_tokens or int(0.6 * working_set) + arguments.concurrency * own) // _BLOCK * _BLOCK
    output = Path(arguments.output or tempfile.mkdtemp(prefix="trtx-kv-routing-"))
    variants = [
        Variant("round-robin", "round-robin"),
        Variant("kv, Dynamo's weights", "kv", has_own_weights=True),
        Variant("kv", "kv"),
    ]
    # Prepare all topologies before one starts: this reserves their ports, and none counts another's memory as used.
    plans = [_plan(variant, arguments, pool, output) for variant in variants]
    interruption = Interruption()
    with contextlib.ExitStack() as stack:
        topologies = [
            stack.enter_context(serve(plan, on_event=_say(variant), interruption=interruption))
            for variant, plan in zip(variants, plans, strict=True)
        ]
        told = [slot.status.kv_blocks for slot in topologies[0].slots if slot.status is not None]
        blocks = {count for count in told if count is not None}
        for number in range(1, arguments.rounds + 1):
            for variant, topology in zip(variants, topologies, strict=True):
                _round(topology, arguments, number, output / variant.directory / f"round-{number}", variant)
                print(f"- round {number}: {variant.row()}", file=sys.stderr, flush=True)
    table = _table(arguments, pool, working_set, sorted(blocks), variants)
    print(table)
    (output / "kv_routing.md").write_text(table + "\n", encoding="utf-8")
    return 1 if any(not record.succeeded for variant in variants for one in variant.rounds for record in one) else 0


def _plan(variant: Variant, arguments: argparse.Namespace, pool: int, output: Path) -> Plan:
    spec = TopologySpec(
        model=arguments.model,
        mode="agg",
        workers=arguments.workers,
        gpus=None if arguments.gpus is None else tuple(int(part) for part in arguments.gpus.split(",")),
        engine=arguments.engine,
        router_mode=variant.router_mode,
        port=0,
        overrides=(
            f"kv_cache_config.max_tokens={pool}",
            f"kv_cache_config.tokens_per_block={_BLOCK}",
            *(arguments.set or ()),
        ),
    )
    plan = prepare(spec, run_dir=output / variant.directory)
    if not variant.has_own_weights:
        return plan
    frontend, *workers = plan.processes
    start = frontend.argv.index(KV_ROUTER_FLAGS[0])
    argv = frontend.argv[:start] + frontend.argv[start + len(KV_ROUTER_FLAGS) :]
    return replace(plan, processes=(replace(frontend, argv=argv), *workers))


def _say(variant: Variant) -> Callable[[Event], None]:
    return lambda event: print(f"- {variant.name}: {event.message}", file=sys.stderr, flush=True)


def _round(
    topology: ServedTopology, arguments: argparse.Namespace, number: int, staging: Path, variant: Variant
) -> None:
    load = LoadSpec(
        concurrency=(arguments.concurrency,),
        isl=arguments.isl,
        osl=arguments.osl,
        request_count=arguments.requests,
        warmup_request_count=0,
        seed=arguments.seed + number,
    )
    target = Target(topology.url, topology.model, topology.plan.model_path, "agg", worker_count=arguments.workers)
    argv = [
        *command(target, load, load.loads[0], 1, staging),
        "--prefix-prompt-pool-size", str(arguments.prefixes),
        "--prefix-prompt-length", str(arguments.prefix_length),
    ]  # fmt: skip
    before = _counters(topology)
    files = TrialFiles(staging)
    with AiperfHost(staging.parent / "host.log") as host, Aiperf(host, argv, files.console) as aiperf:
        while (code := aiperf.poll()) is None:
            topology.wait(0.1)
    path = files.directory / RECORDS_FILE
    records = read_records(path) if path.exists() else ()
    if len(records) != arguments.requests:  # the exit code is not enough: aiperf also exits 1 if all requests failed
        raise SystemExit(
            f"aiperf exited {code} with {len(records)} of {arguments.requests} records:\n{tail(files.console, 20)}"
        )
    for reason, count in most_common_errors(records):
        print(f"- {variant.name}: {count} × {reason}", file=sys.stderr, flush=True)
    variant.rounds.append(records)
    for worker, after in _counters(topology).items():
        prompt, cached, requests = (now - then for now, then in zip(after, before[worker], strict=True))
        variant.prompt_tokens += prompt
        variant.cached_tokens += cached
        variant.requests[worker] = variant.requests.get(worker, 0) + requests


def _counters(topology: ServedTopology) -> dict[str, tuple[int, int, int]]:
    """Returns worker -> (prompt tokens, cached prompt tokens, requests) since its start, read from its system port."""
    found = {}
    for worker in topology.plan.workers:
        with urllib.request.urlopen(f"http://127.0.0.1:{worker.system_port}/metrics", timeout=10) as answer:
            totals = dict.fromkeys(("prompt_tokens", "cached_tokens", "requests"), 0)
            for name, value in _COUNTER.findall(answer.read().decode()):
                totals[name] += int(float(value))
        found[worker.name] = (totals["prompt_tokens"], totals["cached_tokens"], totals["requests"])
    return found


def _table(
    arguments: argparse.Namespace, pool: int, working_set: int, blocks: list[int], variants: list[Variant]
) -> str:
    holds = "can't hold" if pool < working_set else "can hold"
    lines = [
        f"`python {' '.join(map(shlex.quote, sys.argv))}`",
        "",
        f"{arguments.prefixes} prefixes of {arguments.prefix_length:,} tokens are {working_set:,} tokens; "
        f"each worker's KV pool has {pool:,} tokens ({', '.join(map(str, blocks))} blocks) and {holds} "
        f"them all. {arguments.rounds} round{'s' * (arguments.rounds > 1)} of {arguments.requests} requests a variant, "
        f"concurrency {arguments.concurrency}, {arguments.isl} tokens of their own, {arguments.osl} new.",
        "",
        "| routing | TTFT p50 ms | TTFT p90 ms | tokens/s | prefix hit rate | requests a worker | failed |",
        "|---|--:|--:|--:|--:|--:|--:|",
        *(variant.row() for variant in variants),
    ]
    return "\n".join(lines)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=None)
    parser.add_argument("--engine", default="auto")
    parser.add_argument("--gpus", default=None, help="indices; one a worker")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--concurrency", type=int, default=8)
    parser.add_argument("--isl", type=int, default=64, help="tokens of a request's own, after its prefix")
    parser.add_argument("--osl", type=int, default=16)
    parser.add_argument("--prefix-length", type=int, default=1024)
    parser.add_argument("--prefixes", type=int, default=16)
    parser.add_argument("--requests", type=int, default=128, help="of one round")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--pool-tokens", type=int, default=None, help="of each worker's KV pool")
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--set", action="append", help="further engine config fields, as trtx serve takes them")
    parser.add_argument("-o", "--output", default=None, help="directory for logs, aiperf's files and kv_routing.md")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
