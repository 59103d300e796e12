"""Compares one mixed batch with two forwards for a step's decodes and prompt chunks, with several prompt token budgets.

    python benchmarks/merged_pass.py --model synthetic:qwen3-8b        # one GPU, about 4 min
    python benchmarks/merged_pass.py --model synthetic:tiny --decodes 2 --loads 40x3 --caps none,16 --isl 16

It runs the whole engine except its client, with sampling. ``--decodes`` sequences decode all the time while the prompts
of a load (LENGTH x COUNT) arrive, two at a time until all are done; before that, the same load runs without decodes.
ITL is the time between two tokens of a decoding sequence while there are prompts. A cap is the maximum number of prompt
tokens in a step with decodes. The ways take turns on one runner, and each round has new prompts. Numbers are medians
over the rounds, but percentiles of ITL are over all rounds together. The last line of stdout is one JSON document.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import random
import statistics
import time
from pathlib import Path
from typing import Any

import torch

from trtx.checkpoint import resolve_checkpoint
from trtx.torch_engine.core.engine_core import EngineCore
from trtx.torch_engine.core.scheduler import SchedulerLimits
from trtx.torch_engine.llmapi.sampling import SamplingParams, resolve_sampling
from trtx.torch_engine.messages import Submit
from trtx.torch_engine.runner import RunnerArgs, TorchRunner, create_runner

OPEN = 2  # concurrent prompts
WAYS = {"two passes": False, "merged": True}


def play(
    runner: TorchRunner, *, decodes: int, isl: int, length: int, count: int, cap: int | None, max_num_tokens: int,
    decode_tokens: int, seed: int,
) -> dict[str, Any]:  # fmt: skip
    """Returns prompt and decode tokens/s from the first prompt's arrival to the last one's token, and all ITLs."""
    dice = random.Random(seed)
    limits = SchedulerLimits(decodes + OPEN, max_num_tokens, max_prompt_tokens_beside_decodes=cap, paced_steps=None)
    core = EngineCore(runner, limits)
    ids = range(runner.vocab_size)
    background = resolve_sampling(SamplingParams(max_tokens=decode_tokens, temperature=1.0, ignore_eos=True))
    single = resolve_sampling(SamplingParams(max_tokens=1, temperature=1.0, ignore_eos=True))
    for at in range(decodes):
        core.submit(Submit(at, dice.choices(ids, k=isl), background))
    prompts = [dice.choices(ids, k=length) for _ in range(count)]
    seen = set[int]()
    while len(seen) < decodes:
        report = core.step()
        seen |= {update.sequence_id for update in report.updates} if report is not None else set()
    submitted = done = tokens = 0
    waits: list[float] = []
    last: float | None = None
    began = time.perf_counter()
    while done < count:
        while submitted < count and submitted - done < OPEN:
            core.submit(Submit(decodes + submitted, prompts[submitted], single))
            submitted += 1
        report = core.step()
        now = time.perf_counter()
        decoded = 0
        for update in report.updates if report is not None else ():
            assert update.error is None, update.error
            if update.sequence_id >= decodes:
                done += update.finish_reason is not None
            else:
                assert update.finish_reason is None, "the others decode all the time: raise --decode-tokens"
                decoded += len(update.token_ids)
        if decoded:
            tokens += decoded
            if last is not None:
                waits.append((now - last) * 1e3)
            last = now
    elapsed = time.perf_counter() - began
    core.abort(range(decodes))
    while core.wait_s == 0.0:
        core.step()
    return {"prompt": count * length / elapsed, "decode": tokens / elapsed, "itl_ms": waits}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="synthetic:qwen3-0.6b", help="synthetic:<shape> or a checkpoint directory")
    parser.add_argument("--decodes", type=int, default=64)
    parser.add_argument("--isl", type=int, default=512, help="prompt tokens of those that decode")
    parser.add_argument("--decode-tokens", type=int, default=4000, help="the most that one of them may generate")
    parser.add_argument("--loads", default="8192x6,512x64", help="LENGTHxCOUNT with commas (default: %(default)s)")
    parser.add_argument("--caps", default="none,2048,1024,512", help="prompt tokens beside decodes")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--max-num-tokens", type=int, default=8192)
    parser.add_argument("--tokens-per-block", type=int, default=32)
    options = parser.parse_args()
    loads = [tuple(int(number) for number in load.split("x")) for load in options.loads.split(",")]
    caps = [None if cap == "none" else int(cap) for cap in options.caps.split(",")]
    checkpoint = resolve_checkpoint(options.model, on_gpu=torch.cuda.is_available())
    longest = max(*(length for length, _ in loads), options.isl + options.decode_tokens) + options.tokens_per_block
    held = options.decodes * (options.isl + options.decode_tokens) + (OPEN + 1) * longest
    runner = create_runner(
        RunnerArgs(
            model_dir=Path(checkpoint.path), max_batch_size=options.decodes + OPEN,
            max_num_tokens=options.max_num_tokens, max_seq_len=longest,
            tokens_per_block=options.tokens_per_block, max_tokens=held,
        )
    )  # fmt: skip
    gc.collect()
    gc.freeze()
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else f"CPU, {os.cpu_count()} cores"
    print(f"{options.model}, {device}, torch {torch.__version__}, {options.decodes} decode, {options.rounds} rounds")
    print(f"{'load':>10} {'decoding':>8} {'cap':>6} {'':>11} {'prompt tok/s':>12} {'decode tok/s':>12} "
          f"{'ITL p50 ms':>10} {'p99':>7}")  # fmt: skip
    rows = []
    for length, count in loads:
        for decodes, cap in [(0, None), *((options.decodes, cap) for cap in caps)]:
            found: dict[str, list[dict[str, Any]]] = {way: [] for way in WAYS}
            for turn in range(-1, options.rounds):  # the first round is a warm-up
                for way, merges in WAYS.items():
                    runner.merges_passes = merges
                    round_ = play(
                        runner, decodes=decodes, isl=options.isl, length=length, count=count, cap=cap,
                        max_num_tokens=options.max_num_tokens, decode_tokens=options.decode_tokens,
                        seed=1000 * length + 2 * turn + merges,
                    )  # fmt: skip
                    if turn >= 0:
                        found[way].append(round_)
            for way, rounds in found.items():
                prompt, decode = (statistics.median(each[name] for each in rounds) for name in ("prompt", "decode"))
                waits = sorted(wait for each in rounds for wait in each["itl_ms"])
                p50, p99 = (waits[int(share * (len(waits) - 1))] if waits else None for share in (0.5, 0.99))
                rows.append({"load": f"{length}x{count}", "decodes": decodes, "cap": cap, "way": way,
                             "prompt_tokens_per_s": prompt, "decode_tokens_per_s": decode,
                             "itl_p50_ms": p50, "itl_p99_ms": p99})  # fmt: skip
                cells = " ".join("–".rjust(width) if value is None else f"{value:>{width}.2f}"
                                 for value, width in ((p50, 10), (p99, 7)))  # fmt: skip
                print(f"{length:>6}x{count:<3} {decodes:>8} {cap or 'none':>6} {way:>11} {prompt:>12,.0f} "
                      f"{decode:>12,.0f} {cells}", flush=True)  # fmt: skip
    print(json.dumps({"model": options.model, "device": device, "options": vars(options), "rows": rows}))


if __name__ == "__main__":
    main()
