"""Measures the cost of sampling in a decode step of the runner.

    python benchmarks/sampler_on_device.py --model synthetic:qwen3-8b      # one GPU

It measures decode tokens/s of one runner (wall time until the tokens are on the host) for several ways to sample in
turn, and their ratio to greedy in the same round. ``--kernels`` measures only the sampling kernels instead, in a CUDA
graph whose launch is part of the time, over bfloat16 logits of a vocabulary of 151,936 with two spreads, compared with
torch's argmax plus a NaN check. Tokens are compared with those of the reference definition on the CPU.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from trtx.checkpoint import resolve_checkpoint
from trtx.torch_engine.llmapi.sampling import SamplingParams, resolve_sampling
from trtx.torch_engine.runner import RunnerArgs, TorchRunner, create_runner
from trtx.torch_engine.runner.sampler import Sampler
from trtx.torch_engine.runner.sampling import definition
from trtx.torch_engine.runner.sampling.rows import SamplingRow
from trtx.torch_engine.sampling_plan import SamplingPlan
from trtx.torch_engine.step import Batch, ScheduledSequence

VOCAB = 151_936
KINDS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "T 1": {"temperature": 1.0},
    "T .8, k 50, p .95": {"temperature": 0.8, "top_k": 50, "top_p": 0.95},
    "p .95": {"top_p": 0.95},
}
MORE_KINDS = KINDS | {
    "k 50": {"top_k": 50},
    "k 500, p .95": {"top_k": 500, "top_p": 0.95},
    "min_p .05": {"temperature": 1.0, "min_p": 0.05},
    "k 50, p, penalty": {"temperature": 0.8, "top_k": 50, "top_p": 0.95, "repetition_penalty": 1.1},
}
MAX_BATCH = 256


def sequences_of(count: int, plan: SamplingPlan, context: int, blocks: int) -> list[ScheduledSequence]:
    """Returns sequences with ``blocks`` blocks and ``context`` previous tokens each; their KV is arbitrary."""
    return [
        ScheduledSequence(
            slot, True, [7], context, [list(range(slot * blocks, (slot + 1) * blocks))], True, plan,
            [5] * context + [7], [], slot,
        )
        for slot in range(count)
    ]  # fmt: skip


def decode_s(runner: TorchRunner, plan: SamplingPlan, *, batch: int, context: int, steps: int) -> float:
    """Returns the wall time of ``steps`` decode steps of ``batch`` sequences, after two warm-up steps."""
    blocks = -(-(context + steps + 4) // runner.geometry.tokens_per_block)
    sequences = sequences_of(batch, plan, context, blocks)
    seconds = []
    for _ in range(steps + 2):
        began = time.perf_counter()
        results = runner.launch(Batch(sequences)).results()
        seconds.append(time.perf_counter() - began)
        for sequence, sampled in zip(sequences, results, strict=True):
            assert sampled.token_id is not None, sampled.error
            sequence.output_token_ids.append(sampled.token_id)
            sequence.start, sequence.is_first, sequence.new_token_ids = sequence.start + 1, False, [sampled.token_id]
    return sum(seconds[2:])


def measure_engine(model: str, batches: list[int], *, context: int, steps: int, rounds: int) -> None:
    checkpoint = resolve_checkpoint(model, on_gpu=True)
    began = time.perf_counter()
    runner = create_runner(
        RunnerArgs(
            model_dir=Path(checkpoint.path), max_batch_size=MAX_BATCH, max_seq_len=context + steps + 32,
            max_tokens=MAX_BATCH * (context + steps + 64), cuda_graph_batch_sizes=tuple(batches),
        )
    )  # fmt: skip
    ready_s = time.perf_counter() - began
    print(
        f"{model}, {torch.cuda.get_device_name()}, torch {torch.__version__}, ready after {ready_s:.1f} s, "
        f"context {context}, decode tokens/s and their share of greedy's"
    )
    plans = {name: resolve_sampling(SamplingParams(**asked)) for name, asked in KINDS.items()}
    print(f"{'batch':>5} {'round':>5} " + " ".join(f"{name:>19}" for name in plans))
    with torch.inference_mode():
        for batch in batches:
            for number in range(rounds):
                speeds = []
                for plan in plans.values():
                    taken = decode_s(runner, plan, batch=batch, context=context, steps=steps)
                    speeds.append(batch * steps / taken)
                cells = [f"{speed:>11,.0f} {speed / speeds[0]:>7.3f}" for speed in speeds]
                print(f"{batch:>5} {number + 1:>5} " + " ".join(cells), flush=True)
    runner.close()


def graph_us(run: Callable[[], object]) -> float:
    """Returns the median of ten replays of one call, timed by events, in microseconds."""
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    times: list[float] = []
    for _ in range(12):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]  # torch's
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1e3)
    return statistics.median(times[2:])


def argmax_us(logits: torch.Tensor) -> float:
    def run() -> torch.Tensor:
        best = logits.max(dim=-1)
        return best.indices.masked_fill_((best.values - best.values) != 0, -1)

    return graph_us(run)


def kernels_us(logits: torch.Tensor, asked: dict[str, Any]) -> float:
    """Returns the microseconds of all sampling kernels over one batch of ``logits``."""
    count = logits.shape[0]
    sampler = Sampler(count, VOCAB, logits.device)
    plan = resolve_sampling(SamplingParams(**asked))
    sequences = sequences_of(count, plan, 40, 0)
    sampler.update(sequences)
    slots = torch.arange(count, dtype=torch.int32, device=logits.device)
    positions = torch.full_like(slots, 40)
    tokens = sampler.sample(logits, slots, positions)
    checked = min(8, count)
    rows = [SamplingRow.of(plan, sequence.seed, 41, VOCAB) for sequence in sequences[:checked]]
    edits = [torch.zeros(VOCAB, dtype=torch.int32) if plan.has_penalties else None for _ in rows]
    for edit in edits:
        if edit is not None:
            edit[5], edit[7] = 40, 1
    expected = definition.sample(logits[:checked].float().cpu(), rows, edits, [0] * checked)
    assert tokens[:checked].tolist() == expected.tolist(), asked
    return graph_us(lambda: sampler.sample(logits, slots, positions, out=tokens))


def measure_kernels(batches: list[int]) -> None:
    for spread in (1.0, 4.0):
        print(f"{f'us, spread {spread:g}':>16} {'torch argmax':>14} " + " ".join(f"{kind:>17}" for kind in MORE_KINDS))
        for batch in batches:
            logits = (torch.randn(batch, VOCAB, device="cuda") * spread).bfloat16()
            cells = [argmax_us(logits)] + [kernels_us(logits, asked) for asked in MORE_KINDS.values()]
            print(f"{batch:>16} " + f"{cells[0]:>14.1f} " + " ".join(f"{us:>17.1f}" for us in cells[1:]), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="synthetic:qwen3-8b")
    parser.add_argument("--batch", default="1,8,64,256")
    parser.add_argument("--context", type=int, default=512)
    parser.add_argument("--steps", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--kernels", action="store_true", help="the kernels alone")
    options = parser.parse_args()
    batches = [int(batch) for batch in options.batch.split(",")]
    if options.kernels:
        with torch.inference_mode():
            measure_kernels(batches)
    else:
        measure_engine(
            options.model, batches, context=options.context, steps=options.steps, rounds=options.rounds
        )  # fmt: skip


if __name__ == "__main__":
    main()
