"""Measures the cost of the step loop: the whole engine except its client, with and without overlap, on one runner.

    python benchmarks/overlap.py --model synthetic:qwen3-8b --batch 1,8,64,256 --isl 512 --osl 128 --rounds 3

It includes scheduler, pool with prefix cache, KV events, statistics, runner, and reports sent to another process, as in
an engine process. All requests of a round are submitted at its start, with different prompts and default sampling.
"decode" is the tokens/s from the first token of the last sequence until the first sequence ends; "all" counts every
token over the whole round. Numbers are medians over the rounds. With ``--arrivals`` it measures instead how long a
request that arrives while all other slots decode waits for its first token. The last line of stdout is one JSON
document.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import random
import socket
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch

from trtx.checkpoint import resolve_checkpoint
from trtx.torch_engine.channel import Channel
from trtx.torch_engine.core.engine_core import EngineCore
from trtx.torch_engine.core.reports import ReportSender
from trtx.torch_engine.core.scheduler_limits import SchedulerLimits
from trtx.torch_engine.llmapi.sampling import SamplingParams, resolve_sampling
from trtx.torch_engine.messages import Submit, ToEngine
from trtx.torch_engine.runner import RunnerArgs, TorchRunner, create_runner

BACKGROUND_TOKENS = 2000
"""The length of a sequence that decodes while others arrive: enough for all arrivals of a round."""
ARRIVALS = 20  # per round

_READER = "import socket, sys\nend = socket.socket(fileno=int(sys.argv[1]))\nwhile end.recv(1 << 20): pass"


class Reader:
    """A process that reads reports and discards them."""

    def __init__(self) -> None:
        ours, theirs = socket.socketpair()
        number = theirs.fileno()
        self._process = subprocess.Popen([sys.executable, "-c", _READER, str(number)], pass_fds=[number])
        theirs.close()
        self._socket = ours
        self.channel: Channel[Any] = Channel(ours, ToEngine)

    def close(self) -> None:
        self._socket.close()
        self._process.wait()


def play(
    runner: TorchRunner, *, overlap: bool, batch: int, isl: int, osl: int, max_num_tokens: int, seed: int,
    params: dict[str, Any],
) -> dict[str, float]:  # fmt: skip
    """Runs one round. ``step_ms`` in the result covers only the part without prompts."""
    dice = random.Random(seed)
    plan = resolve_sampling(SamplingParams(max_tokens=osl, ignore_eos=True, **params))
    core = EngineCore(
        runner, SchedulerLimits(batch, max_num_tokens), disable_overlap_scheduler=not overlap,
        event_buffer_max_size=65536, enable_iter_perf_stats=True,
    )  # fmt: skip
    submits = [Submit(at, dice.choices(range(runner.vocab_size), k=isl), plan) for at in range(batch)]
    reader = Reader()
    reports = ReportSender(reader.channel.send)
    gc.collect()
    started, open_, tokens, steps = set[int](), batch, 0, 0
    decode_began = decode_ended = 0.0
    before = 0
    began = time.perf_counter()
    for submit in submits:
        core.submit(submit)
    while open_:
        report = core.step()
        if report is None:
            continue
        now = time.perf_counter()
        for update in report.updates:
            assert update.error is None, update.error
            tokens += len(update.token_ids)
            started.add(update.sequence_id)
            if update.finish_reason is not None:
                open_ -= 1
                decode_ended = decode_ended or now
        if decode_began and (now == decode_ended or not decode_ended):
            steps += 1
            decode_tokens = tokens - before
        if len(started) == batch and not decode_began:
            decode_began, before = now, tokens
        reports.put(report)
    elapsed = time.perf_counter() - began
    reports.close()
    reader.close()
    while core.wait_s == 0.0:
        core.step()  # completes a step in flight, whose requests have ended
    assert tokens == batch * osl
    seconds = decode_ended - decode_began
    return {"decode": decode_tokens / seconds, "all": tokens / elapsed, "step_ms": seconds / steps * 1e3}


def arrive(
    runner: TorchRunner, *, overlap: bool, batch: int, isl: int, max_num_tokens: int, seed: int
) -> list[float]:  # fmt: skip
    """Returns the milliseconds to the first token of requests that arrive one at a time, at random moments of a step,
    while the other slots of ``batch`` decode."""
    dice = random.Random(seed)
    core = EngineCore(runner, SchedulerLimits(batch, max_num_tokens), disable_overlap_scheduler=not overlap)
    for at in range(batch - 1):
        plan = resolve_sampling(SamplingParams(max_tokens=BACKGROUND_TOKENS, temperature=1.0))
        core.submit(Submit(at, dice.choices(range(runner.vocab_size), k=isl), plan))
    prompts = [dice.choices(range(runner.vocab_size), k=isl) for _ in range(ARRIVALS)]
    plan = resolve_sampling(SamplingParams(max_tokens=1, temperature=1.0))
    decoding, waits, tokens, due = batch == 1, list[float](), 0, time.perf_counter()
    is_open = False
    while len(waits) < ARRIVALS:
        if not decoding:
            decoding, due = tokens > 4 * batch, time.perf_counter() + 0.05
        elif not is_open and time.perf_counter() >= due:
            core.submit(Submit(batch + len(waits), prompts[len(waits)], plan))
            is_open = True
        report = core.step()
        for update in report.updates if report is not None else ():
            tokens += len(update.token_ids)
            if update.sequence_id >= batch:
                waits.append((time.perf_counter() - due) * 1e3)
                is_open, due = False, time.perf_counter() + dice.uniform(0.02, 0.05)
            else:
                assert update.finish_reason is None, "the others decode all the time"
    core.abort(range(batch))
    while core.wait_s == 0.0:
        core.step()
    return waits


def compare_throughput(runner: TorchRunner, batch: int, options: argparse.Namespace) -> dict[str, Any]:
    params = {} if options.greedy else {"temperature": 1.0}
    found: dict[bool, list[dict[str, float]]] = {False: [], True: []}
    for turn in range(-1, options.rounds):  # the first round is a warm-up
        for overlap in (False, True):
            round_ = play(
                runner, overlap=overlap, batch=batch, isl=options.isl, osl=options.osl,
                max_num_tokens=options.max_num_tokens, seed=1000 * batch + 2 * turn + overlap, params=params,
            )  # fmt: skip
            if turn >= 0:
                found[overlap].append(round_)
    off, on = (
        {name: statistics.median(round_[name] for round_ in found[overlap]) for name in found[overlap][0]}
        for overlap in (False, True)
    )
    print(f"{batch:>5}  {off['decode']:>16,.0f} {on['decode']:>8,.0f} {on['decode'] / off['decode'] - 1:>+7.1%}  "
          f"{off['step_ms']:>11.3f} {on['step_ms']:>7.3f}  "
          f"{off['all']:>13,.0f} {on['all']:>8,.0f} {on['all'] / off['all'] - 1:>+7.1%}", flush=True)  # fmt: skip
    return {"batch": batch, "off": off, "on": on, "rounds": {"off": found[False], "on": found[True]}}


def compare_arrivals(runner: TorchRunner, batch: int, options: argparse.Namespace) -> dict[str, Any]:
    found: dict[bool, list[float]] = {False: [], True: []}
    for turn in range(-1, options.rounds):
        for overlap in (False, True):
            waits = arrive(
                runner, overlap=overlap, batch=batch, isl=options.isl, max_num_tokens=options.max_num_tokens,
                seed=1000 * batch + 2 * turn + overlap,
            )  # fmt: skip
            if turn >= 0:
                found[overlap] += waits
    off, on = (statistics.quantiles(found[overlap], n=10) for overlap in (False, True))
    print(f"{batch:>5}  {off[4]:>20.2f} {on[4]:>8.2f}  {off[8]:>8.2f} {on[8]:>8.2f}", flush=True)
    return {"batch": batch, "off": found[False], "on": found[True]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="synthetic:qwen3-0.6b", help="synthetic:<shape> or a checkpoint directory")
    parser.add_argument("--batch", default="1,8,64,256")
    parser.add_argument("--isl", type=int, default=512, help="prompt tokens")
    parser.add_argument("--osl", type=int, default=128, help="generated tokens")
    parser.add_argument("--rounds", type=int, default=3, help="of each of the two, in turn")
    parser.add_argument("--max-num-tokens", type=int, default=8192)
    parser.add_argument("--tokens-per-block", type=int, default=32)
    parser.add_argument("--greedy", action="store_true")
    parser.add_argument("--arrivals", action="store_true")
    options = parser.parse_args()
    batches = [int(batch) for batch in options.batch.split(",")]
    checkpoint = resolve_checkpoint(options.model, on_gpu=torch.cuda.is_available())
    longest = options.isl + (BACKGROUND_TOKENS if options.arrivals else options.osl)
    blocks = (max(batches) + 1) * (-(-longest // options.tokens_per_block) + 1)
    runner = create_runner(
        RunnerArgs(
            model_dir=Path(checkpoint.path), max_batch_size=max(batches), max_num_tokens=options.max_num_tokens,
            max_seq_len=longest, tokens_per_block=options.tokens_per_block,
            max_tokens=blocks * options.tokens_per_block,
        )
    )  # fmt: skip
    gc.collect()
    gc.freeze()
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else f"CPU, {os.cpu_count()} cores"
    print(f"{options.model}, {device}, torch {torch.__version__}, ISL {options.isl}, OSL {options.osl}, medians of "
          f"{options.rounds}, {'greedy' if options.greedy else 'sampled'}")  # fmt: skip
    if options.arrivals:
        print(f"{'batch':>5}  {'first token ms: off':>20} {'on':>8}  {'p90 off':>8} {'on':>8}", flush=True)
    else:
        print(f"{'batch':>5}  {'decode tok/s off':>16} {'on':>8} {'':>7}  {'step ms off':>11} {'on':>7}  "
              f"{'all tok/s off':>13} {'on':>8} {'':>7}", flush=True)  # fmt: skip
    compare = compare_arrivals if options.arrivals else compare_throughput
    rows = [compare(runner, batch, options) for batch in batches]
    print(json.dumps({"model": options.model, "device": device, "options": vars(options), "rows": rows}))


if __name__ == "__main__":
    main()
