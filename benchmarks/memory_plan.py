"""Compares the memory plan with the GPU memory that the embedded engine's runner really uses.

    python benchmarks/memory_plan.py --model synthetic:qwen3-0.6b --model synthetic:qwen3-8b

For each model, a separate process on the first visible GPU plans the model's shipped agg config, loads the weights,
creates the runner (pool, CUDA graphs) and runs the forwards that need the most memory: a step of max_num_tokens prompt
tokens, and steps of max_batch_size sequences, greedy and sampled. "left" is the free GPU memory afterwards; the plan's
value is the part that its fraction leaves free. The script prints one Markdown table per model, in GiB. It needs a GPU
that no other process uses.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # only the measuring processes import these at run time
    from trtx.torch_engine.runner import TorchRunner
    from trtx.torch_engine.step import Batch

GIB = 1 << 30
_PROMPT = 512  # tokens per prompt in the largest step


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", action="append", help="synthetic:<shape> or a checkpoint directory; repeatable")
    parser.add_argument("--set", action="append", default=[], help="engine config fields, as trtx serve takes them")
    parser.add_argument("--measure", default=None, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.measure:
        print(json.dumps(_measure(options.measure, tuple(options.set))))
        return 0
    failed = 0
    for model in options.model or ["synthetic:qwen3-0.6b"]:
        argv = [sys.executable, __file__, "--measure", model, *(part for one in options.set for part in ("--set", one))]
        done = subprocess.run(argv, stdout=subprocess.PIPE, text=True)
        if done.returncode:
            failed = 1
            print(f"{model}: the measurement exited {done.returncode}")
            continue
        print("\n".join(_table(model, json.loads(done.stdout.splitlines()[-1]))), flush=True)
    return failed


def _table(model: str, seen: dict[str, Any]) -> Iterator[str]:
    planned, actual = seen["planned"], seen["actual"]
    yield f"\n{model}, {seen['gpu']}, torch {seen['torch']}: {seen['values']}\n"
    yield "| | planned | actual | actual - planned |"
    yield "|---|--:|--:|--:|"
    for name in planned:
        if name in ("blocks", "tokens"):
            yield f"| {name} | {planned[name]:,} | {actual[name]:,} | {actual[name] / planned[name] - 1:+.2%} |"
        else:
            here, there = planned[name] / GIB, actual[name] / GIB
            yield f"| {name}, GiB | {here:.3f} | {there:.3f} | {there - here:+.3f} |"


def _measure(model: str, overrides: tuple[str, ...]) -> dict[str, Any]:
    import torch

    from trtx.checkpoint import resolve_checkpoint
    from trtx.checkpoint.model_config import read_model_config
    from trtx.config import config_family, load_engine_config
    from trtx.launch.machine import probe
    from trtx.memory import MemoryDevice, plan_memory
    from trtx.torch_engine.runner import RunnerArgs, create_runner
    from trtx.torch_engine.runner.args import products_on
    from trtx.torch_engine.runner.weights import load_weights

    machine = probe()
    if not machine.gpus:
        raise SystemExit("no GPU is visible; this measurement needs one")
    gpu = machine.gpus[0]
    checkpoint = resolve_checkpoint(model, on_gpu=True)
    config = load_engine_config(
        "agg", family=config_family(checkpoint.architecture, on_gpu=True), path=None, overrides=overrides,
        engine="torch", model_dir=checkpoint.path,
    )  # fmt: skip
    values = config.values
    plan = plan_memory(
        checkpoint.path,
        "agg",
        values,
        engine="torch",
        device=MemoryDevice(gpu.name, gpu.memory_bytes, gpu.memory_free_bytes),
    )

    device = torch.device("cuda", 0)
    torch.zeros(1, device=device)
    context = gpu.memory_bytes - plan.others_bytes - torch.cuda.mem_get_info(device)[0] - torch.cuda.memory_reserved()
    shape = read_model_config(checkpoint.path)
    dtype = getattr(torch, shape.dtype)
    before = torch.cuda.memory_allocated()
    scaled = products_on(device, shape.dtype)
    weights = load_weights(checkpoint.path, shape, device=device, dtype=dtype, scaled_products=scaled)
    weight_bytes = torch.cuda.memory_allocated() - before
    del weights
    torch.cuda.empty_cache()

    kv = values.get("kv_cache_config") or {}
    runner = create_runner(
        RunnerArgs(
            model_dir=checkpoint.path, max_batch_size=plan.max_batch_size, tokens_per_block=plan.tokens_per_block,
            max_num_tokens=values.get("max_num_tokens", 8192), max_seq_len=values.get("max_seq_len"),
            max_tokens=kv.get("max_tokens"), free_gpu_memory_fraction=plan.fraction, device="cuda:0",
        )
    )  # fmt: skip
    settled = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    _fullest_steps(runner, plan.max_batch_size, values.get("max_num_tokens", 8192))
    activations = torch.cuda.max_memory_allocated() - settled
    pool = runner.pool.untyped_storage().nbytes()
    free = torch.cuda.mem_get_info(device)[0]
    used = gpu.memory_bytes - plan.others_bytes - free
    reserved = plan.others_bytes + plan.context_bytes + plan.weight_bytes + plan.activation_bytes + plan.graph_bytes
    return {
        "gpu": gpu.name,
        "torch": torch.__version__,
        "values": f"max_batch_size {plan.max_batch_size}, max_num_tokens {values.get('max_num_tokens', 8192)}, "
        f"free_gpu_memory_fraction {plan.fraction:g}",
        "planned": {
            "weights": plan.weight_bytes,
            "activations": plan.activation_bytes,
            "CUDA graphs, workspaces, fragments": plan.graph_bytes,
            "CUDA context and driver": plan.context_bytes,
            "KV pool": plan.pool_bytes,
            "left": plan.total_bytes - reserved - plan.pool_bytes,
            "blocks": plan.capacity_blocks,
            "tokens": plan.capacity_tokens,
        },
        "actual": {
            "weights": weight_bytes,
            "activations": activations,
            "CUDA graphs, workspaces, fragments": used - context - weight_bytes - pool - activations,
            "CUDA context and driver": context,
            "KV pool": pool,
            "left": free,
            "blocks": runner.num_blocks,
            "tokens": runner.num_blocks * plan.tokens_per_block,
        },
    }


def _fullest_steps(runner: TorchRunner, max_batch_size: int, max_num_tokens: int) -> None:
    """Runs, for each way to sample, prompts for every slot with ``max_num_tokens`` per step, then two decode steps."""
    from trtx.torch_engine.sampling_plan import SamplingPlan
    from trtx.torch_engine.step import Batch, ScheduledSequence

    length = min(_PROMPT, max_num_tokens)
    blocks = -(-(length + 4) // runner.geometry.tokens_per_block)
    rows = min(max_batch_size, runner.num_blocks // blocks)
    for sampling in (
        SamplingPlan(max_tokens=4),
        SamplingPlan(is_greedy=False, max_tokens=4, temperature=0.8, top_p=0.9, top_k=50),
    ):
        sequences = [
            ScheduledSequence(
                slot, True, [slot + 1] * length, 0, [list(range(slot * blocks, (slot + 1) * blocks))], True, sampling,
                [slot + 1] * length, [], slot,
            )
            for slot in range(rows)
        ]  # fmt: skip
        at_once = max(1, max_num_tokens // length)
        for begin in range(0, rows, at_once):
            _step(runner, Batch(sequences[begin : begin + at_once]), length)
        for _ in range(2):
            _step(runner, Batch(sequences), length)
    runner.synchronize()


def _step(runner: TorchRunner, batch: Batch, length: int) -> None:
    for sequence, sampled in zip(batch.sequences, runner.launch(batch).results(), strict=True):
        assert sampled.token_id is not None, sampled.error
        sequence.output_token_ids.append(sampled.token_id)
        sequence.start, sequence.is_first = length + len(sequence.output_token_ids) - 1, False
        sequence.new_token_ids = [sampled.token_id]


if __name__ == "__main__":
    sys.exit(main())
