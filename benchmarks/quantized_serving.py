"""Compares a quantized build with its source when served: tokens/s, ITL and TTFT at several concurrencies.

    python benchmarks/quantized_serving.py --model synthetic:qwen3-8b --quant fp8 -o /tmp/quantized

It builds with `trtx build`, or reuses the build in `--output`. Then it serves source and build with the embedded
engine, one after the other on the same GPU with the same engine config and prompts, `--rounds` times in turn. aiperf
generates the load, with streaming and exact output lengths. There are only a few requests per client (`REQUESTS`), so
that one round takes five minutes on an H100. The table is Markdown, on stdout and in `--output`. Ratios are the build's
values over the source's. The exit code is 1 if a request failed.
"""

from __future__ import annotations

import argparse
import shlex
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field, replace
from pathlib import Path

from trtx.bench import Figures, LoadSpec, Target
from trtx.bench.aiperf.command import TrialFiles, command, tail
from trtx.bench.aiperf.process import Aiperf, AiperfHost
from trtx.bench.metrics import error_request_count, inter_token_latency, output_token_throughput, time_to_first_token
from trtx.bench.records import RECORDS_FILE, RequestRecord, read_records
from trtx.config import TopologySpec
from trtx.launch import prepare, serve

REQUESTS = {1: 12, 2: 16, 4: 24, 8: 48, 16: 80, 32: 160, 64: 256}
"""The number of measured requests at each concurrency; above the largest, three times the concurrency."""


@dataclass
class Variant:
    """One checkpoint and its measurements: for each concurrency, the records of each round."""

    name: str
    model: str
    rounds: dict[int, list[tuple[RequestRecord, ...]]] = field(default_factory=dict)
    device_memory_bytes: int | None = None  # None, here and below: the worker has not reported it
    kv_blocks: int | None = None


def main() -> int:
    arguments = _arguments()
    output = Path(arguments.output or tempfile.mkdtemp(prefix="trtx-quantized-")).absolute()
    started = time.monotonic()
    build = arguments.build or _build(arguments, output / "builds")
    built_s = time.monotonic() - started
    variants = (Variant("source", arguments.model), Variant(arguments.quant, build))
    for number in range(1, arguments.rounds + 1):
        for variant in variants:
            _round(variant, arguments, output / f"round-{number}" / variant.name)
    table = _table(arguments, variants, built_s)
    print(table)
    (output / "quantized_serving.md").write_text(table + "\n", encoding="utf-8")
    records = [record for variant in variants for rounds in variant.rounds.values() for one in rounds for record in one]
    return 1 if any(not record.succeeded for record in records) else 0


def _build(arguments: argparse.Namespace, output: Path) -> str:
    """Runs the build and prints its output; returns the directory that the last line names."""
    argv = ["build", arguments.model, "--quant", arguments.quant, "--kv-dtype", arguments.kv_dtype, "-o", str(output)]
    done = subprocess.run(
        [sys.executable, "-c", "from trtx.cli.app import main; main()", *argv], stdout=subprocess.PIPE, text=True
    )
    print(done.stdout, flush=True)
    if done.returncode:
        raise SystemExit(done.returncode)
    return done.stdout.splitlines()[-1].removeprefix("trtx serve --model ")


def _round(variant: Variant, arguments: argparse.Namespace, run_dir: Path) -> None:
    spec = TopologySpec(
        model=variant.model,
        engine="torch",
        gpus=None if arguments.gpus is None else (int(arguments.gpus),),
        port=0,
        overrides=tuple(arguments.set or ()),
    )
    concurrency = tuple(int(part) for part in arguments.concurrency.split(","))
    load = LoadSpec(concurrency=concurrency, isl=arguments.isl, osl=arguments.osl, seed=arguments.seed)
    loads = {
        c: replace(one, request_count=REQUESTS.get(c, 3 * c), warmup_request_count=max(4, c))
        for c, one in zip(concurrency, load.loads, strict=True)
    }
    plan = prepare(spec, run_dir=run_dir)
    with serve(plan, on_event=lambda event: print(f"- {variant.name}: {event.message}", flush=True)) as topology:
        target = Target(topology.url, topology.model, plan.model_path, "agg", gpu_count=len(plan.gpu_names))
        with AiperfHost(run_dir / "host.log") as host:
            for one in loads.values():
                files = TrialFiles(run_dir / "load" / one.label)
                with Aiperf(host, command(target, load, one, 1, files.directory), files.console) as aiperf:
                    while (code := aiperf.poll()) is None:
                        topology.wait(0.1)
                if code:
                    raise SystemExit(f"aiperf exited {code}:\n{tail(files.console, 20)}")
        for slot in topology.slots:
            if slot.status is not None:
                variant.device_memory_bytes = slot.status.device_memory_bytes
                variant.kv_blocks = slot.status.kv_blocks
    for c, one in loads.items():
        records = read_records(run_dir / "load" / one.label / RECORDS_FILE)
        variant.rounds.setdefault(c, []).append(records)


def _table(arguments: argparse.Namespace, variants: tuple[Variant, Variant], built_s: float) -> str:
    source, result = variants
    lines = [
        f"`python {' '.join(map(shlex.quote, sys.argv))}`",
        "",
        f"{arguments.model}, {arguments.isl} tokens in, {arguments.osl} out, {arguments.rounds} "
        f"round{'s' * (arguments.rounds > 1)}; built and proved in {built_s:.0f} s. "
        + "; ".join(_held(variant) for variant in variants)
        + ".",
        "",
        f"| concurrency | tokens/s source | {result.name} | ratio | ITL p50 ms source | {result.name} "
        f"| TTFT p50 ms source | {result.name} | failed |",
        "|--:|--:|--:|--:|--:|--:|--:|--:|--:|",
    ]
    for concurrency in source.rounds:
        before, after = (Figures.over(variant.rounds[concurrency]) for variant in variants)
        speeds = [one[output_token_throughput] or 0.0 for one in (before, after)]
        cells = [
            str(concurrency),
            *(f"{speed:,.0f}" for speed in speeds),
            f"{speeds[1] / speeds[0]:.2f}" if speeds[0] else "–",
            *(f"{itl[50]:.2f}" if (itl := one[inter_token_latency]) else "–" for one in (before, after)),
            *(f"{ttft[50]:.1f}" if (ttft := one[time_to_first_token]) else "–" for one in (before, after)),
            str(before[error_request_count] + after[error_request_count]),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _held(variant: Variant) -> str:
    memory, blocks = variant.device_memory_bytes, variant.kv_blocks
    gib = "–" if memory is None else f"{memory / 2**30:.1f}"
    return f"{variant.name}: {gib} GiB on the device, {'–' if blocks is None else f'{blocks:,}'} KV blocks"


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="synthetic:qwen3-8b")
    parser.add_argument("--quant", default="fp8")
    parser.add_argument("--kv-dtype", default="auto")
    parser.add_argument("--build", default=None, help="a finished build of the model, instead of making one")
    parser.add_argument("--gpus", default=None, help="index of the GPU")
    parser.add_argument("--concurrency", default="1,8,64,256")
    parser.add_argument("--isl", type=int, default=512)
    parser.add_argument("--osl", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--set", action="append", help="further engine config fields, as trtx serve takes them")
    parser.add_argument("-o", "--output", default=None, help="directory for builds, logs and the table")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
