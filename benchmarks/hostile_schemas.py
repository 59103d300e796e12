"""Measures the ITL of a text stream while another client sends grammars that no compiler likes.

    python benchmarks/hostile_schemas.py [--model synthetic:tiny] [--mode disagg] [--rounds 5] [--seconds 20]

It serves the model as `trtx serve` does, and streams text from it, one answer after the other. In some stretches of
time another client sends the grammars of `tests/unit/torch_engine/core/hostile_grammars.py`, one after the other:
nested, recursive and contradictory schemas, explosive regular expressions, large grammars. In others it sends the same
requests without a grammar. The stretches alternate, so that other load on the machine affects both alike. ITL is the
time between arrivals of chunks at the client. The exit code is 1 if a text stream failed, or if a grammar got another
status than 200 or 400.
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
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
from hostile_media import Stretch, stream, table, told

from trtx.config import TopologySpec
from trtx.launch import ServedTopology, prepare, serve

ROOT = Path(__file__).parents[1]
KINDS = ("quiet", "beside plain requests", "beside hostile grammars")
LONGEST_ANSWER_S = 60.0


@dataclass(slots=True)
class Asked:
    """Requests with hostile grammars: their statuses, and the seconds of each until its answer, by name."""

    statuses: Counter[str] = field(default_factory=Counter)
    seconds: dict[str, float] = field(default_factory=dict)


def hostile_bodies() -> dict[str, dict[str, Any]]:
    """The fields of a request for each hostile grammar that the frontend has a field for, by name."""
    sys.path.insert(0, str(ROOT))
    from tests.unit.torch_engine.core.hostile_grammars import HOSTILE, value_of

    fields = {"json": "guided_json", "regex": "guided_regex", "grammar": "guided_grammar", "choice": "guided_choice"}
    return {name: {fields[HOSTILE[name][0]]: value_of(name)} for name in HOSTILE if HOSTILE[name][0] in fields}


async def ask(http: httpx.AsyncClient, model: str, names: itertools.cycle[Any], until: float, seen: Asked) -> None:
    """Sends the grammars in turn until ``until``, a request at a time."""
    while time.perf_counter() < until:
        name, fields = next(names)
        body = {"model": model, "messages": [{"role": "user", "content": "x"}], "max_tokens": 16, **fields}
        began = time.perf_counter()
        content = json.dumps(body).encode()  # ASCII: some grammars hold lone surrogates
        headers = {"Content-Type": "application/json"}
        answer = await http.post("/v1/chat/completions", content=content, headers=headers, timeout=LONGEST_ANSWER_S)
        seen.statuses[str(answer.status_code)] += 1
        seen.seconds[name] = max(seen.seconds.get(name, 0.0), time.perf_counter() - began)


async def measure(served: ServedTopology, arguments: argparse.Namespace) -> tuple[dict[str, Stretch], Asked]:
    stretches, asked = {kind: Stretch() for kind in KINDS}, Asked()
    hostile = itertools.cycle(hostile_bodies().items())
    plain: itertools.cycle[Any] = itertools.cycle([("plain", {})])
    async with httpx.AsyncClient(base_url=served.url, timeout=120, trust_env=False) as http:
        await stream(http, served.model, time.perf_counter() + 3, Stretch(), arguments.tokens)
        for number in range(arguments.rounds):
            for kind in KINDS[:: 1 if number % 2 == 0 else -1]:
                until = time.perf_counter() + arguments.seconds
                work = [stream(http, served.model, until, stretches[kind], arguments.tokens)]
                if kind == "beside plain requests":
                    work.append(ask(http, served.model, plain, until, Asked()))
                elif kind == "beside hostile grammars":
                    work.append(ask(http, served.model, hostile, until, asked))
                await asyncio.gather(*work)
                stretches[kind].rounds.append(len(stretches[kind].itl_ms))
    return stretches, asked


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="synthetic:tiny")
    parser.add_argument("--mode", choices=("agg", "disagg"), default="agg")
    parser.add_argument("--rounds", type=int, default=5, help="of a stretch of each kind")
    parser.add_argument("--seconds", type=float, default=20, help="of a stretch")
    parser.add_argument("--tokens", type=int, default=128, help="of a streamed answer")
    arguments = parser.parse_args()
    print(
        f"# {' '.join(sys.argv)}; load average before: {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores", flush=True
    )
    spec = TopologySpec(model=arguments.model, engine="torch", mode=arguments.mode, port=0)
    plan = prepare(spec, run_dir=Path(tempfile.mkdtemp(prefix="trtx-hostile-schemas-")))
    with serve(plan, on_event=told) as served:
        stretches, asked = asyncio.run(measure(served, arguments))
        restarts = [(one.name, one.exit) for one in served.restarts]
    table(stretches)
    print(f"grammars by status: {dict(asked.statuses)}; slowest answers:")
    for name, seconds in sorted(asked.seconds.items(), key=lambda one: -one[1])[:5]:
        print(f"  {seconds:.2f} s  {name}")
    print(f"restarts: {restarts}")
    has_failed = any(seen.failed for seen in stretches.values())
    return 1 if has_failed or restarts or set(asked.statuses) - {"200", "400"} else 0


if __name__ == "__main__":
    sys.exit(main())
