"""Runs ``host_tier.py`` with the real scheduler and block pools, but without tensors and on a clock of its own.

    python benchmarks/host_tier_simulated.py                       # a few seconds, on any machine
    python benchmarks/host_tier_simulated.py --host-share 0.7 --requests 150

It shows which blocks the tier stores, drops and finds at the proportions of a GPU. The times follow from four rates,
by default those of an 8B model on an H200: a step takes ``--decode-ms``, and ``--token-us`` more for each prompt token;
copies run at ``--to-host-gb-s`` and ``--to-device-gb-s``. A step that waits for stores begins later. ``--once`` makes
new prompts ones that never return. ``host_tier.py`` explains the other options, the ways and the columns.
"""

# mypy: disable-error-code="assignment"

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Sequence
from typing import Any


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


CLOCK = Clock()
time.perf_counter = CLOCK
time.monotonic = CLOCK

from host_tier import ANSWER_TOKENS, BACKGROUND_PROMPT, BACKGROUND_TOKENS, Play  # noqa: E402

from trtx.torch_engine.kv_layout import KvGeometry, LayerGroup  # noqa: E402
from trtx.torch_engine.step import Batch, Sampled  # noqa: E402

LAUNCH_S, RESULTS_S, IDLE_S = 3e-4, 2e-4, 2e-4  # of the host


class Runner:
    """A device that computes one step after the other and samples random tokens."""

    vocab_size, max_position, paced_steps = 150_000, 1 << 20, 32
    is_asynchronous, needs_grids = True, False
    graph_misses = expert_balance = shared_weights = masks = None

    def __init__(self, options: argparse.Namespace, num_blocks: int) -> None:
        self.geometry = KvGeometry((LayerGroup((0,), 1, 1, None),), options.tokens_per_block, "bfloat16")
        self.num_blocks = num_blocks
        self.begins_after = 0.0  # stores that the next step waits for
        self.waited = 0.0
        self._options = options
        self._idle_from = 0.0
        self._dice = random.Random(options.seed)

    def launch(self, batch: Batch) -> Any:
        CLOCK.now += LAUNCH_S
        options = self._options
        prompt = sum(len(each.new_token_ids) for each in batch.sequences if len(each.new_token_ids) > 1)
        free = max(CLOCK.now, self._idle_from)
        begin = max(free, self.begins_after)
        self.waited += begin - free
        self._idle_from = begin + options.decode_ms / 1e3 + prompt * options.token_us / 1e6
        return Step(self._idle_from, [
            Sampled(self._dice.randrange(self.vocab_size) if each.samples else None) for each in batch.sequences
        ])  # fmt: skip

    def device_memory_bytes(self) -> int:
        return 0


class Step:
    def __init__(self, end: float, sampled: list[Sampled]) -> None:
        self._end, self._sampled = end, sampled

    def results(self) -> list[Sampled]:
        CLOCK.now = max(CLOCK.now, self._end) + RESULTS_S
        return self._sampled


class Copy:
    def __init__(self, end: float, seconds: float) -> None:
        self.end, self.seconds = end, seconds

    def is_done(self) -> bool:
        return CLOCK.now >= self.end


class Copies:
    """Two copy engines, one for each direction."""

    def __init__(self, options: argparse.Namespace, runner: Runner, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.block_bytes = self.bytes_of_all_ranks = options.tokens_per_block * options.token_kib * 1024
        self._options, self._runner = options, runner
        self._stored = self._loaded = 0.0

    def store(self, device_ids: Sequence[int], host_ids: Sequence[int]) -> Copy:
        seconds = len(device_ids) * self.block_bytes / self._options.to_host_gb_s / 1e9
        self._stored = max(CLOCK.now, self._stored) + seconds
        return Copy(self._stored, seconds)

    def load(self, host_ids: Sequence[int], device_ids: Sequence[int], *, after_stores: bool) -> Copy:
        seconds = len(device_ids) * self.block_bytes / self._options.to_device_gb_s / 1e9
        self._loaded = max(CLOCK.now, self._loaded, self._stored if after_stores else 0.0) + seconds
        return Copy(self._loaded, seconds)

    def hold_steps(self) -> None:
        self._runner.begins_after = self._stored

    def wait_for_stores(self) -> None:
        CLOCK.now = max(CLOCK.now, self._stored)

    def close(self) -> None: ...


class SimulatedPlay(Play):
    def _step(self, sequence_id: int) -> list[Any]:
        began = CLOCK.now
        own = super()._step(sequence_id)
        if CLOCK.now == began:
            CLOCK.now += IDLE_S
        return own

    def turn(self) -> None:
        oldest, num_new = self.conversations[0], len(self.window.ttft_new)
        super().turn()
        if self.options.once and len(self.window.ttft_new) > num_new:
            self.conversations = [oldest, *self.conversations[:-1]]
            self.recent = [index + 1 for index in self.recent[:-1]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--conversations", type=int, default=20)
    parser.add_argument("--tokens", type=int, default=16384)
    parser.add_argument("--added", type=int, default=64)
    parser.add_argument("--requests", type=int, default=40)
    parser.add_argument("--background", type=int, default=8)
    parser.add_argument("--max-num-tokens", type=int, default=8192)
    parser.add_argument("--tokens-per-block", type=int, default=32)
    parser.add_argument("--token-kib", type=int, default=144, help="KV of a token")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--returning", type=float, default=0.8)
    parser.add_argument("--pause-ms", type=float, default=100)
    parser.add_argument("--decode-ms", type=float, default=5.8)
    parser.add_argument("--token-us", type=float, default=43)
    parser.add_argument("--to-host-gb-s", type=float, default=47)
    parser.add_argument("--to-device-gb-s", type=float, default=51)
    parser.add_argument("--host-share", type=float, default=1, help="host memory, as a share of all conversations")
    parser.add_argument("--once", action="store_true")
    parser.add_argument("--ways", default="none,tier,all")
    options = parser.parse_args()
    size = options.tokens_per_block
    each = -(-(options.tokens + (options.requests + 4) * (options.added + ANSWER_TOKENS)) // size) + 1
    background = options.background * (-(-(BACKGROUND_PROMPT + BACKGROUND_TOKENS) // size) + 1)
    small = max(2, options.conversations // 10) * each + background
    large = options.conversations * -(-(options.tokens + 4 * options.added) // size) + small
    print(f"{'way':>5} {'TTFT p50 / p90 ms (returning)':>30} {'ITL p50 / p99':>15} {'reused':>7}", flush=True)
    for way in options.ways.split(","):
        num_blocks = large if way == "all" else small
        runner = Runner(options, num_blocks)
        copies = Copies(options, runner, int(large * options.host_share)) if way == "tier" else None
        found = SimulatedPlay(runner, options, num_blocks, copies).run()  # type: ignore[arg-type]
        first, gaps = ([f"{value:.1f}" for value in found[key]] for key in ("ttft_returning_ms", "itl_ms"))
        print(f"{way:>5} {' / '.join(first):>30} {' / '.join(gaps):>15} {found['reused_share']:>7.1%}", flush=True)
        if copies is not None:
            waited = f"steps waited {runner.waited * 1e3:.0f} ms for stores"
            print(f"      {found['stored_blocks']} blocks stored, {found['loaded_blocks']} loaded, "
                  f"{found['dropped_blocks']} dropped; {waited}")  # fmt: skip


if __name__ == "__main__":
    main()
