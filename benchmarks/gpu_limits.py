"""Measures the bytes and operations per second of a device, and computes the resulting limits for a model's steps.

    python benchmarks/gpu_limits.py --model synthetic:qwen3-8b --batch 1,8,64,256 --isl 512 --osl 128

The bandwidth is that of a device-to-device copy of 2 GiB, bytes read plus bytes written. The operations are those of a
bf16 matmul of two square matrices (8192 on a GPU). A decode step reads every weight except the embedding table once (a
tied table is also the head and is read), and the KV of each sequence once, with half of its output generated;
``decode_tokens_per_s`` is the number of such steps that the bandwidth allows, times the batch. Prefill takes two
operations per weight and token, and four per head, dimension and pair of a token with a previous one. trtx's kernels
are not involved. The last line of stdout is one JSON document.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable

import torch

from trtx.checkpoint import resolve_checkpoint
from trtx.checkpoint.facts import read_config
from trtx.memory.shapes import ModelShape, model_shape

REPEATS = 9
WIDTH = 2  # bytes of an element of bf16


def median_s(run: Callable[[], object], device: str) -> float:
    """Returns the median of :data:`REPEATS` runs after two warm-up runs; each run waits for the device."""
    times = []
    for _ in range(REPEATS + 2):
        began = time.perf_counter()
        run()
        if device == "cuda":
            torch.cuda.synchronize()
        times.append(time.perf_counter() - began)
    return statistics.median(times[2:])


def copy_bytes_per_s(device: str) -> float:
    size = 2 << 30 if device == "cuda" else 64 << 20
    source, target = (torch.ones(size, dtype=torch.uint8, device=device) for _ in range(2))
    return 2 * size / median_s(lambda: target.copy_(source), device)


def operations_per_s(device: str) -> float:
    side = 8192 if device == "cuda" else 256
    left, right = (torch.randn(side, side, dtype=torch.bfloat16, device=device) for _ in range(2))
    return 2 * side**3 / median_s(lambda: left @ right, device)


def read_bytes(shape: ModelShape) -> int:
    """Returns the bytes of the weights that one decode step reads, in bf16."""
    head = shape.head or shape.embedding
    return WIDTH * (head + shape.hidden + sum(sum(layer.values()) for layer in shape.layers))


def kv_bytes(shape: ModelShape) -> int:
    """Returns the KV bytes of one token in all layers, in bf16."""
    return WIDTH * 2 * len(shape.layers) * shape.kv_heads * shape.head_dim


def decode_limit(shape: ModelShape, batch: int, isl: int, osl: int, bandwidth: float) -> float:
    """Returns the maximum tokens/s of all sequences together."""
    step_bytes = read_bytes(shape) + batch * (isl + osl / 2) * kv_bytes(shape)
    return batch * bandwidth / step_bytes


def prefill_limit(shape: ModelShape, isl: int, operations: float) -> float:
    """Returns the maximum prompt tokens/s for prompts of ``isl`` tokens with causal attention."""
    products = 2 * sum(sum(layer.values()) for layer in shape.layers)
    attention = 4 * len(shape.layers) * shape.heads * shape.head_dim * isl / 2
    return operations / (products + attention)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="synthetic:qwen3-8b", help="synthetic:<shape> or a checkpoint directory")
    parser.add_argument("--batch", default="1,8,64,256")
    parser.add_argument("--isl", type=int, default=512, help="prompt tokens")
    parser.add_argument("--osl", type=int, default=128, help="generated tokens")
    options = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    checkpoint = resolve_checkpoint(options.model, on_gpu=device == "cuda")
    shape = model_shape(read_config(checkpoint.path))
    bandwidth, operations = copy_bytes_per_s(device), operations_per_s(device)
    name = torch.cuda.get_device_name() if device == "cuda" else "CPU"
    print(f"{name}, torch {torch.__version__}: copy {bandwidth / 1e12:.2f} TB/s, bf16 {operations / 1e12:,.0f} TFLOP/s")
    print(
        f"{options.model}: {read_bytes(shape) / 1e9:.2f} GB of weights a step, {kv_bytes(shape):,} bytes of KV a token"
    )
    rows = [
        {
            "batch": batch,
            "decode_tokens_per_s": decode_limit(shape, batch, options.isl, options.osl, bandwidth),
            "prefill_tokens_per_s": prefill_limit(shape, options.isl, operations),
        }
        for batch in (int(text) for text in options.batch.split(","))
    ]
    print(f"{'batch':>5}  {'decode tok/s':>12}  {'prefill tok/s':>13}")
    for row in rows:
        print(f"{row['batch']:>5}  {row['decode_tokens_per_s']:>12,.0f}  {row['prefill_tokens_per_s']:>13,.0f}")
    print(json.dumps({"model": options.model, "device": name, "copy_bytes_per_s": bandwidth,
                      "operations_per_s": operations, "rows": rows}))  # fmt: skip


if __name__ == "__main__":
    main()
