"""Compares ways to compute a step's prompts and decodes, under a closed loop of clients like that of a load test.

    python benchmarks/closed_loop.py --model synthetic:qwen3-8b                               # one GPU, about 2 min
    python benchmarks/closed_loop.py --model synthetic:qwen3-0.6b --concurrency 8,64,256      # about 1 min
    python benchmarks/closed_loop.py --model synthetic:tiny --concurrency 4 --isl 24 --osl 8 --ways two,merged:16

It runs the whole engine except its client over one runner, and sends reports to another process. Requests are sampled
at temperature 1, and every prompt is different. Each of N clients sends its next request after a random delay, between
the two values of ``--delay-ms``, from the end of the previous one.

A way is ``PASSES[:SHARE]``. PASSES is ``two`` (decodes and prompt chunks of a step are two forwards), ``two-graphs``
(the forward of the chunks is padded to one of ``--pass-sizes`` and replayed as a CUDA graph; beyond the largest size it
is not padded), ``merged`` (one mixed batch) or ``graphs`` (one mixed batch, padded in the same way). ``default`` is the
engine's own choice.
SHARE is the prefill token budget of a step with decodes: ``none`` (all that fits, the default), ``512`` (so many
tokens), ``paced32`` (enough to keep up with arriving prompts, and to compute the waiting ones in about 32 steps). The
ways take turns. Each has a warm-up of ``--warm-up`` requests per client. The measured window then lasts until
``--requests`` requests per client have ended; clients continue to send, so the window does not include the load's end.
tok/s counts the tokens generated in the window. TTFT starts when a request arrives in the engine, and covers the first
tokens in the window. ITL is the time between two reports of one request. ``mixed`` is the share of steps with both
decodes and prompts, ``prompt`` their mean number of prompt tokens. The last line of stdout is one JSON document.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import random
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from heapq import heappop, heappush
from pathlib import Path
from typing import Any

import torch
from overlap import Reader

from trtx.checkpoint import resolve_checkpoint
from trtx.config.torch_passes import PASS_SIZES
from trtx.torch_engine.core.engine_core import EngineCore
from trtx.torch_engine.core.reports import ReportSender
from trtx.torch_engine.core.scheduler_limits import SchedulerLimits
from trtx.torch_engine.llmapi.sampling import SamplingParams, resolve_sampling
from trtx.torch_engine.messages import Submit
from trtx.torch_engine.runner import RunnerArgs, TorchRunner, create_runner

PASSES = ("two", "two-graphs", "merged", "graphs")
DEFAULT = "default"
DEFAULT_WAYS = "two,two-graphs,merged,merged:512,graphs:512,graphs:1024,graphs:paced32"


@dataclass(frozen=True, slots=True)
class Way:
    """One way to compute a step's prompts and decodes."""

    name: str
    passes: str
    cap: int | None = None  # the maximum number of prompt tokens in a step with decodes
    steps: int | None = None  # see SchedulerLimits.paced_steps

    @classmethod
    def of(cls, text: str, runner: TorchRunner) -> Way:
        """Parses ``default`` or ``PASSES[:SHARE]``; raises ValueError. ``runner``: still with its initial settings."""
        if text == DEFAULT:
            name = ("merged", "graphs") if runner.merges_passes else ("two", "two-graphs")
            return cls(text, name[runner.pads_passes], steps=runner.paced_steps)
        passes, _, share = text.partition(":")
        if passes not in PASSES:
            raise ValueError(f"{text!r} begins with {passes!r}; expected {DEFAULT}, {', '.join(PASSES)}")
        if share in ("", "none"):
            return cls(text, passes)
        if share.startswith("paced"):
            return cls(text, passes, steps=int(share.removeprefix("paced")))
        return cls(text, passes, cap=int(share))

    def limits(self, clients: int, max_num_tokens: int, *, chunked: bool) -> SchedulerLimits:
        return SchedulerLimits(
            clients, max_num_tokens, enable_chunked_prefill=chunked, max_prompt_tokens_beside_decodes=self.cap,
            paced_steps=self.steps,
        )  # fmt: skip

    def set(self, runner: TorchRunner) -> None:
        runner.merges_passes, runner.pads_passes = not self.passes.startswith("two"), self.passes.endswith("graphs")


class Steps:
    """Counts the kinds of steps that the scheduler makes."""

    def __init__(self, core: EngineCore) -> None:
        self.kinds = Counter[str]()
        self.prompt_tokens = 0
        self._schedule = core.scheduler.schedule
        core.scheduler.schedule = self._counted  # type: ignore[method-assign]

    def _counted(self) -> Any:
        step = self._schedule()
        if step.num_generating and step.num_context_tokens:
            self.kinds["mixed"] += 1
            self.prompt_tokens += step.num_context_tokens
        elif step.sequences:
            self.kinds["decodes" if step.num_generating else "prompts"] += 1
        return step


def play(
    runner: TorchRunner, way: Way, *, clients: int, isl: int, osl: int, warm_up: int, requests: int,
    delay_s: tuple[float, float], max_num_tokens: int, chunked: bool, seed: int, clock: Any = time,
    send: Callable[[Any], None],
) -> dict[str, Any]:  # fmt: skip
    """Runs warm-up and window of one way. ``send``: receives each report. ``clock``: has perf_counter and sleep."""
    dice = random.Random(seed)
    way.set(runner)
    core = EngineCore(
        runner,
        way.limits(clients, max_num_tokens, chunked=chunked),
        event_buffer_max_size=65536,
        enable_iter_perf_stats=True,
    )
    plan = resolve_sampling(SamplingParams(max_tokens=osl, temperature=1.0, ignore_eos=True))
    ids = range(runner.vocab_size)
    prompts = [dice.choices(ids, k=isl) for _ in range(clients * (warm_up + requests + 2))]
    sent: dict[int, float] = {}  # requests without a token yet -> their arrival times
    last: dict[int, float] = {}  # requests with tokens -> the time of their last token
    submitted = 0
    waits: list[float] = []
    gaps: list[float] = []
    ended = tokens = 0
    gc.collect()
    began = clock.perf_counter() if not warm_up else None
    steps = Steps(core)
    due = [clock.perf_counter()] * clients  # a heap of the times at which clients send
    while ended < clients * (warm_up + requests):
        while due and due[0] <= (now := clock.perf_counter()):
            heappop(due)
            core.submit(Submit(submitted, prompts.pop(), plan))
            sent[submitted] = now
            submitted += 1
        if core.wait_s is None:
            clock.sleep(max(0.0, due[0] - clock.perf_counter()))
            continue
        report = core.step()
        if report is None:
            continue
        send(report)
        now = clock.perf_counter()
        for update in report.updates:
            assert update.error is None, update.error
            at = update.sequence_id
            if began is not None:
                tokens += len(update.token_ids)
                if at in sent:
                    waits.append(now - sent[at])
                else:
                    gaps.append(now - last[at])
            sent.pop(at, None)
            last[at] = now
            if update.finish_reason is not None:
                ended += 1
                heappush(due, now + dice.uniform(*delay_s))
                if ended == clients * warm_up:
                    began, steps.kinds, steps.prompt_tokens = now, Counter(), 0
    assert began is not None
    elapsed = clock.perf_counter() - began
    core.abort(range(submitted))
    while core.wait_s == 0.0:
        core.step()
    mixed, all_steps = steps.kinds["mixed"], steps.kinds.total()
    return {
        "tokens_per_s": tokens / elapsed,
        "ttft_ms": _percentiles(waits, 0.5, 0.9),
        "itl_ms": _percentiles(gaps, 0.5, 0.99),
        "steps": dict(steps.kinds),
        "mixed_share": mixed / all_steps,
        "prompt_tokens_of_mixed": steps.prompt_tokens / mixed if mixed else None,
        "window_s": elapsed,
    }


def _percentiles(seconds: list[float], *shares: float) -> list[float | None]:
    """Returns percentiles in milliseconds; None without values."""
    ordered = sorted(seconds)
    return [ordered[int(share * (len(ordered) - 1))] * 1e3 if ordered else None for share in shares]


def _cell(value: float | None, width: int, digits: int = 1) -> str:
    return "–".rjust(width) if value is None else f"{value:>{width},.{digits}f}"


def print_head() -> None:
    print(f"{'clients':>7} {'way':>16} {'tok/s':>9} {'':>7} {'TTFT p50 ms':>11} {'p90':>8} {'ITL p50 ms':>10} "
          f"{'p99':>7} {'mixed':>6} {'prompt':>7} {'took s':>6}", flush=True)  # fmt: skip


def print_row(clients: int, way: Way, found: dict[str, Any], first: float, took: float) -> None:
    """Prints one row of the table. ``first``: the tokens/s of the first way."""
    (p50, p90), (itl, p99) = found["ttft_ms"], found["itl_ms"]
    print(f"{clients:>7} {way.name:>16} {found['tokens_per_s']:>9,.0f} "
          f"{found['tokens_per_s'] / first - 1:>+7.1%} {_cell(p50, 11)} {_cell(p90, 8)} {_cell(itl, 10, 2)} "
          f"{_cell(p99, 7, 2)} {found['mixed_share']:>6.0%} {_cell(found['prompt_tokens_of_mixed'], 7, 0)} "
          f"{took:>6.1f}", flush=True)  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="synthetic:qwen3-0.6b", help="synthetic:<shape> or a checkpoint directory")
    parser.add_argument("--concurrency", default="64,256", help="clients (default: %(default)s)")
    parser.add_argument("--isl", type=int, default=512, help="prompt tokens")
    parser.add_argument("--osl", type=int, default=128, help="generated tokens")
    parser.add_argument("--warm-up", type=int, default=1, help="requests of a client before the window")
    parser.add_argument("--requests", type=int, default=2, help="requests of a client in the window")
    parser.add_argument("--delay-ms", default="1-4", help="of a client between two requests (default: %(default)s)")
    parser.add_argument("--ways", default=DEFAULT_WAYS, help="PASSES[:SHARE] with commas (default: %(default)s)")
    parser.add_argument("--max-num-tokens", type=int, default=8192)
    parser.add_argument("--tokens-per-block", type=int, default=32)
    parser.add_argument("--whole-prompts", action="store_true", help="enable_chunked_prefill: false, as by default")
    parser.add_argument("--pass-sizes", default="", help="tokens, with commas (default: the engine's)")
    options = parser.parse_args()
    sizes = tuple(int(size) for size in options.pass_sizes.split(",")) if options.pass_sizes else PASS_SIZES
    concurrency = [int(clients) for clients in options.concurrency.split(",")]
    names = options.ways.split(",")
    low, high = (float(value) / 1e3 for value in options.delay_ms.split("-"))
    checkpoint = resolve_checkpoint(options.model, on_gpu=torch.cuda.is_available())
    blocks = (max(concurrency) + 1) * (-(-(options.isl + options.osl) // options.tokens_per_block) + 1)
    start = time.perf_counter()
    runner = create_runner(
        RunnerArgs(
            model_dir=Path(checkpoint.path), max_batch_size=max(concurrency), max_num_tokens=options.max_num_tokens,
            max_seq_len=options.isl + options.osl, tokens_per_block=options.tokens_per_block,
            max_tokens=int(blocks * 1.02) * options.tokens_per_block,
            pass_sizes=sizes if any("graphs" in name for name in names) else None if DEFAULT in names else (),
        )
    )  # fmt: skip
    ways = [Way.of(name, runner) for name in names]
    start = time.perf_counter() - start
    gc.collect()
    gc.freeze()
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else f"CPU, {os.cpu_count()} cores"
    print(
        f"{options.model}, {device}, torch {torch.__version__}, ISL {options.isl}, OSL {options.osl}, "
        f"{options.requests} requests a client after {options.warm_up}, ready in {start:.1f} s"
    )
    print_head()
    rows = []
    for clients in concurrency:
        first: float | None = None
        for turn, way in enumerate(ways):
            began = time.perf_counter()
            reader = Reader()
            reports = ReportSender(reader.channel.send)
            found = play(
                runner, way, clients=clients, isl=options.isl, osl=options.osl, warm_up=options.warm_up,
                requests=options.requests, delay_s=(low, high), max_num_tokens=options.max_num_tokens,
                chunked=not options.whole_prompts, seed=1000 * clients + turn, send=reports.put,
            )  # fmt: skip
            reports.close()
            reader.close()
            took = time.perf_counter() - began
            first = first or found["tokens_per_s"]
            rows.append({"clients": clients, "way": way.name, **found})
            print_row(clients, way, found, first, took)
    found_all = {"model": options.model, "device": device, "options": vars(options), "ready_s": start, "rows": rows}
    print(json.dumps(found_all))


if __name__ == "__main__":
    main()
