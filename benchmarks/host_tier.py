"""Measures the host tier: returning conversations on a pool for a tenth of them, with and without it.

    python benchmarks/host_tier.py --model synthetic:qwen3-8b                                # one H100, about 3 min
    python benchmarks/host_tier.py --model synthetic:tiny --tokens 256 --added 16 --requests 20 --background 2

It runs the whole engine except its client over one runner. One client sends the next request ``--pause-ms`` after the
end of the previous one. A share ``--returning`` of the requests continues one of ``--conversations`` conversations of
about ``--tokens`` tokens with ``--added`` new ones, not one of the two that were served last; the others begin a new
conversation, which replaces the oldest. Beside them, ``--background`` sequences decode all the time.

The ways: ``none`` has a pool for a tenth of the conversations; ``tier`` has the same pool and host memory for all;
``all`` has a pool for all, as if the device's memory had no end. Every way serves every conversation once before its
window. TTFT starts when a request arrives in the engine. ITL is the time between two reports of a background sequence.
The rate of the tier's copies stands beside that of one plain copy of pinned memory in each direction. With ``--tp``,
the tier's rate is that of all GPUs together, and the plain copy's that of the first. The last line of stdout is one
JSON document.
"""

# torch leaves its events untyped.
# mypy: disable-error-code="no-untyped-call"

from __future__ import annotations

import argparse
import gc
import json
import os
import random
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from trtx.checkpoint import resolve_checkpoint
from trtx.torch_engine.block_copies import BlockCopies
from trtx.torch_engine.core.engine_core import EngineCore
from trtx.torch_engine.core.scheduler_limits import SchedulerLimits
from trtx.torch_engine.llmapi.sampling import SamplingParams, resolve_sampling
from trtx.torch_engine.messages import Submit
from trtx.torch_engine.ranks.children import start_ranks
from trtx.torch_engine.ranks.leader import LeadingRunner, create_ranked_runner
from trtx.torch_engine.runner import RunnerArgs, TorchRunner, create_runner
from trtx.torch_engine.runner.host_copies import create_host_copies, pools_of

BACKGROUND_PROMPT = 64
BACKGROUND_TOKENS = 1024
ANSWER_TOKENS = 16
_FIRST_BACKGROUND = 1_000_000  # ids of background sequences


@dataclass
class Window:
    """What the client of one way saw."""

    ttft_returning: list[float] = field(default_factory=list)
    ttft_new: list[float] = field(default_factory=list)
    gaps: list[float] = field(default_factory=list)
    reused: int = 0
    prompt_tokens: int = 0


class Play:
    """One way: an engine, its conversations, and the background."""

    def __init__(
        self,
        runner: TorchRunner | LeadingRunner,
        options: argparse.Namespace,
        num_blocks: int,
        copies: BlockCopies | None,
    ) -> None:
        self.options = options
        self.dice = random.Random(options.seed)
        self.ids = range(runner.vocab_size)
        self.window = Window()
        self.next_id = 0
        self.next_background = _FIRST_BACKGROUND
        self.last: dict[int, float] = {}  # background sequences -> time of the last token
        whole = runner.num_blocks
        runner.num_blocks = num_blocks  # the first blocks of the same pool
        self.core = EngineCore(
            runner,
            SchedulerLimits(
                options.background + 4, options.max_num_tokens, enable_chunked_prefill=True,
                paced_steps=runner.paced_steps,
            ),
            host_copies=copies,
            enable_iter_perf_stats=True,
        )  # fmt: skip
        runner.num_blocks = whole
        self.plan = resolve_sampling(SamplingParams(max_tokens=ANSWER_TOKENS, temperature=1.0, ignore_eos=True))
        self.long_plan = resolve_sampling(SamplingParams(max_tokens=BACKGROUND_TOKENS, ignore_eos=True))
        self.conversations = [self._tokens(options.tokens) for _ in range(options.conversations)]
        self.recent: list[int] = []
        for _ in range(options.background):
            self._decode_more()

    def _tokens(self, count: int) -> list[int]:
        return self.dice.choices(self.ids, k=count)

    def _decode_more(self) -> None:
        self.core.submit(Submit(self.next_background, self._tokens(BACKGROUND_PROMPT), self.long_plan))
        self.next_background += 1

    def ask(self, prompt: list[int]) -> tuple[float, list[int], int]:
        """Serves one request. Returns (seconds to the first token, tokens, reused blocks)."""
        sequence_id, self.next_id = self.next_id, self.next_id + 1
        began = time.perf_counter()
        self.core.submit(Submit(sequence_id, prompt, self.plan))
        first: float | None = None
        tokens: list[int] = []
        reused = 0
        while True:
            for update in self._step(sequence_id):
                if first is None and update.token_ids:
                    first = time.perf_counter() - began
                    reused = update.reused_blocks or 0
                tokens += update.token_ids
                if update.finish_reason is not None:
                    assert first is not None
                    return first, tokens, reused

    def _step(self, sequence_id: int) -> list[Any]:
        """One step of the engine. Returns the updates of ``sequence_id`` and counts those of the background."""
        report = self.core.step()
        now = time.perf_counter()
        own = []
        for update in report.updates if report is not None else ():
            assert update.error is None, update.error
            if update.sequence_id == sequence_id:
                own.append(update)
                continue
            if update.sequence_id in self.last:
                self.window.gaps.append(now - self.last[update.sequence_id])
            self.last[update.sequence_id] = now
            if update.finish_reason is not None:
                del self.last[update.sequence_id]
                self._decode_more()
        return own

    def pause(self) -> None:
        end = time.perf_counter() + self.options.pause_ms / 1e3
        while time.perf_counter() < end:
            self._step(-1)

    def turn(self) -> None:
        """One request of the window."""
        options, window = self.options, self.window
        if self.dice.random() < options.returning:
            index = self.dice.choice([i for i in range(len(self.conversations)) if i not in self.recent])
            waits = window.ttft_returning
        else:
            index = 0
            self.conversations.append(self._tokens(options.tokens))
            del self.conversations[0]
            self.recent = [i - 1 for i in self.recent]
            index = len(self.conversations) - 1
            waits = window.ttft_new
        prompt = self.conversations[index] + self._tokens(options.added)
        first, answer, reused = self.ask(prompt)
        waits.append(first)
        window.reused += reused * self.core.scheduler.pool.tokens_per_block
        window.prompt_tokens += len(prompt)
        self.conversations[index] = prompt + answer
        self.recent = [*self.recent, index][-2:]
        self.pause()

    def run(self) -> dict[str, Any]:
        for conversation in self.conversations:
            self.ask(conversation)
        self.recent = [len(self.conversations) - 2, len(self.conversations) - 1]
        for _ in range(2):  # warm-up
            self.turn()
        tier = self.core.tier
        if tier is not None:
            tier.counters.stored = tier.counters.loaded = tier.counters.dropped = 0
            tier.counters.stored_seconds = tier.counters.loaded_seconds = 0.0
        self.window = window = Window()
        gc.collect()
        gc.disable()
        for _ in range(self.options.requests):
            self.turn()
        gc.enable()
        self.core.abort(range(self.next_background))
        while self.core.wait_s is not None:
            self.core.step()
        self.core.check()
        found = {
            "ttft_returning_ms": _percentiles(window.ttft_returning, 0.5, 0.9),
            "ttft_all_ms": _percentiles(window.ttft_returning + window.ttft_new, 0.5, 0.9),
            "itl_ms": _percentiles(window.gaps, 0.5, 0.99),
            "reused_share": window.reused / window.prompt_tokens,
        }
        if tier is not None:
            counters = tier.counters
            found |= {
                "stored_gb_s": _rate(counters.stored * tier.block_bytes, counters.stored_seconds),
                "loaded_gb_s": _rate(counters.loaded * tier.block_bytes, counters.loaded_seconds),
                "stored_blocks": counters.stored,
                "loaded_blocks": counters.loaded,
                "dropped_blocks": counters.dropped,
                "abandoned_loads": counters.abandoned_loads,
            }
        return found


def plain_copies(runner: TorchRunner | LeadingRunner, num_bytes: int) -> dict[str, float | None]:
    """GB/s of one copy of pinned memory in each direction."""
    if not runner.is_asynchronous:
        return {"to_host_gb_s": None, "to_device_gb_s": None}
    device = runner.pool.view(torch.uint8).flatten()[:num_bytes]
    host = torch.empty_like(device, device="cpu", pin_memory=True)
    found: dict[str, float | None] = {}
    for name, target, source in (("to_host_gb_s", host, device), ("to_device_gb_s", device, host)):
        best = 0.0
        for _ in range(4):
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            target.copy_(source, non_blocking=True)
            end.record()
            end.synchronize()
            best = max(best, num_bytes / begin.elapsed_time(end) / 1e6)
        found[name] = best
    return found


def _rate(num_bytes: int, seconds: float) -> float | None:
    return num_bytes / seconds / 1e9 if seconds else None


def _percentiles(seconds: list[float], *shares: float) -> list[float | None]:
    """Returns percentiles in milliseconds; None without values."""
    ordered = sorted(seconds)
    return [ordered[int(share * (len(ordered) - 1))] * 1e3 if ordered else None for share in shares]


def _cell(value: float | None, digits: int = 1) -> str:
    return ("–" if value is None else f"{value:,.{digits}f}").rjust(10)


def new_copies(runner: TorchRunner | LeadingRunner, num_bytes: int) -> BlockCopies:
    """``num_bytes``: of host memory, for each rank."""
    if isinstance(runner, LeadingRunner):
        return runner.create_host_copies(num_bytes)
    return create_host_copies(pools_of(runner), num_bytes, len(runner.geometry.groups))


def end_with(error: Exception) -> None:
    """Ends this process, because a step would wait for the rank that has ended forever."""
    print(f"a rank ended: {error}", file=sys.stderr, flush=True)
    os._exit(1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="synthetic:qwen3-8b", help="synthetic:<shape> or a checkpoint directory")
    parser.add_argument("--conversations", type=int, default=20)
    parser.add_argument("--tokens", type=int, default=16384, help="of a conversation at its start")
    parser.add_argument("--added", type=int, default=64, help="new tokens of each turn")
    parser.add_argument("--requests", type=int, default=40, help="in the window of each way")
    parser.add_argument("--returning", type=float, default=0.8, help="share of the requests")
    parser.add_argument("--background", type=int, default=8, help="sequences that decode all the time")
    parser.add_argument("--pause-ms", type=float, default=100)
    parser.add_argument("--ways", default="none,tier,all")
    parser.add_argument("--max-num-tokens", type=int, default=8192)
    parser.add_argument("--tokens-per-block", type=int, default=32)
    parser.add_argument("--kv-dtype", default="auto")
    parser.add_argument("--tp", type=int, default=1, help="GPUs that share each layer")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    checkpoint = resolve_checkpoint(options.model, on_gpu=torch.cuda.is_available())
    longest = options.tokens + (options.requests + 4) * (options.added + ANSWER_TOKENS)
    each = -(-longest // options.tokens_per_block) + 1
    background = options.background * (-(-(BACKGROUND_PROMPT + BACKGROUND_TOKENS) // options.tokens_per_block) + 1)
    small = max(2, options.conversations // 10) * each + background
    large = options.conversations * -(-(options.tokens + 4 * options.added) // options.tokens_per_block) + small
    began = time.perf_counter()
    args = RunnerArgs(
        model_dir=Path(checkpoint.path), max_batch_size=options.background + 4,
        max_num_tokens=options.max_num_tokens, max_seq_len=longest + ANSWER_TOKENS, kv_dtype=options.kv_dtype,
        tokens_per_block=options.tokens_per_block, num_blocks=large if "all" in options.ways.split(",") else small,
    )  # fmt: skip
    runner = create_runner(args) if options.tp == 1 else create_ranked_runner(args, start_ranks(options.tp, end_with))
    ready = time.perf_counter() - began
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else f"CPU, {os.cpu_count()} cores"
    print(
        f"{options.model}, {device}, torch {torch.__version__}, {options.conversations} conversations of "
        f"{options.tokens} tokens, pool of {small} blocks ({large} for all), ready in {ready:.1f} s",
        flush=True,
    )
    gc.collect()
    gc.freeze()
    plain = plain_copies(runner, min(1 << 30, runner.pool.numel() * runner.pool.element_size()))
    print(f"plain copy of pinned memory: {_cell(plain['to_host_gb_s'])} GB/s to the host, "
          f"{_cell(plain['to_device_gb_s'])} GB/s to the device", flush=True)  # fmt: skip
    print(f"{'way':>6} {'TTFT p50 ms (returning)':>24} {'p90':>10} {'all p50':>10} {'p90':>10} {'ITL p50':>10} "
          f"{'p99':>10} {'reused':>7} {'took s':>7}", flush=True)  # fmt: skip
    rows = []
    for way in options.ways.split(","):
        began = time.perf_counter()
        copies = None
        if way == "tier":
            size = large * runner.geometry.block_bytes
            copies = new_copies(runner, size)
            print(
                f"       {size * options.tp / 1e9:.1f} GB of host memory in {time.perf_counter() - began:.1f} s",
                flush=True,
            )
        found = Play(runner, options, large if way == "all" else small, copies).run()
        if copies is not None:
            copies.close()
        (p50, p90), (all50, all90), (itl, p99) = found["ttft_returning_ms"], found["ttft_all_ms"], found["itl_ms"]
        took = time.perf_counter() - began
        print(f"{way:>6} {_cell(p50):>24} {_cell(p90)} {_cell(all50)} {_cell(all90)} {_cell(itl, 2)} {_cell(p99, 2)} "
              f"{found['reused_share']:>7.1%} {took:>7.1f}", flush=True)  # fmt: skip
        if copies is not None:
            print(f"       stored {_cell(found['stored_gb_s'])} GB/s ({found['stored_blocks']} blocks), loaded "
                  f"{_cell(found['loaded_gb_s'])} GB/s ({found['loaded_blocks']} blocks), "
                  f"{found['dropped_blocks']} dropped", flush=True)  # fmt: skip
        rows.append({"way": way, **found})
    print(json.dumps({"options": vars(options), "device": device, "plain": plain, "rows": rows}))
    runner.close()


if __name__ == "__main__":
    main()
