"""Measures decode attention over sequences of different lengths, with the kernels' fixed split and with other numbers.

    python benchmarks/decode_splits.py            # one GPU, 30 GB of it, about 60 s

It uses Qwen3-8B's shape and the production kernels in a CUDA graph over 36 layers. Times are ms per step for attention
alone, the median of nine. "one long" is one sequence of 32,768 tokens among short ones of 640. A split is an equal part
of its own sequence, so with many splits the parts of a short sequence are small and their merge dominates.
"""

from __future__ import annotations

import argparse
import statistics
from typing import Any

import torch
from kv_layout import CONFIG, DIM, HEADS, KV_HEADS, TOKENS_PER_BLOCK

from trtx.torch_engine.runner.kernels import Attention, KvCache, PassInputs
from trtx.torch_engine.runner.rope import rotary_table
from trtx.torch_engine.runner.triton_kernels import TritonKernels

LAYERS, SHORT, LONG = 36, 640, 32768
SPLITS = (1, 2, 4, 8, 16, 32)


def step_ms(pool: torch.Tensor, lengths: list[int], splits: int | None) -> float:
    """Returns the time of a step. ``splits``: None: the kernels' own choice."""
    width = -(-max(lengths) // TOKENS_PER_BLOCK)
    order = torch.randperm(pool.shape[0], device="cuda").int()
    table = torch.zeros(len(lengths) + 1, width, dtype=torch.int32, device="cuda")
    taken = 0
    for row, length in enumerate(lengths):
        count = -(-length // TOKENS_PER_BLOCK)
        table[row, :count] = order[taken : taken + count]
        taken += count
    processors = torch.cuda.get_device_properties(0).multi_processor_count
    if splits is not None:  # the kernels plan about two programs per processor, so request that many processors
        processors = splits * len(lengths) * KV_HEADS // 2
    rotary = rotary_table(CONFIG.rope, DIM, TOKENS_PER_BLOCK, torch.device("cuda"))
    kernels = TritonKernels(CONFIG, KvCache.of(pool, table), rotary, processors, Attention.BY_ROWS)
    ints: dict[str, Any] = {"dtype": torch.int32, "device": "cuda"}
    slots = torch.arange(len(lengths), **ints)
    inputs = PassInputs(slots, torch.tensor([length - 1 for length in lengths], **ints), slots)
    q = torch.randn(len(lengths), HEADS, DIM, device="cuda", dtype=torch.bfloat16)

    def run() -> None:
        for layer in range(LAYERS):
            kernels.attend(q, layer, inputs)

    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    times: list[float] = []
    for _ in range(11):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]  # torch's
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end))
    return statistics.median(times[2:])


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.parse_args()
    blocks = (256 * SHORT + LONG) // TOKENS_PER_BLOCK
    pool = torch.empty(blocks, KV_HEADS, LAYERS, 2, TOKENS_PER_BLOCK, DIM, dtype=torch.bfloat16, device="cuda")
    for part in pool.split(128):  # type: ignore[no-untyped-call]  # torch's
        part.normal_()
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, attention of a decode step, ms")
    print(f"{'':>24} {'today':>8} " + " ".join(f"{f'{splits} splits':>10}" for splits in SPLITS))
    for rows in (1, 8, 32, 64, 256):
        for name, lengths in (("even", [SHORT] * rows), ("one long", [LONG] + [SHORT] * (rows - 1))):
            cells = [step_ms(pool, lengths, splits) for splits in (None, *SPLITS)]
            print(
                f"{rows:>8} rows, {name:>9} {cells[0]:>8.3f} " + " ".join(f"{ms:>10.3f}" for ms in cells[1:]),
                flush=True,
            )


if __name__ == "__main__":
    main()
