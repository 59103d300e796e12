"""Measures how the order of dimensions in a KV block affects the kernels that read and write it.

    python benchmarks/kv_layout.py            # one GPU, 60 GB of it, about 90 s

It uses Qwen3-8B's shape (8 KV heads of 128, 32 query heads, bf16), 32-token blocks in random places, and the production
kernels, which use strides. Every case runs over one storage, viewed in each order in turn, in a CUDA graph over all its
layers; the orders alternate over several rounds. Numbers are medians over the rounds, in microseconds per layer; the
last column is the spread between rounds of the first order. If 36 layers of a case do not fit, it has fewer.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable
from typing import Any

import torch

from trtx.checkpoint.model_config import ModelConfig
from trtx.checkpoint.rope import RopeConfig
from trtx.torch_engine.runner.kernels import KvCache, PassInputs, Spans
from trtx.torch_engine.runner.linear import PlainLinear
from trtx.torch_engine.runner.rope import rotary_table
from trtx.torch_engine.runner.triton_kernels import TritonKernels
from trtx.torch_engine.runner.weights import LayerWeights

KV_HEADS, HEADS, DIM, TOKENS_PER_BLOCK = 8, 32, 128, 32
TOKEN_BYTES = 2 * KV_HEADS * DIM * 2  # per layer
NAMES = ("block", "layer", "kv", "token", "head", "dim")  # the order of the dimensions for the kernels
LAYOUTS = (
    "block,layer,kv,token,head,dim",
    "block,head,layer,kv,token,dim",
    "block,layer,kv,head,token,dim",
    "block,head,layer,token,kv,dim",
)
CASES = [
    *(("decode", batch, 640) for batch in (1, 8, 64, 256)),
    *(("decode", batch, 32768) for batch in (1, 8, 64, 256)),
    ("prefill", 1, 8192),
    ("prefill", 64, 512),
    *(("write", rows, 640) for rows in (1, 64, 256)),
    ("write", 8192, 8192),
]


def seen(storage: torch.Tensor, layout: str, num_blocks: int, num_layers: int) -> torch.Tensor:
    """Returns a view of the storage in the kernels' order of dimensions, with memory in the order of ``layout``."""
    sizes = dict(zip(NAMES, (num_blocks, num_layers, 2, TOKENS_PER_BLOCK, KV_HEADS, DIM), strict=True))
    order = layout.split(",")
    whole = storage[: num_blocks * num_layers * TOKENS_PER_BLOCK * TOKEN_BYTES // 2]
    return whole.view([sizes[name] for name in order]).permute([order.index(name) for name in NAMES])


class Case:
    """The inputs of one kind of forward, and the size of the pool that it needs."""

    def __init__(self, kind: str, count: int, length: int, storage: torch.Tensor) -> None:
        self.kind, self.count, self.length = kind, count, length
        sequences = 1 if kind == "write" and length == count else count
        width = -(-length // TOKENS_PER_BLOCK)
        self.num_blocks = sequences * width
        fits = storage.nbytes // (self.num_blocks * TOKENS_PER_BLOCK * TOKEN_BYTES)
        self.num_layers = min(36, fits)
        if kind == "prefill":
            self.num_layers = min(4, self.num_layers)
        order = torch.randperm(self.num_blocks, device="cuda").int().view(sequences, width)
        self.table = torch.cat((order, torch.zeros(1, width, dtype=torch.int32, device="cuda")))
        ints: dict[str, Any] = {"dtype": torch.int32, "device": "cuda"}
        if kind == "decode" or (sequences == count and kind == "write"):
            slots, positions = torch.arange(count, **ints), torch.full((count,), length - 1, **ints)
            self.inputs = PassInputs(slots, positions, slots)
        else:
            slots = torch.arange(sequences, **ints).repeat_interleave(length)
            positions = torch.arange(length, **ints).repeat(sequences)
            spans = Spans(
                torch.arange(sequences, **ints), torch.arange(0, sequences * length + 1, length, **ints),
                torch.zeros(sequences, **ints), length,
            )  # fmt: skip
            self.inputs = PassInputs(slots, positions, slots, spans)
        self.q = torch.randn(len(slots), HEADS, DIM, device="cuda", dtype=torch.bfloat16)
        self.qkv = torch.randn(len(slots), (HEADS + 2 * KV_HEADS) * DIM, device="cuda", dtype=torch.bfloat16)
        self.rotary = rotary_table(CONFIG.rope, DIM, width * TOKENS_PER_BLOCK, torch.device("cuda"))

    def graph(self, storage: torch.Tensor, layout: str) -> Callable[[], float]:
        """Returns a function that replays one forward over all layers and returns its seconds."""
        pool = seen(storage, layout, self.num_blocks, self.num_layers)
        config = CONFIG
        processors = torch.cuda.get_device_properties(0).multi_processor_count
        config = config_of(self.num_layers)
        kernels = TritonKernels(config, KvCache(pool, self.table), self.rotary, processors)

        def run() -> None:
            inputs = self.inputs if self.kind == "write" else kernels.planned(self.inputs, self.q.dtype)
            for layer in range(self.num_layers):
                if self.kind == "write":
                    kernels.rope_and_write(self.qkv, layer, WEIGHTS, inputs)
                else:
                    kernels.attend(self.q, layer, inputs)

        run()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            run()

        def replay() -> float:
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]  # torch's
            begin.record()
            graph.replay()
            end.record()
            end.synchronize()
            return float(begin.elapsed_time(end)) / 1e3

        return replay


def config_of(num_layers: int) -> ModelConfig:
    return ModelConfig(
        architecture="Qwen3ForCausalLM", vocab_size=64, hidden_size=4096, intermediate_size=12288,
        num_layers=num_layers, num_heads=HEADS, num_kv_heads=KV_HEADS, head_dim=DIM, norm_eps=1e-6, max_position=40960,
        rope=RopeConfig(theta=1e6), tied_head=False, qkv_bias=False, output_bias=False, qk_norm=True,
        dtype="bfloat16", synthetic_seed=None, synthetic_std=0.02,
    )  # fmt: skip


CONFIG = config_of(36)
WEIGHTS: Any = None


def main() -> None:
    global WEIGHTS
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gib", type=int, default=56, help="of the pool that cases share")
    parser.add_argument("--rounds", type=int, default=9)
    options = parser.parse_args()
    unused, norm = torch.empty(0, device="cuda"), torch.randn(DIM, device="cuda", dtype=torch.bfloat16)
    linear = PlainLinear(unused)
    WEIGHTS = LayerWeights(unused, linear, norm, norm, linear, unused, linear, linear)
    storage = torch.empty(options.gib << 29, dtype=torch.bfloat16, device="cuda")
    for part in storage.split(1 << 30):  # type: ignore[no-untyped-call]  # torch's
        part.normal_()
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, us a layer, {options.rounds} rounds")
    print(f"{'case':>22} {'layers':>6} " + " ".join(f"{layout[6:-4]:>22}" for layout in LAYOUTS) + "  spread")
    rows = []
    for kind, count, length in CASES:
        case = Case(kind, count, length, storage)
        if case.num_layers == 0:
            continue
        with torch.inference_mode():
            replays = [case.graph(storage, layout) for layout in LAYOUTS]
        seconds: list[list[float]] = [[] for _ in LAYOUTS]
        for _ in range(options.rounds + 1):
            for at, replay in enumerate(replays):
                seconds[at].append(replay())
        medians = [statistics.median(times[1:]) / case.num_layers * 1e6 for times in seconds]
        first = sorted(seconds[0][1:])
        spread = (first[-1] - first[0]) / first[len(first) // 2]
        rows.append({"kind": kind, "count": count, "length": length, "layers": case.num_layers, "us": medians})
        cells = [f"{us:>13.2f} {us / medians[0] - 1:>+7.1%} " for us in medians]
        print(
            f"{kind:>7} {count:>5} x {length:>6} {case.num_layers:>6} " + " ".join(cells) + f"  {spread:.1%}",
            flush=True,
        )
        del replays
    print(json.dumps({"layouts": LAYOUTS, "rows": rows}))


if __name__ == "__main__":
    main()
