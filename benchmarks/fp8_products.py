"""Measures single matmuls with FP8 weights on a GPU, beside bf16: each kind of scales, with the input's quantization.

    python benchmarks/fp8_products.py --rows 1,8,64,256,2048

The shapes are Qwen3-8B's. Each time is the mean of a matmul in microseconds inside a CUDA graph that goes through so
many weights that none is in the cache. ``rows`` and ``blocks`` quantize their input first; what that takes alone is
beside them. ``static`` gets an input in float8. The last line of stdout is one JSON document.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from trtx.checkpoint.formats import BLOCK_SCALES, FP8_BLOCK, ROW_SCALES
from trtx.torch_engine.runner.fp8 import to_fp8
from trtx.torch_engine.runner.scaled_linear import BlockScaledLinear, RowScaledLinear, ScaledLinear, quantizer

SHAPES = {"qkv": (6144, 4096), "output": (4096, 4096), "gate_up": (24576, 4096), "down": (4096, 12288)}
KINDS = ("bf16", "static", "rows", "blocks", "quantize rows", "quantize groups")
CACHE_BYTES = 256 << 20  # of weights in one graph: several times the L2 of an H200
REPLAYS = 20


def products_of(kind: str, weight: Tensor) -> Callable[[Tensor], Tensor | tuple[Tensor, Tensor]]:
    """Returns a matmul with ``weight`` [rows, columns] bfloat16, or the quantization of its input."""
    rows, columns = weight.shape
    if kind == "bf16":
        return lambda x: F.linear(x, weight)
    if kind.startswith("quantize"):
        return quantizer(ROW_SCALES if kind == "quantize rows" else BLOCK_SCALES, weight.device)
    scale = torch.full((rows,), 1e-4, device=weight.device)
    stored = to_fp8(weight, scale[:, None])
    if kind == "blocks":
        scales = torch.full((rows // FP8_BLOCK, columns // FP8_BLOCK), 1e-4, device=weight.device)
        return BlockScaledLinear(weight=stored, block_scales=scales, bias=None, dtype=weight.dtype)
    if kind == "rows":
        return RowScaledLinear(weight=stored, row_scales=scale, bias=None, dtype=weight.dtype)
    one = torch.tensor(0.01, device=weight.device)
    return ScaledLinear(weight=stored, row_scales=scale, input_scale=one, bias=None, dtype=weight.dtype)


def mean_us(products: Sequence[Callable[[Tensor], object]], x: Tensor) -> float:
    """Returns the mean time of one of ``products`` in a graph that runs all of them, one after the other."""
    products[0](x)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for product in products:
            product(x)
    graph.replay()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    begin.record()
    for _ in range(REPLAYS):
        graph.replay()
    end.record()
    torch.cuda.synchronize()
    return float(begin.elapsed_time(end)) * 1e3 / (REPLAYS * len(products))


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", default="1,8,64,256,2048", help="rows of the input")
    parser.add_argument("--kinds", default=",".join(KINDS))
    options = parser.parse_args()
    counts, kinds = [int(count) for count in options.rows.split(",")], options.kinds.split(",")
    if unknown := set(kinds) - set(KINDS):
        parser.error(f"unknown kinds {', '.join(sorted(unknown))}; expected some of {', '.join(KINDS)}")
    if not torch.cuda.is_available():
        parser.error("no GPU is visible; this measurement needs a Hopper GPU")
    device = torch.cuda.get_device_name()
    print(f"{device}, torch {torch.__version__}; microseconds")
    print(f"{'matmul':<8} {'rows':>5}  " + "  ".join(f"{kind:>15}" for kind in kinds))
    found = []
    for name, (rows, columns) in SHAPES.items():
        times: dict[int, dict[str, float]] = {count: {} for count in counts}
        for kind in kinds:
            copies = -(-CACHE_BYTES // (rows * columns))
            products = [
                products_of(kind, torch.randn(rows, columns, dtype=torch.bfloat16, device="cuda") * 0.02)
                for _ in range(copies)
            ]
            for count in counts:
                x = torch.randn(count, columns, dtype=torch.bfloat16, device="cuda")
                if kind == "static":
                    x = to_fp8(x, torch.tensor(0.01, device="cuda"))
                times[count][kind] = mean_us(products, x)
            del products
            torch.cuda.empty_cache()
        for count, each in times.items():
            print(f"{name:<8} {count:>5}  " + "  ".join(f"{each[kind]:>15.1f}" for kind in kinds), flush=True)
            found.append({"matmul": name, "rows": count} | each)
    print(json.dumps({"device": device, "torch": torch.__version__, "us": found}))


if __name__ == "__main__":
    main()
