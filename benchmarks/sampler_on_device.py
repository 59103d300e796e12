"""What sampling costs a decode step today, and what one kernel on the device would cost in its place.

    python benchmarks/sampler_on_device.py --model synthetic:qwen3-0.6b      # one GPU, about 40 s

First the runner's whole step, greedy and sampled in three ways, wall time with the tokens on the host. Then kernels
alone, in a CUDA graph, over float and bfloat16 logits of the same vocabulary: torch's argmax (what a greedy graph ends
with today), and a Gumbel-max kernel that draws from the softmax at a temperature in one pass over the logits: the
number of each (seed, index, token) comes from Philox on the device, so that a token is a function of logits, seed and
index, whatever the batch. Its draws are checked against the softmax by chi-square.
"""

# Triton's decorator hides the signature.
# mypy: disable-error-code="misc, untyped-decorator, no-untyped-def"

from __future__ import annotations

import argparse
import statistics
import time
from pathlib import Path

import torch
import triton
import triton.language as tl

from trtx.checkpoint import resolve_checkpoint
from trtx.torch_engine.batch import Batch, ScheduledSequence
from trtx.torch_engine.llmapi.sampling import SamplingParams
from trtx.torch_engine.runner import RunnerArgs, TorchRunner, create_runner

PART = 4096  # logits of one program


@triton.jit
def gumbel_parts_kernel(logits, temperatures, seeds, indices, best, where, vocab, PART: tl.constexpr):
    """The largest ``logit / temperature + Gumbel noise`` of one part of one row, and its token."""
    row = tl.program_id(0)
    part = tl.program_id(1)
    QUARTER: tl.constexpr = PART // 4
    temperature = tl.load(temperatures + row)
    # One Philox call gives the numbers of four tokens.
    counters = tl.load(indices + row) * vocab + part * QUARTER + tl.arange(0, QUARTER)
    numbers = tl.rand4x(tl.load(seeds + row), counters)
    top = -float("inf")
    token = vocab
    for quarter in tl.static_range(4):
        tokens = part * PART + quarter * QUARTER + tl.arange(0, QUARTER)
        inside = tokens < vocab
        values = tl.load(logits + row.to(tl.int64) * vocab + tokens, mask=inside, other=-float("inf")).to(tl.float32)
        noise = -tl.log(-tl.log(tl.maximum(numbers[quarter], 1e-20)))
        scores = tl.where(temperature > 0, values / tl.maximum(temperature, 1e-6) + noise, values)
        scores = tl.where(inside, scores, -float("inf"))
        highest = tl.max(scores, axis=0)
        found = tl.min(tl.where(scores == highest, tokens, vocab), axis=0)
        token = tl.where(highest > top, found, token)
        top = tl.maximum(top, highest)
    tl.store(best + row * tl.num_programs(1) + part, top)
    tl.store(where + row * tl.num_programs(1) + part, token)


@triton.jit
def gumbel_merge_kernel(best, where, out, parts, PARTS: tl.constexpr):
    row = tl.program_id(0)
    at = tl.arange(0, PARTS)
    scores = tl.load(best + row * parts + at, mask=at < parts, other=-float("inf"))
    tokens = tl.load(where + row * parts + at, mask=at < parts, other=2**30)
    top = tl.max(scores, axis=0)
    tl.store(out + row, tl.min(tl.where(scores == top, tokens, 2**30), axis=0))


class GumbelSampler:
    def __init__(self, rows: int, vocab: int) -> None:
        self._parts = triton.cdiv(vocab, PART)
        self._best = torch.empty(rows, self._parts, device="cuda")
        self._where = torch.empty(rows, self._parts, dtype=torch.int32, device="cuda")
        self.temperatures = torch.ones(rows, device="cuda")
        self.seeds = torch.arange(rows, dtype=torch.int32, device="cuda")
        self.indices = torch.zeros(rows, dtype=torch.int32, device="cuda")
        self.out = torch.empty(rows, dtype=torch.int32, device="cuda")

    def run(self, logits: torch.Tensor) -> torch.Tensor:
        rows, vocab = logits.shape
        gumbel_parts_kernel[(rows, self._parts)](
            logits, self.temperatures, self.seeds, self.indices, self._best, self._where, vocab, PART=PART, num_warps=8
        )
        gumbel_merge_kernel[(rows,)](
            self._best, self._where, self.out, self._parts, PARTS=triton.next_power_of_2(self._parts), num_warps=1
        )
        return self.out[:rows]


def step_ms(runner: TorchRunner, batch: int, sampling: SamplingParams, context: int = 256, steps: int = 24) -> float:
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


def chi_square() -> tuple[float, int]:
    """(statistic, degrees of freedom) of 2**18 draws from 32 tokens."""
    rows, vocab = 2**18, 32
    logits = torch.randn(vocab, device="cuda").expand(rows, vocab).contiguous()
    sampler = GumbelSampler(rows, vocab)
    sampler.temperatures.fill_(0.7)
    expected = torch.softmax(logits[0].double() / 0.7, dim=0) * rows
    found = torch.bincount(sampler.run(logits).long(), minlength=vocab).double()
    return float(((found - expected) ** 2 / expected).sum()), vocab - 1


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
    many = 1 << 20
    kinds = {
        "greedy": SamplingParams(max_tokens=many, ignore_eos=True, temperature=0),
        "temperature 1": SamplingParams(max_tokens=many, ignore_eos=True, temperature=1.0),
        "top_p 0.9": SamplingParams(max_tokens=many, ignore_eos=True, temperature=1.0, top_p=0.9),
        "top_k 50": SamplingParams(max_tokens=many, ignore_eos=True, temperature=1.0, top_k=50),
    }
    print(f"{'a whole step, ms':>22} " + " ".join(f"{name:>15}" for name in kinds))
    for batch in (1, 8, 64, 256):
        with torch.inference_mode():
            print(f"{batch:>22} " + " ".join(f"{step_ms(runner, batch, kind):>15.3f}" for kind in kinds.values()))
    vocab = runner.vocab_size
    print(
        f"{'kernels alone, us':>22} {'argmax bf16':>15} {'Gumbel bf16':>15} {'Gumbel float32':>15} {'floor bf16':>15}"
    )
    for batch in (1, 8, 64, 256):
        logits = torch.randn(batch, vocab, device="cuda", dtype=torch.bfloat16)
        wide, sampler = logits.float(), GumbelSampler(batch, vocab)
        cells = [
            graph_us(lambda logits=logits: torch.argmax(logits, dim=-1)),
            graph_us(lambda logits=logits, sampler=sampler: sampler.run(logits)),
            graph_us(lambda logits=wide, sampler=sampler: sampler.run(logits)),
            logits.nbytes / 4.3e12 * 1e6,
        ]
        print(f"{batch:>22} " + " ".join(f"{us:>15.1f}" for us in cells))
    statistic, freedom = chi_square()
    print(f"chi-square {statistic:.1f} with {freedom} degrees of freedom")


if __name__ == "__main__":
    main()
