"""Measures the CPU time of a step's matmuls in float32, bfloat16 and with int8 weights, to choose the dtype on a CPU.

    python benchmarks/cpu_products.py --model synthetic:qwen3-0.6b --rows 1,16,256

It uses one thread, and measures CPU time instead of wall time, so that other programs have little influence. Weights
are random.
``int8`` is torch's weight-only matmul (``torch._weight_int8pack_mm``: a scale per row of the weight, bfloat16
activations), which the embedded engine does not use. The last line of stdout is one JSON document.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F

from trtx.checkpoint import read_model_config, resolve_checkpoint
from trtx.checkpoint.model_config import ModelConfig
from trtx.memory.processor import multiplies_bfloat16

KINDS = ("float32", "bfloat16", "int8")


def shapes_of(config: ModelConfig) -> dict[str, tuple[int, int, int]]:
    """Returns for each matmul the rows and columns of its weight, and the number of calls per step."""
    hidden, layers = config.hidden_size, config.num_layers
    return {
        "qkv": (config.q_size + 2 * config.kv_size, hidden, layers),
        "output": (hidden, config.q_size, layers),
        "gate and up": (2 * config.intermediate_size, hidden, layers),
        "down": (hidden, config.intermediate_size, layers),
    }


def least_ms(call: Callable[[], object], repeats: int) -> float:
    call()
    found = []
    for _ in range(repeats):
        begin = time.process_time()
        call()
        found.append(time.process_time() - begin)
    return 1e3 * min(found)


def products(rows: int, columns: int) -> dict[str, Callable[[torch.Tensor], torch.Tensor]]:
    weight = torch.randn(rows, columns) * 0.02
    scales = weight.abs().amax(1) / 127
    packed, halves = (weight / scales[:, None]).round().to(torch.int8), weight.bfloat16()
    scales = scales.bfloat16()
    return {
        "float32": lambda x: F.linear(x, weight),
        "bfloat16": lambda x: F.linear(x.bfloat16(), halves),
        "int8": lambda x: torch._weight_int8pack_mm(x.bfloat16(), packed, scales),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="synthetic:qwen3-0.6b")
    parser.add_argument("--rows", default="1,16,256", help="tokens of a step")
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    config = read_model_config(resolve_checkpoint(options.model).path)
    torch.set_num_threads(1)
    counts = [int(one) for one in options.rows.split(",")]
    layers = {count: dict.fromkeys(KINDS, 0.0) for count in counts}
    head = {count: dict.fromkeys(KINDS, 0.0) for count in counts}
    with torch.inference_mode():
        for rows, columns, times in shapes_of(config).values():
            made = products(rows, columns)
            for count in counts:
                x = torch.randn(count, columns)
                for kind in KINDS:
                    layers[count][kind] += times * least_ms(lambda: made[kind](x), options.repeats)  # noqa: B023
        made = products(config.vocab_size, config.hidden_size)
        for count in counts:
            x = torch.randn(min(count, 16), config.hidden_size)  # the head computes only a prompt's last token
            for kind in KINDS:
                head[count][kind] = least_ms(lambda: made[kind](x), options.repeats)  # noqa: B023
    for count in counts:
        for name, found in (("layers", layers), ("head", head)):
            shown = ", ".join(f"{kind} {found[count][kind]:.1f} ms" for kind in KINDS)
            print(f"{count} rows, {name}: {shown}", file=sys.stderr)
    print(json.dumps({"bfloat16_instructions": multiplies_bfloat16(), "layers_ms": layers, "head_ms": head}))


if __name__ == "__main__":
    main()
