"""Compares FP8 with bfloat16 on one GPU: each matmul of a decoder layer, and the runner's decode and prefill speed.

    python benchmarks/fp8_decode.py     # Qwen3-8B's shape: a minute on an H100, 10 GB of disk

Matmuls: every shape at several numbers of rows of x, from CUDA graphs that cycle through enough copies of the weight
that none is in the cache. ``GB/s`` counts weight, x and result once. Runner: measured as in ``engine_decode.py``, with
random weights, and with the same weights rounded to FP8 and read from files like an export, in which merged projections
share one scale as ``trtx build`` exports them; then also with a float8 KV cache. The last line of stdout is one JSON
document.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from engine_decode import measure
from safetensors.torch import save_file
from torch import Tensor

from trtx.checkpoint import resolve_checkpoint
from trtx.checkpoint.model_config import ModelConfig, read_model_config
from trtx.torch_engine.llmapi.sampling import SamplingParams, resolve_sampling
from trtx.torch_engine.runner import RunnerArgs, create_runner
from trtx.torch_engine.runner.fp8 import FP8, FP8_MAX, to_fp8
from trtx.torch_engine.runner.scaled_linear import ScaledLinear
from trtx.torch_engine.runner.weights import named_tensors

CACHE_BYTES = 256 << 20  # larger than the L2 cache of any GPU
SHARD_BYTES = 2 << 30
INPUT_SCALE = 5.0 / FP8_MAX  # covers five standard deviations of random activations after a norm


def product_shapes(config: ModelConfig) -> dict[str, tuple[int, int]]:
    """Returns rows and columns of a layer's four weights."""
    return {
        "qkv": (config.q_size + 2 * config.kv_size, config.hidden_size),
        "o": (config.hidden_size, config.q_size),
        "gate_up": (2 * config.intermediate_size, config.hidden_size),
        "down": (config.hidden_size, config.intermediate_size),
    }


def seconds_each(calls: list[Callable[[], Tensor]], repeats: int) -> float:
    """Returns the device time of one call, from ``repeats`` replays of one CUDA graph with all calls."""
    for call in calls[:2]:
        call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    graph.replay()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]  # torch's
    begin.record()
    for _ in range(repeats):
        graph.replay()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) / 1e3 / repeats / len(calls)


def product_row(name: str, num_x: int, rows: int, columns: int) -> dict[str, Any]:
    """Returns the microseconds of each way to compute one matmul."""
    copies = max(2, -(-CACHE_BYTES // (rows * columns)))
    x = torch.randn(num_x, columns, device="cuda", dtype=torch.bfloat16)
    wide = [torch.randn(rows, columns, device="cuda", dtype=torch.bfloat16) * 0.02 for _ in range(copies)]
    scale, one_scale = torch.tensor(INPUT_SCALE, device="cuda"), torch.full((rows,), 1e-3, device="cuda")
    narrow_x, row_scales = to_fp8(x, scale), one_scale * torch.linspace(1, 2, rows, device="cuda")
    narrow = [to_fp8(weight, one_scale[0]) for weight in wide]

    def linears(scales: Tensor) -> list[Callable[[], Tensor]]:
        made = [
            ScaledLinear(weight=weight, row_scales=scales, input_scale=scale, bias=None, dtype=torch.bfloat16)
            for weight in narrow
        ]
        return [partial(linear, narrow_x) for linear in made]

    ways: dict[str, list[Callable[[], Tensor]]] = {
        "bf16": [partial(F.linear, x, weight) for weight in wide],
        "fp8, one scale": linears(one_scale),
        "fp8, a scale a row": linears(row_scales),
    }
    found: dict[str, Any] = {"product": name, "rows of x": num_x}
    for way, calls in ways.items():
        taken = seconds_each(calls, repeats=3 if num_x > 1000 else 10)
        weight_bytes = rows * columns * (2 if way == "bf16" else 1)
        moved = weight_bytes + num_x * columns * (2 if way == "bf16" else 1) + num_x * rows * 2
        found[way] = {
            "us": taken * 1e6,
            "GB/s": moved / taken / 1e9,
            "TFLOPS": 2 * num_x * rows * columns / taken / 1e12,
        }
    return found


def products(config: ModelConfig) -> list[dict[str, Any]]:
    print(f"{'product':>8} {'rows':>5}  {'way':<20} {'us':>9} {'GB/s':>7} {'TFLOPS':>7}")
    table = []
    for name, (rows, columns) in product_shapes(config).items():
        for num_x in (1, 8, 64, 256, 8192):
            row = product_row(name, num_x, rows, columns)
            table.append(row)
            for way, figures in row.items():
                if isinstance(figures, dict):
                    print(
                        f"{name:>8} {num_x:>5}  {way:<20} {figures['us']:>9.1f} {figures['GB/s']:>7.0f} "
                        f"{figures['TFLOPS']:>7.0f}"
                    )
            sys.stdout.flush()
            torch.cuda.empty_cache()
    return table


def write_export(source: Path, directory: Path, device: torch.device) -> None:
    """Writes the random checkpoint in ModelOpt's FP8 layout, in shards; all linear weights except the head are FP8."""
    shard: dict[str, Tensor] = {}
    places: dict[str, str] = {}
    scale = torch.tensor(INPUT_SCALE)
    # Random weights have the same spread everywhere, so one scale is within a few per cent of each weight's own scale.
    weight_scale = torch.tensor(5.5 * read_model_config(source).synthetic_std / FP8_MAX)

    def flush() -> None:
        name = f"model-{len(set(places.values())):05d}.safetensors"
        places.update(dict.fromkeys(shard, name))
        save_file(shard, directory / name)
        shard.clear()

    for name, value in named_tensors(source, device=device, dtype=torch.bfloat16):
        if name.endswith("_proj.weight"):
            shard[name] = to_fp8(value, weight_scale.to(device)).cpu()
            module = name.removesuffix(".weight")
            shard[f"{module}.weight_scale"], shard[f"{module}.input_scale"] = weight_scale.clone(), scale.clone()
        else:
            shard[name] = value.cpu()
        if sum(tensor.nbytes for tensor in shard.values()) > SHARD_BYTES:
            flush()
    flush()
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    (directory / "config.json").write_text((source / "config.json").read_text())
    quantization = {"quant_algo": "FP8", "kv_cache_quant_algo": None, "exclude_modules": ["lm_head"]}
    (directory / "hf_quant_config.json").write_text(json.dumps({"quantization": quantization}))


def runner_rows(options: argparse.Namespace, source: Path, directory: Path) -> list[dict[str, Any]]:
    batches = [int(batch) for batch in options.batch.split(",")]
    blocks = max(batches) * -(-(options.isl + options.osl) // 32)
    print(f"{'engine':>16} {'batch':>5}  {'prefill tok/s':>13}  {'decode tok/s':>12}  {'step ms':>8}")
    rows: list[dict[str, Any]] = []
    greedy = resolve_sampling(SamplingParams())
    for name, model_dir, kv_dtype in (
        ("bf16", source, "bfloat16"), ("fp8", directory, "bfloat16"), ("fp8, fp8 KV", directory, "fp8"),
    ):  # fmt: skip
        begin = time.perf_counter()
        runner = create_runner(
            RunnerArgs(
                model_dir=model_dir, dtype="bfloat16", kv_dtype=kv_dtype, max_batch_size=max(batches),
                max_seq_len=options.isl + options.osl, max_tokens=blocks * 32, cuda_graph_batch_sizes=tuple(batches),
            )
        )  # fmt: skip
        start_s, memory = time.perf_counter() - begin, runner.device_memory_bytes() / 2**30
        print(
            f"{name:>16} start {start_s:.1f} s, device memory {memory:.1f} GiB, KV {runner.pool.nbytes / 2**30:.1f} GiB"
        )
        for batch in batches:
            row = measure(runner, greedy, batch=batch, isl=options.isl, osl=options.osl, max_num_tokens=8192)
            rows.append({"engine": name, "start_s": start_s, "device_memory_gib": memory, **row})
            print(
                f"{name:>16} {batch:>5}  {row['prefill_tokens_per_s']:>13,.0f}  {row['decode_tokens_per_s']:>12,.0f}  "
                f"{row['decode_step_ms']:>8.3f}"
            )
            sys.stdout.flush()
        runner.close()
        del runner
        torch.cuda.empty_cache()
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="synthetic:qwen3-8b", help="synthetic:<shape> whose weights are drawn")
    parser.add_argument("--only", choices=("products", "runner"))
    parser.add_argument("--batch", default="1,8,64,256")
    parser.add_argument("--isl", type=int, default=512, help="prompt tokens")
    parser.add_argument("--osl", type=int, default=128, help="generated tokens")
    options = parser.parse_args()
    source = Path(resolve_checkpoint(options.model, on_gpu=True).path)
    device = torch.cuda.get_device_name()
    print(f"{options.model}, {device}, torch {torch.__version__}, ISL {options.isl}, OSL {options.osl}, {FP8}")
    found: dict[str, Any] = {"model": options.model, "device": device}
    with torch.inference_mode():
        if options.only != "runner":
            found["products"] = products(read_model_config(source))
        if options.only != "products":
            with tempfile.TemporaryDirectory() as directory:
                write_export(source, Path(directory), torch.device("cuda"))
                found["rows"] = runner_rows(options, source, Path(directory))
    print(json.dumps(found))


if __name__ == "__main__":
    main()
