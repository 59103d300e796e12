"""What sampling costs a decode step with the runner's sampler, and with the one of ``device_sampling`` in its place.

    python benchmarks/sampler_on_device.py --model synthetic:qwen3-8b      # one GPU

First whole steps of one runner, greedy and sampled in several ways, wall time with the tokens on the host, with the one
sampler and with the other. Then the kernels alone, behind one another in a CUDA graph whose launch is part of the time,
over bfloat16 logits of a vocabulary of 151,936 with two spreads, beside torch's argmax; each table's tokens are
compared with the definition's on the CPU.
"""

from __future__ import annotations

import argparse
import statistics
import time
from pathlib import Path
from typing import Any

import torch
from device_sampling.definition import replace_tokens
from device_sampling.kernels import TritonSampling
from device_sampling.rows import SamplingRow
from device_sampling.sampler import DeviceSampler

from trtx.checkpoint import resolve_checkpoint
from trtx.torch_engine.batch import Batch, ScheduledSequence
from trtx.torch_engine.llmapi.sampling import SamplingParams, resolve_sampling
from trtx.torch_engine.runner import RunnerArgs, TorchRunner, create_runner
from trtx.torch_engine.runner.sampler import best_tokens
from trtx.torch_engine.sampling_plan import SamplingPlan

VOCAB = 151_936
KINDS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "T": {"temperature": 0.8},
    "T, k 50, p .95": {"temperature": 0.8, "top_k": 50, "top_p": 0.95},
    "top_k 50": {"top_k": 50},
    "top_p .95": {"top_p": 0.95},
    "top_k 500": {"top_k": 500},
    "k 500, p .95": {"top_k": 500, "top_p": 0.95},
    "min_p .05": {"temperature": 1.0, "min_p": 0.05},
    "with penalty": {"temperature": 0.8, "top_k": 50, "top_p": 0.95, "repetition_penalty": 1.1},
}


def step_ms(runner: TorchRunner, batch: int, sampling: SamplingPlan, context: int = 256, steps: int = 24) -> float:
    """Median wall time of a decode step of ``batch`` sequences; their KV is whatever the pool holds."""
    per_sequence = -(-(context + steps + 8) // runner.geometry.tokens_per_block)
    sequences = [
        ScheduledSequence(
            slot, True, [7], context, list(range(slot * per_sequence, (slot + 1) * per_sequence)), True, sampling,
            [5] * context, [], slot,
        )
        for slot in range(batch)
    ]  # fmt: skip
    seconds = []
    for _ in range(steps):
        began = time.perf_counter()
        results = runner.execute(Batch(sequences))
        seconds.append(time.perf_counter() - began)
        for sequence, sampled in zip(sequences, results, strict=True):
            assert sampled.token_id is not None
            sequence.output_token_ids.append(sampled.token_id)
            sequence.start, sequence.is_first, sequence.new_token_ids = sequence.start + 1, False, [sampled.token_id]
    return statistics.median(seconds[4:]) * 1e3


def graph_us(run: object) -> float:
    """Median of ten replays of one call, by events."""
    assert callable(run)
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    times = []
    for _ in range(12):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1e3)
    return statistics.median(times[2:])


def kernels_us(logits: torch.Tensor, asked: dict[str, Any]) -> float:
    """Of all kernels that one batch of ``logits`` launches, and a copy of its greedy tokens."""
    count, device = logits.shape[0], logits.device
    rows = [SamplingRow.of(resolve_sampling(SamplingParams(**asked)), seed, VOCAB) for seed in range(count)]
    has_edits = "repetition_penalty" in asked
    edits = [torch.randint(3, (VOCAB,), dtype=torch.int32, device=device) if has_edits else None for _ in range(count)]
    before = [None if edit is None else edit.cpu() for edit in edits]
    fields = [row.fields(edit) for row, edit in zip(rows, edits, strict=True)]
    on_device = torch.tensor(fields, dtype=torch.int64, device=device)
    slots = torch.arange(count, dtype=torch.int32, device=device)
    greedy, kernels = best_tokens(logits), TritonSampling(count, VOCAB, device)
    tokens = greedy.clone()

    def run() -> None:
        tokens.copy_(greedy)
        kernels.replace_tokens(
            tokens, logits, slots, slots, on_device, has_edits=has_edits, is_sampled=any(r.is_sampled for r in rows),
            is_restricted=any(r.is_restricted for r in rows),
        )  # fmt: skip

    run()
    checked = min(8, count)
    expected = torch.empty(checked, dtype=torch.int64)
    replace_tokens(expected, logits[:checked].float().cpu(), rows[:checked], before[:checked], range(checked))
    assert tokens[:checked].tolist() == expected.tolist(), asked
    return graph_us(run)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="synthetic:qwen3-0.6b")
    options = parser.parse_args()
    checkpoint = resolve_checkpoint(options.model, on_gpu=True)
    runner = create_runner(
        RunnerArgs(
            model_dir=Path(checkpoint.path), max_batch_size=256, max_seq_len=512, max_tokens=256 * 320,
            cuda_graph_batch_sizes=(1, 8, 64, 256),
        )
    )  # fmt: skip
    print(f"{options.model}, {torch.cuda.get_device_name()}, torch {torch.__version__}, context 256")
    plans = {
        name: resolve_sampling(SamplingParams(max_tokens=1 << 20, ignore_eos=True, **asked))
        for name, asked in KINDS.items()
    }
    samplers = {
        "the runner's": runner._sampler,
        "device_sampling": DeviceSampler(256, runner.vocab_size, runner.pool.device),
    }
    for name, sampler in samplers.items():
        runner._sampler = sampler
        print(f"{'step ms, ' + name:>24} " + " ".join(f"{kind:>14}" for kind in plans))
        for batch in (1, 8, 64, 256):
            with torch.inference_mode():
                print(f"{batch:>24} " + " ".join(f"{step_ms(runner, batch, plan):>14.3f}" for plan in plans.values()))
    runner.close()
    for spread in (1.0, 4.0):
        print(f"{f'kernels us, spread {spread:g}':>24} {'argmax':>14} " + " ".join(f"{kind:>14}" for kind in KINDS))
        for batch in (1, 8, 64, 256):
            logits = (torch.randn(batch, VOCAB, device="cuda") * spread).bfloat16()
            cells = [graph_us(lambda logits=logits: best_tokens(logits))]
            cells += [kernels_us(logits, asked) for asked in KINDS.values()]
            print(f"{batch:>24} " + " ".join(f"{us:>14.1f}" for us in cells))


if __name__ == "__main__":
    main()
