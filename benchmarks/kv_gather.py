"""Compares ways to copy scattered KV blocks between GPUs, alone and during a decode step on the reading GPU.

    python benchmarks/kv_gather.py            # two GPUs with peer access, about 60 s, 20 GB on each

It uses Qwen3-8B's KV shape and 32-token blocks in random places, in one process that sees both GPUs. Numbers are
medians of host time from before the launch to the end of the copy. The concurrent step consists of the matmuls of
Qwen3-8B's layers at 64 rows in a CUDA graph, which read 14 GB of weights, with a small copy from the host before and
one to the host after them, as in a real step; these copies use a copy engine, too.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from cuda.bindings import runtime

from trtx.torch_engine.handoff.cuda_driver import Addresses, CudaDriver
from trtx.torch_engine.handoff.gather import gather_blocks_kernel

BLOCK_BYTES = 36 * 2 * 8 * 128 * 2 * 32
WORDS = BLOCK_BYTES // 8
BLOCKS = 1024 + 64
HERE, THERE = "cuda:0", "cuda:1"
SIZES = (32, 256, 1024)  # blocks: 1,024, 8,192 and 32,768 tokens


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=12)
    parser.add_argument("--idleness", action="store_true", help="only the last table")
    options = parser.parse_args()
    torch.cuda.set_device(HERE)
    source = torch.empty(BLOCKS, WORDS, dtype=torch.int64, device=THERE).random_()
    target = torch.zeros(BLOCKS, WORDS, dtype=torch.int64, device=HERE)
    runtime.cudaDeviceEnablePeerAccess(1, 0)
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]  # torch's

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

    driver = CudaDriver()
    streams = [torch.cuda.Stream() for _ in range(8)]  # type: ignore[no-untyped-call]  # torch's

    def places(count: int) -> tuple[Addresses, Addresses, Callable[[], bool]]:
        remote, local = (random.sample(range(BLOCKS), count) for _ in range(2))
        sources = np.array(remote, np.uint64) * BLOCK_BYTES + source.data_ptr()
        targets = np.array(local, np.uint64) * BLOCK_BYTES + target.data_ptr()
        return targets, sources, lambda: torch.equal(target[local[-1]].cpu(), source[remote[-1]].cpu())

    def batch(count: int, ways: int, parts: int = 1) -> Callable[[], None]:
        """Copies with cuMemcpyBatchAsync: blocks are distributed over ``ways`` streams, each block in ``parts``."""
        targets, sources, check = places(count)
        if parts > 1:
            steps = np.arange(parts, dtype=np.uint64) * (BLOCK_BYTES // parts)
            targets, sources = ((a[:, None] + steps).reshape(-1) for a in (targets, sources))
        sizes = np.full(len(targets), BLOCK_BYTES // parts, np.uint64)
        shares = [
            (np.ascontiguousarray(targets[i::ways]), np.ascontiguousarray(sources[i::ways]), sizes[i::ways].copy())
            for i in range(ways)
        ]

        def run() -> None:
            for other, (t, s, n) in zip([stream, *streams][:ways], shares, strict=True):
                if ways > 1 and other is not stream:
                    other.wait_stream(stream)
                driver.copy_batch(t, s, n, other.cuda_stream)
            for other in streams[: ways - 1]:
                stream.wait_stream(other)

        run.check = check  # type: ignore[attr-defined]
        return run

    def cases(count: int) -> dict[str, Callable[[], None]]:
        found: dict[str, Callable[[], None]] = {}
        for ways in (1, 2, 3, 4, 8):
            found[f"batch, {ways} streams"] = batch(count, ways)
        found["batch, 4 streams, block in 4 parts"] = batch(count, 4, 4)
        for tile, warps in ((2048, 4), (8192, 8)):
            for programs in (16, 32, 132, 1056):
                found[f"gather {tile} x {warps} warps, {programs}"] = gather(count, tile, warps, programs)
        return found

    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, GB/s of 1,024 / 8,192 / 32,768 tokens")

    def peer_copy(n: int) -> float:
        return n * BLOCK_BYTES / timed(lambda: target[:n].copy_(source[:n], non_blocking=True)) / 1e9

    idle_runs = {"batch, 1 stream": batch(32, 1), "gather 8192 x 8 warps, 32": gather(32, 8192, 8, 32)}
    if options.idleness:
        after_idleness(stream, source, target, idle_runs)
        return
    before = [peer_copy(n) for n in SIZES]
    table: dict[str, list[float]] = {}
    step = Step(stream)
    beside: dict[str, tuple[float, float]] = {"no copy": step.beside(None)}
    for n in SIZES:
        for name, run in cases(n).items():
            table.setdefault(name, []).append(n * BLOCK_BYTES / timed(run) / 1e9)
            assert run.check(), name  # type: ignore[attr-defined]
            if n == 256:
                beside[name] = step.beside(run)
    after = [peer_copy(n) for n in SIZES]
    peer = [statistics.mean(pair) for pair in zip(before, after, strict=True)]
    line("peer copy, before", before, peer)
    line("peer copy, after", after, peer)
    for name, figures in table.items():
        line(name, figures, peer, beside[name])
    print(f"{'no copy':>36} {'':>44} {beside['no copy'][0]:>8.2f}")
    after_idleness(stream, source, target, idle_runs)


def line(name: str, figures: list[float], peer: list[float], beside: tuple[float, float] | None = None) -> None:
    text = " ".join(f"{a:>7.1f} {a / b:>6.1%}" for a, b in zip(figures, peer, strict=True))
    print(f"{name:>36} {text}" + (f" {beside[0]:>8.2f} {beside[1]:>8.2f}" if beside else ""), flush=True)


class Step:
    """The matmuls of Qwen3-8B's layers at 64 rows, between a small copy from the host and one back to it."""

    def __init__(self, stream: torch.cuda.Stream) -> None:
        shapes = [(4096, 6144), (4096, 4096), (4096, 24576), (12288, 4096)]
        weights = [[torch.randn(b, a, device=HERE, dtype=torch.bfloat16) for a, b in shapes] for _ in range(36)]
        inputs = [torch.randn(64, a, device=HERE, dtype=torch.bfloat16) for a, _ in shapes]
        self._kept = weights, inputs
        self._stream = stream
        self._host = torch.zeros(768, dtype=torch.int32, pin_memory=True)
        self._device = torch.zeros(768, dtype=torch.int32, device=HERE)

        def run() -> None:
            for layer in weights:
                for x, weight in zip(inputs, layer, strict=True):
                    torch.mm(x, weight.t())

        run()
        torch.cuda.synchronize()
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph):
            run()

    def beside(self, copy: Callable[[], None] | None) -> tuple[float, float]:
        """Returns the time of a step with copies running during all of it, and the time of such a copy, in ms."""
        steps, copies = [], []
        for _ in range(8):
            ends = [torch.cuda.Event(enable_timing=True) for _ in range(6)]  # type: ignore[no-untyped-call]  # torch's
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]  # torch's
            if copy is not None:
                ends[0].record(self._stream)
                for each in ends[1:]:
                    copy()
                    each.record(self._stream)
            begin.record()
            self._device.copy_(self._host, non_blocking=True)
            self._graph.replay()
            self._host.copy_(self._device, non_blocking=True)
            end.record()
            torch.cuda.synchronize()
            steps.append(begin.elapsed_time(end))
            copies.append(ends[0].elapsed_time(ends[5]) / 5 if copy is not None else 0.0)
        return statistics.median(steps[2:]), statistics.median(copies[2:])


def after_idleness(
    stream: torch.cuda.Stream, source: torch.Tensor, target: torch.Tensor, runs: dict[str, Callable[[], None]]
) -> None:
    """Measures a copy of 1,024 tokens after a pause: host time from before the launch to the end, and device time."""
    here, there = (torch.zeros(64, device=device) for device in (HERE, THERE))
    few = slice(0, 1), slice(0, 8)
    from_there = target[few].clone()

    def nothing() -> None: ...

    def reader_busy() -> None:
        here.add_(1)

    def exporter_busy() -> None:
        there.add_(1)

    def both_busy() -> None:
        reader_busy()
        exporter_busy()

    def read_few() -> None:
        from_there.copy_(source[few], non_blocking=True)

    for name, run in runs.items():
        print(f"{name}: 1,024 tokens after a pause, host ms (device ms)")
        for label, meanwhile, touch, pauses in (
            ("all idle", nothing, nothing, (0, 1, 5, 25, 100, 1000)),
            ("a kernel a ms on the reader", reader_busy, nothing, (25, 100)),
            ("a kernel a ms on the exporter", exporter_busy, nothing, (25, 100)),
            ("a kernel a ms on both", both_busy, nothing, (25, 100)),
            ("64 bytes read each ms", read_few, nothing, (25, 100)),
            ("64 bytes read once, 1 ms before", nothing, read_few, (25, 100)),
        ):
            cells = []
            for pause_ms in pauses:
                hosts, devices = [], []
                for _ in range(3 if pause_ms == 1000 else 9):
                    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]  # torch's
                    until = time.perf_counter() + pause_ms / 1e3
                    while (left := until - time.perf_counter()) > 0:
                        meanwhile()
                        time.sleep(min(left, 0.001))
                    touch()
                    if touch is not nothing:
                        time.sleep(0.001)
                    began = time.perf_counter()
                    begin.record(stream)
                    run()
                    end.record(stream)
                    while not end.query():  # type: ignore[no-untyped-call]  # torch's
                        pass
                    hosts.append(time.perf_counter() - began)
                    devices.append(begin.elapsed_time(end))
                cells.append(
                    f"{pause_ms:>5} ms: {statistics.median(hosts) * 1e3:.3f} ({statistics.median(devices):.3f})"
                )
            print(f"{label:>36} " + "  ".join(cells), flush=True)


if __name__ == "__main__":
    main()
