"""Measures one all-reduce of the embedded engine's ranks: through memory that the GPUs share, and through NCCL.

    python benchmarks/all_reduce.py --ranks 2 --hidden 5120 --rows 1,8,64,256

Each figure is the time of one of 200 all-reduces of bf16 ``[rows, hidden]`` in one CUDA graph, the best of ten replays.
``GB/s`` is what each GPU receives in that time. The sums are compared with those of rank 0's inputs, drawn on every
rank from the same seeds. The last line of stdout is one JSON document.
"""

# torch leaves its events untyped.
# mypy: disable-error-code="no-untyped-call"

from __future__ import annotations

import argparse
import json
import multiprocessing
import tempfile
from pathlib import Path

import torch

from trtx.torch_engine.ranks.all_reduce import most_bytes
from trtx.torch_engine.ranks.group import DistributedGroup

CALLS = 200
REPLAYS = 10


def measure(group: DistributedGroup, rows: int, hidden: int, device: torch.device) -> float:
    """Returns the microseconds of one all-reduce, after a check of its result."""
    parts = [
        torch.randn(rows, hidden, generator=torch.Generator().manual_seed(rank)).to(device, torch.bfloat16)
        for rank in range(group.size)
    ]
    found, expected = group.add(parts[group.rank].clone()), sum(part.float() for part in parts)
    torch.testing.assert_close(found.float(), expected, atol=0.1, rtol=0.02)
    partial = torch.zeros(rows, hidden, dtype=torch.bfloat16, device=device)
    group.add(partial)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(CALLS):
            group.add(partial)
    best = float("inf")
    for _ in range(REPLAYS):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        best = min(best, begin.elapsed_time(end) * 1e3 / CALLS)
    return best


@torch.inference_mode()
def run(rank: int, ranks: int, meeting: str, hidden: int, rows: list[int]) -> None:
    device = torch.device("cuda", rank)
    group = DistributedGroup.join_at(Path(meeting), rank, ranks, device, ordered=False)
    found = []
    for count in rows:
        size = count * hidden * 2
        shared_us = measure(group, count, hidden, device) if size <= most_bytes(ranks) else None
        peer_sums, group._peer_sums = group._peer_sums, None
        nccl_us = measure(group, count, hidden, device)
        group._peer_sums = peer_sums
        found.append({"rows": count, "bytes": size, "shared_us": shared_us, "nccl_us": nccl_us})
        if rank == 0:
            best = min(time for time in (shared_us, nccl_us) if time is not None)
            shared = "–" if shared_us is None else f"{shared_us:.1f}"
            received = size * (ranks - 1) / best / 1e3
            print(f"{count:>6}  {size:>10,}  {shared:>9}  {nccl_us:>8.1f}  {received:>7.1f}", flush=True)
    if rank == 0:
        print(json.dumps({"ranks": ranks, "device": torch.cuda.get_device_name(), "rows": found}))
    torch.cuda.synchronize()
    group.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--hidden", type=int, default=5120)
    parser.add_argument("--rows", default="1,8,16,64,128,256,400,2048")
    options = parser.parse_args()
    print(f"{'rows':>6}  {'bytes':>10}  {'shared us':>9}  {'NCCL us':>8}  {'GB/s':>7}")
    spawn = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as directory:
        arguments = (
            options.ranks,
            f"{directory}/meeting",
            options.hidden,
            [int(row) for row in options.rows.split(",")],
        )
        others = [spawn.Process(target=run, args=(rank, *arguments)) for rank in range(options.ranks)]
        for other in others:
            other.start()
        for other in others:
            other.join()
    if any(other.exitcode for other in others):
        raise SystemExit("all_reduce.py: a rank failed; its message is above")


if __name__ == "__main__":
    main()
