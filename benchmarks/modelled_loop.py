"""Runs the scheduler of :mod:`closed_loop` over a model of a GPU, to predict results without one. No measurement.

    python benchmarks/modelled_loop.py --concurrency 64,256 --ways two,merged:512,merged:paced64

A forward of n tokens takes the larger of the time to read the weights and n times the matmul time of a token, plus a
fixed time, plus the attention of its decodes. The default values are those of Qwen3-8B's shape on an H100
(docs/performance-notes.md). Launches take no time. The clock is simulated; "took" is the window. The last line of
stdout is one JSON document.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass
from typing import Any

from closed_loop import Way, play, print_head, print_row

from trtx.torch_engine.kv_layout import KvGeometry
from trtx.torch_engine.step import Batch, Sampled

_HOST_S = 0.3e-3  # host time per step: schedule, launch, commit


@dataclass
class Clock:
    now: float = 0.0

    def perf_counter(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


@dataclass
class ModelledStep:
    clock: Clock
    done: float
    found: list[Sampled]

    def results(self) -> list[Sampled]:
        self.clock.now = max(self.clock.now, self.done)
        return self.found


class ModelledRunner:
    """A runner that computes nothing and takes the times in ``options``."""

    def __init__(self, options: argparse.Namespace, clients: int, clock: Clock) -> None:
        self.geometry = KvGeometry.uniform(1, 1, 16, 32, "float32")
        self.num_blocks = (clients + 1) * ((options.isl + options.osl) // 32 + 2)
        self.max_position, self.vocab_size, self.needs_grids = options.isl + options.osl, 1000, False
        self.merges_passes = self.pads_passes = False
        self.paced_steps = None
        self._options, self._clock, self._free = options, clock, 0.0

    def device_memory_bytes(self) -> int:
        return 0

    def _products_ms(self, tokens: int) -> float:
        options = self._options
        return max(options.weights_ms, tokens * options.token_us / 1e3) + options.fixed_ms if tokens else 0.0

    def launch(self, batch: Batch) -> ModelledStep:
        counts = [len(sequence.new_token_ids) for sequence in batch.sequences]
        decodes = sum(
            count == 1 and sequence.start > 0 for count, sequence in zip(counts, batch.sequences, strict=True)
        )
        prompts = sum(counts) - decodes
        passes = [decodes + prompts] if self.merges_passes else [decodes, prompts]
        cost = sum(map(self._products_ms, passes)) + decodes * self._options.decode_us / 1e3
        self._clock.now += _HOST_S
        self._free = max(self._free, self._clock.now) + cost / 1e3
        return ModelledStep(
            self._clock, self._free, [Sampled(1 if sequence.samples else None) for sequence in batch.sequences]
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--concurrency", default="64,256", help="clients (default: %(default)s)")
    parser.add_argument("--isl", type=int, default=512, help="prompt tokens")
    parser.add_argument("--osl", type=int, default=128, help="generated tokens")
    parser.add_argument("--warm-up", type=int, default=1, help="requests of a client before the window")
    parser.add_argument("--requests", type=int, default=3, help="requests of a client in the window")
    parser.add_argument("--ways", default="two,merged,merged:1024,merged:512,merged:256,merged:paced32,merged:paced64")
    parser.add_argument("--max-num-tokens", type=int, default=8192)
    parser.add_argument("--whole-prompts", action="store_true", help="enable_chunked_prefill: false")
    parser.add_argument("--weights-ms", type=float, default=5.0)
    parser.add_argument("--token-us", type=float, default=23.6)
    parser.add_argument("--decode-us", type=float, default=34.4, help="attention of one decode")
    parser.add_argument("--fixed-ms", type=float, default=1.0, help="of a pass")
    options = parser.parse_args()
    print_head()
    rows: list[dict[str, Any]] = []
    for clients in map(int, options.concurrency.split(",")):
        first: float | None = None
        for name in options.ways.split(","):
            clock = Clock()
            runner: Any = ModelledRunner(options, clients, clock)
            way = Way.of(name, runner)
            found = play(
                runner, way, clients=clients, isl=options.isl, osl=options.osl, warm_up=options.warm_up,
                requests=options.requests, delay_s=(1e-3, 4e-3), max_num_tokens=options.max_num_tokens,
                chunked=not options.whole_prompts, seed=1, clock=clock, send=lambda report: None,
            )  # fmt: skip
            first = first or found["tokens_per_s"]
            rows.append({"clients": clients, "way": way.name, **found})
            print_row(clients, way, found, first, found["window_s"])
    print(json.dumps({"options": vars(options), "rows": rows}))


if __name__ == "__main__":
    main()
