"""Ways to copy scattered KV blocks from one GPU to another, alone and beside a decode step on the reading GPU.

    python benchmarks/kv_gather.py            # two GPUs with peer access, about 60 s, 20 GB on each

Qwen3-8B's KV shape, 32-token blocks, random places, one process that sees both GPUs. Figures are medians of host time
from before the launch to the end of the copy. The step beside it: the matrix products of Qwen3-8B's layers at
64 rows, in a CUDA graph, which read 14 GB of weights.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from cuda.bindings import runtime

from trtx.torch_engine.handoff.gather import gather_blocks_kernel

BLOCK_BYTES = 36 * 2 * 8 * 128 * 2 * 32
WORDS = BLOCK_BYTES // 8
BLOCKS = 1024 + 64
HERE, THERE = "cuda:0", "cuda:1"
SIZES = (32, 256, 1024)  # blocks: 1,024, 8,192 and 32,768 tokens


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=12)
    options = parser.parse_args()
    torch.cuda.set_device(HERE)
    source = torch.empty(BLOCKS, WORDS, dtype=torch.int64, device=THERE).random_()
    target = torch.zeros(BLOCKS, WORDS, dtype=torch.int64, device=HERE)
    target[:1].copy_(source[:1])  # enables peer access
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()

    def timed(run: Callable[[], Any]) -> float:
        seconds = []
        for _ in range(options.repeats + 2):
            torch.cuda.synchronize(HERE)
            torch.cuda.synchronize(THERE)
            began = time.perf_counter()
            run()
            torch.cuda.synchronize(HERE)
            torch.cuda.synchronize(THERE)
            seconds.append(time.perf_counter() - began)
        return statistics.median(seconds[2:])

    def gather(count: int, tile: int, warps: int, programs: int) -> Callable[[], None]:
        remote, local = (random.sample(range(BLOCKS), count) for _ in range(2))
        ids = torch.tensor(remote + local, dtype=torch.int32, device=HERE)
        kernel = gather_blocks_kernel.warmup(
            torch.int64, torch.int64, torch.int32, 2, BLOCK_WORDS=WORDS, TILE=tile, num_warps=warps, grid=(1,)
        )
        grid = (min(programs, count * -(-WORDS // tile)), 1, 1)
        addresses = (source.data_ptr(), target.data_ptr(), ids.data_ptr())

        def run() -> None:
            kernel[grid](*addresses, count, WORDS, tile, stream=stream.cuda_stream)

        run.ids = ids  # type: ignore[attr-defined]
        run.check = lambda: torch.equal(target[local[-1]].cpu(), source[remote[-1]].cpu())  # type: ignore[attr-defined]
        return run

    def batch(count: int) -> Callable[[], None]:
        remote, local = (random.sample(range(BLOCKS), count) for _ in range(2))
        sources = [source[block].data_ptr() for block in remote]
        targets = [target[block].data_ptr() for block in local]
        order = runtime.cudaMemcpyAttributes()
        order.srcAccessOrder = runtime.cudaMemcpySrcAccessOrder.cudaMemcpySrcAccessOrderStream

        def run() -> None:
            result = runtime.cudaMemcpyBatchAsync(
                targets, sources, [BLOCK_BYTES] * count, count, [order], [0], 1, stream.cuda_stream
            )
            assert not int(result[0]), result

        return run

    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, GB/s of 1,024 / 8,192 / 32,768 tokens")
    peer = [n * BLOCK_BYTES / timed(lambda n=n: target[:n].copy_(source[:n], non_blocking=True)) / 1e9 for n in SIZES]
    line("peer copy", peer, peer)
    try:
        line("cudaMemcpyBatchAsync", [n * BLOCK_BYTES / timed(batch(n)) / 1e9 for n in SIZES], peer)
    except Exception as error:
        print("cudaMemcpyBatchAsync", repr(error)[:150])
    for tile, warps in ((1024, 4), (2048, 4), (2048, 8), (4096, 8), (8192, 8)):
        for programs in (132, 264, 528, 1056, 1 << 30):
            found = []
            for n in SIZES:
                run = gather(n, tile, warps, programs)
                found.append(n * BLOCK_BYTES / timed(run) / 1e9)
                assert run.check()  # type: ignore[attr-defined]
            line(f"gather {tile} x {warps} warps, {programs if programs < 1 << 30 else 'all'}", found, peer)
    beside(gather, batch, stream)


def line(name: str, figures: list[float], peer: list[float]) -> None:
    print(f"{name:>36} " + " ".join(f"{a:>7.1f} {a / b:>6.1%}" for a, b in zip(figures, peer, strict=True)), flush=True)


def beside(gather: Callable[..., Any], batch: Callable[..., Any], stream: torch.cuda.Stream) -> None:
    shapes = [(4096, 6144), (4096, 4096), (4096, 24576), (12288, 4096)]
    weights = [[torch.randn(b, a, device=HERE, dtype=torch.bfloat16) for a, b in shapes] for _ in range(36)]
    inputs = [torch.randn(64, a, device=HERE, dtype=torch.bfloat16) for a, _ in shapes]

    def step() -> None:
        for layer in weights:
            for x, weight in zip(inputs, layer, strict=True):
                torch.mm(x, weight.t())

    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]

    def step_ms(copy: Callable[[], None] | None) -> tuple[float, float]:
        """(a step, a copy of 8,192 tokens) in ms, both running all the time."""
        steps, copies = [], []
        for _ in range(12):
            ends = [torch.cuda.Event(enable_timing=True) for _ in range(5)]
            if copy is not None:
                ends[0].record(stream)
                for end in ends[1:]:
                    copy()
                    end.record(stream)
            events[0].record()
            graph.replay()
            events[1].record()
            torch.cuda.synchronize()
            steps.append(events[0].elapsed_time(events[1]))
            copies.append(ends[0].elapsed_time(ends[4]) / 4 if copy is not None else 0.0)
        return statistics.median(steps[2:]), statistics.median(copies[2:])

    print(f"{'a step beside copies of 8,192 tokens':>36} {'step ms':>8} {'copy ms':>8}")
    print(f"{'no copy':>36} {step_ms(None)[0]:>8.2f}")
    for tile, warps, programs in ((2048, 8, 132), (2048, 8, 264), (2048, 8, 528), (4096, 8, 132), (2048, 8, 1 << 30)):
        step_time, copy_time = step_ms(gather(256, tile, warps, programs))
        print(f"{f'gather {tile} x {warps}, {programs}':>36} {step_time:>8.2f} {copy_time:>8.2f}", flush=True)
    try:
        step_time, copy_time = step_ms(batch(256))
        print(f"{'cudaMemcpyBatchAsync':>36} {step_time:>8.2f} {copy_time:>8.2f}", flush=True)
    except Exception as error:
        print("cudaMemcpyBatchAsync", repr(error)[:150])


if __name__ == "__main__":
    main()
