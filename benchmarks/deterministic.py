"""Measures the cost and the effect of ``--deterministic``: the engine's runner with and without it, side by side.

    python benchmarks/deterministic.py                                     # a small model, on this CPU
    python benchmarks/deterministic.py --model synthetic:qwen3-8b --batch 1,8,64,256 --isl 512 --osl 64 --prompts 64
    python benchmarks/deterministic.py --matmuls --tiles 64x128x4x4        # single matmuls, on a GPU

Two runners over one checkpoint take turns, ``--rounds`` each. The first table has speeds, as medians over the rounds:
greedy decode steps of all sequences, and the prompts before them. The second has the share of ``--prompts`` answers,
greedy and sampled, whose tokens or log-probabilities differ in any bit from those of the same request alone: in
batches, in chunks, and recomputed as after a preemption. The last line of stdout is one JSON document.

``--matmuls`` measures Qwen3-8B's matmuls in bfloat16 instead, at each of ``--rows``: microseconds of cuBLAS, of the
engine with the option, and of each tiling that gives the engine's bits, in CUDA graphs and with weights that are not
in the cache. ``--tiles`` adds tilings for a Hopper GPU, as ``ROWSxOUTPUTSxWARPSxSTAGES`` with commas between them;
``+parts`` behind one gives each part of a weight's columns a program of its own.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
from collections.abc import Iterator
from pathlib import Path

import torch
from engine_decode import measure

from trtx.checkpoint import resolve_checkpoint
from trtx.torch_engine.llmapi.sampling import SamplingParams, resolve_sampling
from trtx.torch_engine.runner import RunnerArgs, TorchRunner, create_runner
from trtx.torch_engine.step import Batch, Sampled, ScheduledSequence

MODES = {"default": False, "deterministic": True}
ANSWER_TOKENS = 12
CHUNK = 7
MATMUL_ROWS = "1,64,128,256,512,2048,8192"
LENGTHS = (1, 7, 33, 64, 90, 127, 130, 16)  # the lengths of the compared prompts, in turn


class Request:
    """A request that can be computed in a step with any other requests."""

    def __init__(self, slot: int, prompt: list[int], blocks: list[int], *, sampled: bool) -> None:
        self.prompt, self.slot, self.blocks = prompt, slot, blocks
        self.sampling = resolve_sampling(SamplingParams(temperature=1.0 if sampled else None, logprobs=2))
        self.output: list[int] = []
        self.logprobs: list[object] = []
        self.computed = 0
        self.is_first = True

    @property
    def is_decode(self) -> bool:
        return self.computed == len(self.prompt) + len(self.output) - 1 and self.computed > 0

    def share(self, limit: int) -> ScheduledSequence:
        known = self.prompt + self.output
        new = known[self.computed : self.computed + limit]
        return ScheduledSequence(
            self.slot, self.is_first, new, self.computed, [self.blocks], self.computed + len(new) == len(known),
            self.sampling, self.prompt, self.output, 5,
        )  # fmt: skip

    def take(self, share: ScheduledSequence, sampled: Sampled) -> None:
        assert sampled.error is None, sampled.error
        self.is_first = False
        self.computed += len(share.new_token_ids)
        if sampled.token_id is not None:
            self.output.append(sampled.token_id)
            assert sampled.logprobs is not None
            self.logprobs.append(sorted((token, one.logprob) for token, one in sampled.logprobs.items()))


def finish(runner: TorchRunner, requests: list[Request], *, chunk: int) -> None:
    while open_ := [one for one in requests if len(one.output) < ANSWER_TOKENS]:
        open_.sort(key=lambda one: not one.is_decode)
        shares = [one.share(chunk) for one in open_]
        for one, share, sampled in zip(open_, shares, runner.launch(Batch(shares)).results(), strict=True):
            one.take(share, sampled)


def requests_of(runner: TorchRunner, count: int) -> Iterator[Request]:
    per_request = -(-(max(LENGTHS) + ANSWER_TOKENS) // runner.geometry.tokens_per_block)
    free = list(range(runner.num_blocks))
    random.Random(1).shuffle(free)
    for at in range(count):
        length = LENGTHS[at % len(LENGTHS)]
        prompt = random.Random(length * 1000 + at).choices(range(runner.vocab_size), k=length)
        yield Request(at, prompt, free[at * per_request : (at + 1) * per_request], sampled=at % 2 == 1)


def differing(runner: TorchRunner, count: int, batches: list[int]) -> dict[str, float]:
    """Returns, for each way to compute the answers, the share that differs from the request alone."""
    expected = []
    for one in requests_of(runner, count):
        one.slot = 0
        finish(runner, [one], chunk=10_000)
        expected.append((one.output, one.logprobs))

    def share(found: list[Request]) -> float:
        wrong = sum((one.output, one.logprobs) != wanted for one, wanted in zip(found, expected, strict=True))
        return wrong / count

    shares: dict[str, float] = {}
    for batch in batches:
        found = list(requests_of(runner, count))
        for begin in range(0, count, batch):
            part = found[begin : begin + batch]
            for slot, one in enumerate(part):
                one.slot = slot
            finish(runner, part, chunk=10_000)
        shares[f"batch of {batch}"] = share(found)
    for name, begun in ((f"chunks of {CHUNK}", 0), ("preempted", ANSWER_TOKENS // 2)):
        found = list(requests_of(runner, count))
        for one, (output, logprobs) in zip(found, expected, strict=True):
            one.slot, one.output, one.logprobs = 0, output[:begun], logprobs[:begun]
            finish(runner, [one], chunk=10_000 if begun else CHUNK)
        shares[name] = share(found)
    return shares


def time_matmuls(parser: argparse.ArgumentParser, rows: str, tiles: str | None) -> None:
    if not torch.cuda.is_available():
        parser.error("no GPU is visible; --matmuls needs one")
    from invariant_matmuls import candidates, measure_matmuls  # needs Triton, which torch for CPUs does not bring

    counts = [int(count) for count in rows.split(",")]
    try:
        more = candidates([] if tiles is None else tiles.split(","))
    except ValueError:
        parser.error(f"--tiles {tiles}: expected ROWSxOUTPUTSxWARPSxSTAGES, with commas between them")
    device = torch.cuda.get_device_name()
    print(f"{device}, torch {torch.__version__}; microseconds")
    print(json.dumps({"device": device, "torch": torch.__version__, "us": measure_matmuls(counts, more)}))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="synthetic:tiny-trained", help="synthetic:<shape> or a checkpoint directory")
    parser.add_argument("--batch", default="1,8,64")
    parser.add_argument("--isl", type=int, default=64, help="prompt tokens, of the speeds")
    parser.add_argument("--osl", type=int, default=16, help="generated tokens, of the speeds")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--kv-dtype", default="auto")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--prompts", type=int, default=16, help="answers that are compared; 0: none")
    parser.add_argument("--max-num-tokens", type=int, default=8192)
    parser.add_argument("--matmuls", action="store_true", help="measure single matmuls instead; needs a GPU")
    parser.add_argument("--rows", help=f"numbers of rows, with --matmuls; default: {MATMUL_ROWS}")
    parser.add_argument("--tiles", help="more tilings, with --matmuls")
    options = parser.parse_args()
    if options.matmuls:
        time_matmuls(parser, options.rows or MATMUL_ROWS, options.tiles)
        return
    if options.rows is not None or options.tiles is not None:
        parser.error("--rows and --tiles need --matmuls")
    batches = [int(batch) for batch in options.batch.split(",")]
    checkpoint = resolve_checkpoint(options.model, on_gpu=torch.cuda.is_available())
    tokens = max(options.isl + options.osl, max(LENGTHS) + ANSWER_TOKENS)
    slots = max(*batches, options.prompts)
    runners = {
        name: create_runner(
            RunnerArgs(
                model_dir=Path(checkpoint.path), dtype=options.dtype, kv_dtype=options.kv_dtype,
                max_batch_size=slots, max_num_tokens=options.max_num_tokens, max_seq_len=tokens,
                max_tokens=slots * -(-tokens // 32) * 32, free_gpu_memory_fraction=0.45, deterministic=deterministic,
            )
        )
        for name, deterministic in MODES.items()
    }  # fmt: skip
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else f"CPU, {torch.get_num_threads()} threads"
    print(
        f"{options.model}, {device}, torch {torch.__version__}, dtype {options.dtype}, KV {options.kv_dtype}, "
        f"ISL {options.isl}, OSL {options.osl}, {options.rounds} rounds"
    )
    print(f"{'batch':>5}  {'':<7}  {'default tok/s':>13}  {'deterministic':>13}  {'cost':>6}")
    rows = []
    for batch in batches:
        found: dict[str, list[dict[str, float]]] = {name: [] for name in MODES}
        for _ in range(options.rounds):
            for name, runner in runners.items():
                row = measure(
                    runner, resolve_sampling(SamplingParams()), batch=batch, isl=options.isl, osl=options.osl,
                    max_num_tokens=options.max_num_tokens,
                )  # fmt: skip
                found[name].append(row)
        for phase in ("decode", "prefill"):
            speeds = {
                name: statistics.median(row[f"{phase}_tokens_per_s"] for row in measured)
                for name, measured in found.items()
            }
            cost = 1 - speeds["deterministic"] / speeds["default"]
            rows.append({"batch": batch, "phase": phase, "cost": cost, **speeds})
            print(
                f"{batch:>5}  {phase:<7}  {speeds['default']:>13,.0f}  {speeds['deterministic']:>13,.0f}  {cost:>6.1%}"
            )
            sys.stdout.flush()
    compared = {}
    if options.prompts:
        print(f"\nof {options.prompts} answers, those that differ in a bit from the request alone")
        several = sorted({min(batch, options.prompts) for batch in (2, 8, *batches)} - {1})
        compared = {name: differing(runner, options.prompts, several) for name, runner in runners.items()}
        print(f"{'':<14}  {'default':>13}  {'deterministic':>13}")
        for how in compared["default"]:
            print(f"{how:<14}  {compared['default'][how]:>13.0%}  {compared['deterministic'][how]:>13.0%}")
    print(json.dumps({"model": options.model, "device": device, "rows": rows, "differing": compared}))


if __name__ == "__main__":
    main()
