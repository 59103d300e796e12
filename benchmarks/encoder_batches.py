"""Measures the effect of batching on image encoding: milliseconds per image, and how much rows change with batch size.

Pixels are random, of one size. Each batch is timed after a warm-up batch of the same size; the table shows medians.
Below it, images of several sizes in one batch are compared with each image alone. With ``--json`` the last line is one
JSON document. "largest difference" is the maximum over all rows of all images between a batch and the same images one
by one, shown with the largest value among those rows. The rows differ because transformers' kernels round differently
for matmuls of different sizes.

    python benchmarks/encoder_batches.py --model synthetic:tiny-vl [--dtype bfloat16] [--batches 1,2,8] [--grid 1,24,24]
    python benchmarks/encoder_batches.py --model synthetic:qwen2.5-vl-7b --grid 1,72,72      # 1 megapixel, on a GPU
"""

from __future__ import annotations

import argparse
import io
import json
import statistics
import sys
import time

import torch

from trtx.checkpoint import resolve_checkpoint
from trtx.checkpoint.vision import read_vision_config
from trtx.ipc.encoder_messages import EncoderArgs, Grid
from trtx.torch_engine.vision.load import load_tower
from trtx.torch_engine.vision.towers import LlavaTower, Pixels, QwenTower, Tower

ROUNDS = 5
MIXED = ((1, 24, 24), (1, 8, 12), (1, 4, 4), (1, 40, 26), (1, 2, 2), (1, 14, 30))
"""The grids of the images in the mixed batch, in patches."""


def pixels(tower: Tower, seed: int, grid: Grid) -> Pixels:
    generator = torch.Generator().manual_seed(seed)
    if isinstance(tower, LlavaTower):
        return tower.check(torch.randn(1, *tower.shape, generator=generator), None)
    assert isinstance(tower, QwenTower)
    return tower.check(torch.randn(grid[0] * grid[1] * grid[2], tower.columns, generator=generator), grid)


def encoded(tower: Tower, batch: list[Pixels]) -> tuple[float, list[torch.Tensor]]:
    """Encodes a batch; returns the seconds, including copies to and from the device, and the rows."""
    began = time.perf_counter()
    rows = [one.cpu() for one in tower.encode(batch)]
    return time.perf_counter() - began, rows


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="synthetic:tiny-vl")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--batches", default="1,2,4,8,16")
    parser.add_argument("--grid", default="1,24,24", help="time, height, width in patches, of models with grids")
    parser.add_argument("--json", action="store_true")
    asked = parser.parse_args()
    assert isinstance(sys.stdout, io.TextIOWrapper)
    sys.stdout.reconfigure(line_buffering=True)  # show each result at once, even if a later measurement fails
    directory = resolve_checkpoint(asked.model).path
    tower = load_tower(EncoderArgs(model=str(directory), dtype=asked.dtype))
    time_, height, width = (int(one) for one in asked.grid.split(","))
    sizes = [int(one) for one in asked.batches.split(",")]
    items = [pixels(tower, seed, (time_, height, width)) for seed in range(max(sizes))]
    alone = [encoded(tower, [one])[1][0] for one in items]
    config = read_vision_config(directory)
    kind = config.architecture if config is not None else "no tower"
    print(f"{asked.model}: {kind}, {items[0].rows} rows of {tower.width}, {tower.dtype}, {tower.device}")
    print("batch  ms an image  images/s  largest difference  of values up to")
    rows = []
    for size in sizes:
        encoded(tower, items[:size])
        runs = [encoded(tower, items[:size]) for _ in range(ROUNDS)]
        seconds = statistics.median(run[0] for run in runs)
        pairs = list(zip(runs[-1][1], alone[:size], strict=True))
        largest = max(float((one.float() - other.float()).abs().max()) for one, other in pairs)
        values = max(float(other.float().abs().max()) for _, other in pairs)
        print(f"{size:5}  {1e3 * seconds / size:11.2f}  {size / seconds:8.1f}  {largest:18.3g}  {values:15.3g}")
        rows.append({"batch": size, "ms_an_image": 1e3 * seconds / size, "images_per_s": size / seconds,
                     "largest_difference": largest, "largest_value": values})  # fmt: skip
    mixed = [pixels(tower, seed, grid) for seed, grid in enumerate(MIXED)]
    apart = [encoded(tower, [one])[1][0] for one in mixed]
    pairs = list(zip(encoded(tower, mixed)[1], apart, strict=True))
    differing = sum(int((one != other).sum()) for one, other in pairs)
    largest = max(float((one.float() - other.float()).abs().max()) for one, other in pairs)
    count = sum(one.numel() for one in apart)
    what = "sizes" if isinstance(tower, QwenTower) else "pictures"
    differ = f"{differing} of {count} values differ from those alone, by {largest:.3g} at most"
    print(f"{len(mixed)} {what} in one batch: {differ}")
    if asked.json:
        print(json.dumps({"model": asked.model, "rows_an_image": items[0].rows, "dtype": str(tower.dtype), "rows": rows,
                          "mixed": {"differing": differing, "values": count, "largest": largest}}))  # fmt: skip


if __name__ == "__main__":
    main()
