"""Measures decode and prefill speed of the embedded engine's runner alone, without scheduler, process or HTTP.

    python benchmarks/engine_decode.py --model synthetic:qwen3-8b --batch 1,8,64,256 --isl 512 --osl 128

All sequences have the same length. Times are wall times of a step until its tokens are on the host; the first step of
each phase at each batch size does not count. Decoding is greedy; with ``--temperature``, ``--top-k``, ``--top-p``,
``--min-p`` or ``--repetition-penalty`` sampling is measured as well, in the same process. The last line of stdout is
one JSON document.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from pathlib import Path

import torch

from trtx.checkpoint import resolve_checkpoint
from trtx.torch_engine.llmapi.sampling import SamplingParams, resolve_sampling
from trtx.torch_engine.ranks.children import start_ranks
from trtx.torch_engine.ranks.leader import create_ranked_runner
from trtx.torch_engine.runner import RunnerArgs, create_runner
from trtx.torch_engine.sampling_plan import SamplingPlan
from trtx.torch_engine.step import Batch, ModelRunner, ScheduledSequence


def measure(
    runner: ModelRunner, sampling: SamplingPlan, *, batch: int, isl: int, osl: int, max_num_tokens: int
) -> dict[str, float]:
    """Measures prefill, in chunks of whole prompts, and then ``osl - 1`` decode steps of all sequences."""
    per_sequence = -(-(isl + osl) // runner.geometry.tokens_per_block)
    generator = torch.Generator().manual_seed(batch)
    prompts = torch.randint(runner.vocab_size, (batch, isl), generator=generator).tolist()
    groups = range(len(runner.geometry.groups))
    order = torch.randperm(runner.num_blocks, generator=generator)[: batch * len(groups) * per_sequence].tolist()
    blocks = [order[begin : begin + per_sequence] for begin in range(0, len(order), per_sequence)]
    outputs: list[list[int]] = [[] for _ in range(batch)]
    sequences = [
        ScheduledSequence(
            slot, True, prompt, 0, [blocks[slot * len(groups) + group] for group in groups], True, sampling, prompt,
            outputs[slot], slot,
        )
        for slot, prompt in enumerate(prompts)
    ]  # fmt: skip

    def step(part: list[ScheduledSequence]) -> int:
        begin = time.perf_counter_ns()
        results = runner.launch(Batch(part)).results()
        elapsed = time.perf_counter_ns() - begin
        for sequence, sampled in zip(part, results, strict=True):
            assert sampled.token_id is not None
            outputs[sequence.slot].append(sampled.token_id)
            sequence.start, sequence.is_first = isl + len(outputs[sequence.slot]) - 1, False
            sequence.new_token_ids = [sampled.token_id]
        return elapsed

    at_once = max(1, max_num_tokens // isl)
    runner.launch(Batch(sequences[:at_once])).results()  # compiles this shape; its KV is overwritten below
    prefill_ns = sum(step(sequences[begin : begin + at_once]) for begin in range(0, batch, at_once))
    decode_ns = [step(sequences) for _ in range(osl - 1)][1:]
    return {
        "batch": batch,
        "prefill_tokens_per_s": batch * isl * 1e9 / prefill_ns,
        "decode_tokens_per_s": batch * len(decode_ns) * 1e9 / sum(decode_ns),
        "decode_step_ms": sum(decode_ns) / len(decode_ns) / 1e6,
    }


def end_with(error: Exception) -> None:
    """Ends this process, because another rank has ended and a collective would wait for it forever."""
    print(f"engine_decode.py: {error}", file=sys.stderr, flush=True)
    os._exit(1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="synthetic:qwen3-0.6b", help="synthetic:<shape> or a checkpoint directory")
    parser.add_argument("--batch", default="1,8,64,256")
    parser.add_argument("--isl", type=int, default=512, help="prompt tokens")
    parser.add_argument("--osl", type=int, default=128, help="generated tokens")
    parser.add_argument("--max-num-tokens", type=int, default=8192)
    parser.add_argument("--tokens-per-block", type=int, default=32)
    parser.add_argument("--no-cuda-graphs", action="store_true")
    parser.add_argument("--tp", type=int, default=1, help="GPUs that share each layer")
    parser.add_argument("--ep", type=int, default=1, help="of these GPUs, those that each hold other experts")
    parser.add_argument("--nccl-only", action="store_true", help="with --tp: NCCL adds small tensors too")
    parser.add_argument("--temperature", type=float)
    parser.add_argument("--top-k", type=int)
    parser.add_argument("--top-p", type=float)
    parser.add_argument("--min-p", type=float)
    parser.add_argument("--repetition-penalty", type=float)
    options = parser.parse_args()
    names = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
    asked = {name: getattr(options, name) for name in names if getattr(options, name) is not None}
    kinds = {"greedy": SamplingParams()} | ({"sampled": SamplingParams(**asked)} if asked else {})
    batches = [int(batch) for batch in options.batch.split(",")]
    checkpoint = resolve_checkpoint(options.model, on_gpu=torch.cuda.is_available())
    begin = time.perf_counter()
    blocks = max(batches) * -(-(options.isl + options.osl) // options.tokens_per_block)
    args = RunnerArgs(
        model_dir=Path(checkpoint.path), max_batch_size=max(batches), max_num_tokens=options.max_num_tokens,
        max_seq_len=options.isl + options.osl, tokens_per_block=options.tokens_per_block,
        max_tokens=blocks * options.tokens_per_block, cuda_graphs=not options.no_cuda_graphs,
        reads_peers=not options.nccl_only,
        moe_expert_parallel_size=options.ep,
    )  # fmt: skip
    runner = create_runner(args) if options.tp == 1 else create_ranked_runner(args, start_ranks(options.tp, end_with))
    start_s = time.perf_counter() - begin
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    memory_gib = runner.device_memory_bytes() / 2**30
    print(
        f"{options.model}, {device}, torch {torch.__version__}, tp {options.tp}, ep {options.ep}, ISL {options.isl}, "
        f"OSL {options.osl}"
    )
    print(f"start {start_s:.1f} s, device memory {memory_gib:.1f} GiB, KV pool {runner.pool.nbytes / 2**30:.1f} GiB")
    print(f"{'batch':>5}  {'':<7}  {'prefill tok/s':>13}  {'decode tok/s':>12}  {'step ms':>8}")
    rows = []
    for batch in batches:
        for kind, params in kinds.items():
            row = measure(
                runner, resolve_sampling(params), batch=batch, isl=options.isl, osl=options.osl,
                max_num_tokens=options.max_num_tokens,
            )  # fmt: skip
            rows.append(row | {"kind": kind})
            print(
                f"{batch:>5}  {kind:<7}  {row['prefill_tokens_per_s']:>13,.0f}  {row['decode_tokens_per_s']:>12,.0f}  "
                f"{row['decode_step_ms']:>8.3f}"
            )
            sys.stdout.flush()
    runner.close()
    print(
        json.dumps(
            {
                "model": options.model,
                "tp": options.tp,
                "ep": options.ep,
                "sampling": asked,
                "device": device,
                "start_s": start_s,
                "rows": rows,
            }
        )
    )


if __name__ == "__main__":
    main()
