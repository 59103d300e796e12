"""Measures a served topology with images: TTFT and images/s, with and without hits in the embedding cache.

    python benchmarks/image_serving.py --topologies agg                    # one GPU: what the cache brings
    python benchmarks/image_serving.py --topologies 2-agg,e-pd,ep-d,e-p-d  # two GPUs each, one topology after another
    python benchmarks/image_serving.py --model synthetic:tiny-vl --topologies agg --side 64 --requests 12 --osl 4

``agg``: one agg worker on one GPU; ``2-agg``: two of them; ``e-pd``: an encode worker and an agg worker; ``ep-d``: a
prefill worker that encodes, and a decode worker; ``e-p-d``: an encode worker that shares the GPU of the prefill worker,
and a decode worker.

Each request has its own text before one image, so that its KV is never reused. There are two loads. In ``repeats``, the
share ``--repeats`` of the requests shows an image that came before. ``none twice`` has the same images in the same
order, but each file has different bytes (a comment in the JPEG), so no cache has it. Stages are the workers' own
counters. Lines are printed as they are measured; if a topology does not start, only its own lines are missing. The last
line of stdout is one JSON document. The exit code is 1 if a request or a topology failed.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import contextlib
import io
import json
import random
import re
import statistics
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from raw_client import Answer, connect

from trtx.config import TopologySpec
from trtx.config.media import MediaLimits
from trtx.errors import Interrupted, TrtxError
from trtx.launch import ServedTopology, prepare, serve
from trtx.launch.interruption import Interruption

TOPOLOGIES: dict[str, dict[str, Any]] = {
    "agg": {"mode": "agg"},
    "2-agg": {"mode": "agg", "workers": 2},
    "e-pd": {"mode": "agg", "encode": 1},
    "ep-d": {"mode": "disagg"},
    "e-p-d": {"mode": "disagg", "encode_shared": 1},
}
LOADS = ("none twice", "repeats")
_COUNTER = re.compile(
    r'^trtx_(media_seconds|media_pictures|embedding_cache_lookups)_total\{[^}]*(?:stage|outcome)="(\w+)"[^}]*\} (\S+)$',
    re.MULTILINE,
)


def picture(seed: int, side: int, comment: str) -> str:
    """Returns a ``data:`` URL of a JPEG whose pixels depend on the seed."""
    drawn = np.random.default_rng(seed).integers(0, 256, (16, 16, 3), dtype=np.uint8)
    file = io.BytesIO()
    image = Image.fromarray(drawn).resize((side, side), Image.Resampling.BILINEAR)
    image.save(file, "JPEG", quality=90, comment=comment.encode())
    return f"data:image/jpeg;base64,{base64.b64encode(file.getvalue()).decode()}"


def bodies(options: argparse.Namespace, load: str, model: str, first: int) -> list[dict[str, Any]]:
    """Returns the request bodies of a load. ``first``: the first image seed; different loads share no seeds."""
    draw = random.Random(options.seed)
    seeds: list[int] = []
    for at in range(options.requests):
        seeds.append(draw.choice(seeds) if seeds and draw.random() < options.repeats else first + at)
    found = []
    for at, seed in enumerate(seeds):
        comment = f"{load} {at}" if load == "none twice" else load
        content = [
            {"type": "text", "text": f"{first + at}: say what this shows."},
            {"type": "image_url", "image_url": {"url": picture(seed, options.side, comment)}},
        ]
        found.append({
            "model": model, "messages": [{"role": "user", "content": content}], "max_tokens": options.osl,
            "min_tokens": options.osl, "temperature": 0, "stream": True, "stream_options": {"include_usage": True},
            "ignore_eos": True,
        })  # fmt: skip
    return found


async def send(port: int, asked: list[dict[str, Any]], concurrency: int) -> tuple[list[Answer], list[str], float]:
    """Returns the answers, the reasons of failed requests, and the seconds from first request to last answer."""
    waiting, answers, faults = list(reversed(asked)), [], []

    async def client() -> None:
        connection = await connect(port)
        while waiting:
            try:
                answers.append(await connection.ask("/v1/chat/completions", waiting.pop()))
            except (RuntimeError, ConnectionError) as error:
                faults.append(str(error))
                connection = await connect(port)

    began = time.perf_counter()
    await asyncio.gather(*(client() for _ in range(concurrency)))
    return answers, faults, time.perf_counter() - began


def counters(topology: ServedTopology) -> dict[tuple[str, str], float]:
    """Returns the counters of all workers together, since their start."""
    found: dict[tuple[str, str], float] = {}
    for worker in topology.plan.workers:
        with urllib.request.urlopen(f"http://127.0.0.1:{worker.system_port}/metrics", timeout=10) as answer:
            for name, label, value in _COUNTER.findall(answer.read().decode()):
                found[name, label] = found.get((name, label), 0.0) + float(value)
    return found


def row_of(label: str, load: str, options: argparse.Namespace, topology: ServedTopology, first: int) -> dict[str, Any]:
    asked = bodies(options, load, topology.model, first)
    before = counters(topology)
    answers, faults, seconds = asyncio.run(send(topology.plan.port, asked, options.concurrency))
    counted = {key: value - before.get(key, 0.0) for key, value in counters(topology).items()}
    ttfts = sorted(1e3 * (one.first_event - one.sent) for one in answers)
    lookups = {outcome: counted.get(("embedding_cache_lookups", outcome), 0) for outcome in ("hit", "joined", "miss")}
    encoded = counted.get(("media_pictures", "encode"), 0)

    def each_ms(stage: str) -> float | None:
        pictures = counted.get(("media_pictures", stage), 0)
        return 1e3 * counted["media_seconds", stage] / pictures if pictures else None

    return {
        "topology": label, "load": load, "gpus": topology.plan.gpu_count, "requests": len(answers),
        "failed": len(faults), "faults": sorted(set(faults))[:3],
        "ttft_p50_ms": statistics.median(ttfts) if ttfts else None,
        "ttft_p90_ms": ttfts[int(0.9 * (len(ttfts) - 1))] if ttfts else None,
        "images_per_s": len(answers) / seconds, "tokens_per_s": sum(one.tokens for one in answers) / seconds,
        "encoded": encoded, "lookups": lookups,
        **{f"{stage}_ms": each_ms(stage) for stage in ("prepare", "encode", "remote", "put")},
    }  # fmt: skip


def serve_one(label: str, options: argparse.Namespace, output: Path) -> Iterator[dict[str, Any]]:
    """Serves one topology and yields its rows as they are measured. Raises TrtxError if it does not start."""
    spec = TopologySpec(model=options.model, engine="torch", port=0, overrides=tuple(options.set or ()),
                        media=MediaLimits(decode_processes=options.decode_processes), **TOPOLOGIES[label])  # fmt: skip
    plan = prepare(spec, run_dir=output / label)
    with contextlib.ExitStack() as stack:
        say = lambda event: print(f"- {label}: {event.message}", file=sys.stderr, flush=True)  # noqa: E731
        topology = stack.enter_context(serve(plan, on_event=say, interruption=Interruption()))
        warm = argparse.Namespace(**{**vars(options), "requests": 2 * options.concurrency, "repeats": 0.0})
        row_of(label, "warm-up", warm, topology, 10_000_000)
        for number, load in enumerate(LOADS):
            row = row_of(label, load, options, topology, 1_000_000 * number)
            print(f"- {label}: {row}", file=sys.stderr, flush=True)
            yield row


def show(row: dict[str, Any]) -> None:
    numbers = (row["ttft_p50_ms"], row["ttft_p90_ms"], row["images_per_s"], row["tokens_per_s"], row["encoded"],
               row["prepare_ms"], row["encode_ms"])  # fmt: skip
    shown = "{:>9} {:>8} {:>9} {:>9} {:>8} {:>8} {:>9}".format(
        *("–" if one is None else f"{one:,.1f}" for one in numbers)
    )
    failed = f"  {row['failed']} failed: {row['faults']}" if row["failed"] else ""
    print(f"{row['topology']:>6} {row['load']:>11} {row['gpus']:>4} {shown}{failed}", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="synthetic:qwen2.5-vl-7b")
    parser.add_argument("--topologies", default="agg", help=f"some of {', '.join(TOPOLOGIES)}, with commas")
    parser.add_argument("--side", type=int, default=1008, help="of a picture, in pixels (default: 1.02 megapixels)")
    parser.add_argument("--requests", type=int, default=100, help="of each load")
    parser.add_argument("--concurrency", type=int, default=8)
    parser.add_argument("--osl", type=int, default=32)
    parser.add_argument("--repeats", type=float, default=0.8)
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--decode-processes", type=int, default=MediaLimits().decode_processes, help="of a worker, as "
                        "trtx serve takes them (default: %(default)s)")  # fmt: skip
    parser.add_argument("--set", action="append", help="further engine config fields, as trtx serve takes them")
    parser.add_argument("-o", "--output", type=Path, help="for logs (default: a temporary directory)")
    options = parser.parse_args()
    labels = options.topologies.split(",")
    if unknown := [label for label in labels if label not in TOPOLOGIES]:
        parser.error(f"no topology {unknown[0]!r}; there are {', '.join(TOPOLOGIES)}")
    output = options.output or Path(tempfile.mkdtemp(prefix="trtx-images-"))
    rows: list[dict[str, Any]] = []
    problems: dict[str, str] = {}
    print(f"{'':>6} {'load':>11} {'GPUs':>4} {'TTFT p50':>9} {'p90 ms':>8} {'images/s':>9} {'tokens/s':>9} "
          f"{'encoded':>8} {'prepare':>8} {'encode ms':>9}", flush=True)  # fmt: skip
    for label in labels:
        try:
            for row in serve_one(label, options, output):
                rows.append(row)
                show(row)
        except Interrupted:
            raise
        except (TrtxError, OSError) as error:
            problems[label] = str(error)
            print(f"{label:>6} was not measured: {error}", flush=True)
    print(json.dumps({"model": options.model, "side": options.side, "rows": rows, "problems": problems}))
    return 1 if problems or any(row["failed"] for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
