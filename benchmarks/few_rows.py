"""Measures the skinny GEMMs of a decode layer, each way of computing them, and whole forwards made of them.

    python benchmarks/few_rows.py                      # one GPU, 25 GB of it, about 45 s
    TRITON_INTERPRET=1 python benchmarks/few_rows.py   # on a CPU, tiny shapes: that it runs, no figure

The matmuls have the shapes of Qwen3-8B and 0.6B, in bf16. Their times are microseconds, the median of replays of a CUDA
graph over all layers; every layer has its own weights, so none is in the cache. ``library`` is ``F.linear``. A tile is
written as outputs x columns, warps, stages, ``/parts``; "*" marks the tile in use. Every tile's answer is compared with
float32 and with its own second answer. A forward is the runner's decoder from embedding to logits, with 640 tokens of
KV per row, in ms.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from multiprocessing import get_context
from typing import Any

import torch
import torch.nn.functional as F
import triton
from torch import Tensor
from triton.runtime.jit import MockTensor

from trtx.checkpoint.model_config import ModelConfig
from trtx.checkpoint.rope import RopeConfig
from trtx.torch_engine.runner.decoder import Decoder
from trtx.torch_engine.runner.few_rows import (
    ONE_ROW,
    SEVERAL_ROWS,
    FewRowsLayers,
    FewRowsMultiplier,
    Tile,
    Workspace,
    few_rows_product,
    tile_for,
)
from trtx.torch_engine.runner.kernels import DEFAULT_ATTENTION, Attention, KvCache, PassInputs
from trtx.torch_engine.runner.linear import LIBRARY_MULTIPLIER, MOST_ROWS, PlainLinear
from trtx.torch_engine.runner.rope import rotary_table
from trtx.torch_engine.runner.triton_kernels import TritonKernels
from trtx.torch_engine.runner.weights import DecoderWeights, LayerWeights

IS_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if IS_GPU else "cpu")
DTYPE = torch.bfloat16 if IS_GPU else torch.float16  # the interpreter has no bfloat16
EPS = 1e-6
KV_TOKENS, TOKENS_PER_BLOCK = (640, 32) if IS_GPU else (20, 8)
BYTES_PER_S = 3.0e12


@dataclass(frozen=True)
class Shape:
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocab: int

    def products(self) -> dict[str, tuple[int, int]]:
        """Returns rows and columns of each weight of a layer."""
        attended = self.heads * self.head_dim
        return {
            "qkv": (attended + 2 * self.kv_heads * self.head_dim, self.hidden),
            "output": (self.hidden, attended),
            "gate_up": (2 * self.intermediate, self.hidden),
            "down": (self.hidden, self.intermediate),
        }

    def config(self) -> ModelConfig:
        return ModelConfig(
            architecture="Qwen3ForCausalLM", vocab_size=self.vocab, hidden_size=self.hidden,
            intermediate_size=self.intermediate, num_layers=self.layers, num_heads=self.heads,
            num_kv_heads=self.kv_heads, head_dim=self.head_dim, norm_eps=EPS, max_position=40960,
            rope=RopeConfig(theta=1e6), tied_head=True, qkv_bias=False, output_bias=False, qk_norm=True,
            dtype="bfloat16", synthetic_seed=None, synthetic_std=0.02,
        )  # fmt: skip


SHAPES = {
    "8b": Shape(36, 4096, 32, 8, 128, 12288, 151936),
    "0.6b": Shape(28, 1024, 16, 8, 128, 3072, 151936),
}
TINY = {"tiny": Shape(2, 64, 4, 2, 16, 96, 200)}

ONE_ROW_TILES = [ONE_ROW, Tile(1, 4, 1024, 4, 4), Tile(1, 16, 512, 2, 4), Tile(1, 4, 1024, 4, 1)]
SEVERAL_ROWS_TILES = [
    SEVERAL_ROWS,
    Tile(MOST_ROWS, 16, 128, 2, 8),
    Tile(MOST_ROWS, 32, 128, 4, 6),
    Tile(MOST_ROWS, 64, 128, 4, 5),
]
PARTS = (1, 2, 4, 8)
WANTED = (200, 1200)  # programs per matmul: about 1.5 to 9 per processor


def tiles(rows: int) -> list[Tile]:
    found = ONE_ROW_TILES if rows == 1 else SEVERAL_ROWS_TILES
    return found if IS_GPU else found[:1]


def cuts(tile: Tile, outputs: int, width: int) -> list[Tile]:
    """Returns the tile with every number of parts that gives the GPU enough programs, with at least two steps each."""
    own = tile_for(tile.num_rows, outputs, width)
    if tile.num_rows == 1:
        return [tile]
    if tile == SEVERAL_ROWS:
        return [own]
    programs = triton.cdiv(outputs, tile.outputs)
    possible = [parts for parts in PARTS if parts == 1 or parts * 2 * tile.width <= width]
    fitting = [parts for parts in possible if WANTED[0] <= programs * parts <= WANTED[1]]
    if not fitting:
        fitting = possible[-1:] if programs < WANTED[0] else [1]
    return [replace(tile, parts=parts) for parts in fitting]


def name_of(tile: Tile) -> str:
    used = "*" if replace(tile, parts=1) in (ONE_ROW, SEVERAL_ROWS) else ""
    return f"{tile.outputs}x{tile.width} {tile.warps}w {tile.stages}s/{tile.parts}{used}"


def compile_one(tile: Tile, options: dict[str, bool]) -> None:
    """Compiles one kernel into the compiler's disk cache; runs in a separate process."""
    wide = 2048 if options["gated"] else 4096
    x, vector = MockTensor(DTYPE, [tile.num_rows, 4096]), MockTensor(DTYPE, [4096])
    weight, out = MockTensor(DTYPE, [4096, 4096]), MockTensor(DTYPE, [tile.num_rows, wide])
    workspace: Any = Workspace(MockTensor(torch.float32, [16]), MockTensor(torch.int32, [16]))
    few_rows_product(
        x, weight, None, out, workspace, tile=tile, norm=vector if options["normed"] else None, eps=EPS,
        residual=out if options["added"] else None, gated=options["gated"], overlaps=options["overlaps"],
        ahead=options["ahead"], warm_up=True,
    )  # fmt: skip


PLAIN = {"normed": False, "added": False, "gated": False, "overlaps": False, "ahead": False}


def fused(rows: int) -> list[tuple[Tile, dict[str, bool]]]:
    """Returns the kernels that a layer's matmuls need, with and without overlapping launches."""
    tile, normed = (ONE_ROW, True) if rows == 1 else (SEVERAL_ROWS, False)
    return [
        (tile, PLAIN | {"normed": normed and not added, "added": added, "gated": gated, "overlaps": overlaps})
        for added, gated in ((False, False), (False, True), (True, False))
        for overlaps in (False, True)
    ]


class Compiler:
    def __init__(self, workers: int) -> None:
        self._pool = ProcessPoolExecutor(workers, mp_context=get_context("spawn")) if IS_GPU else None

    def compile(self, wanted: Iterable[tuple[Tile, dict[str, bool]]]) -> None:
        if self._pool is None:
            return
        distinct: list[tuple[Tile, dict[str, bool]]] = []
        for tile, options in wanted:
            one = (replace(tile, parts=1), options)
            if one not in distinct:
                distinct.append(one)
        for one, future in [(one, self._pool.submit(compile_one, *one)) for one in distinct]:
            if error := future.exception():
                print(f"not compiled ahead: {name_of(one[0])} {one[1]}: {str(error)[:200]}")

    def close(self) -> None:
        if self._pool is not None:
            self._pool.shutdown()


def replays_us(run: Callable[[], object], rounds: int) -> float:
    """Returns the median time of a CUDA graph with everything that ``run`` launches, in microseconds."""
    run()
    if not IS_GPU:
        return 0.0
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    times: list[float] = []
    for _ in range(rounds + 2):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]  # torch's
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1e3)
    return statistics.median(times[2:])


@dataclass
class Found:
    us: dict[str, float]
    error: float
    library_error: float


def measure(weights: list[Tensor], rows: int, rounds: int) -> Found:
    workspace = Workspace(
        torch.empty(1 << 21, dtype=torch.float32, device=DEVICE), torch.zeros(1 << 12, dtype=torch.int32, device=DEVICE)
    )
    outputs, width = weights[0].shape
    x = torch.randn(rows, width, device=DEVICE).to(DTYPE)
    out = torch.empty(rows, outputs, dtype=DTYPE, device=DEVICE)
    exact = x.float() @ weights[0].float().t()
    error = ((F.linear(x, weights[0]).float() - exact).norm() / exact.norm()).item()

    def library() -> None:
        for weight in weights:
            F.linear(x, weight)

    found = Found({"library": replays_us(library, rounds) / len(weights)}, 0.0, error)
    for plain in tiles(rows):
        for tile in cuts(plain, outputs, width):

            def ours(tile: Tile = tile) -> None:
                for weight in weights:
                    few_rows_product(x, weight, None, out, workspace, tile=tile)

            try:
                few_rows_product(x, weights[0], None, out, workspace, tile=tile)
                first, error = out.clone(), ((out.float() - exact).norm() / exact.norm()).item()
                us = replays_us(ours, rounds) / len(weights)
                few_rows_product(x, weights[0], None, out, workspace, tile=tile)
            except triton.OutOfResources as problem:
                print(f"{name_of(tile)} at {rows} rows: {problem}")
                continue
            if not torch.equal(out, first):
                print(f"{name_of(tile)} at {rows} rows of {outputs} x {width}: other bits the second time")
            found.error = max(found.error, error)
            found.us[name_of(tile)] = us
    return found


def weights_of(shape: Shape) -> DecoderWeights:
    def drawn(outputs: int, width: int) -> Tensor:
        return torch.empty(outputs, width, dtype=DTYPE, device=DEVICE).normal_(std=width**-0.5)

    def ones(width: int) -> Tensor:
        return torch.ones(width, dtype=DTYPE, device=DEVICE)

    layers = []
    for _ in range(shape.layers):
        linears = {name: PlainLinear(drawn(*size)) for name, size in shape.products().items()}
        layers.append(
            LayerWeights(
                input_norm=ones(shape.hidden), mlp_norm=ones(shape.hidden), q_norm=ones(shape.head_dim),
                k_norm=ones(shape.head_dim), **linears,
            )
        )  # fmt: skip
    head = drawn(shape.vocab, shape.hidden)
    return DecoderWeights(head, tuple(layers), ones(shape.hidden), head, torch.ones(shape.layers, 2, device=DEVICE))


@dataclass(frozen=True)
class Way:
    """One way to compute a forward.

    ``prefetched``: MB of a weight that are prefetched before its matmul. ``ahead``: the weights of its first step are
    loaded to registers in advance.
    """

    products: bool = False
    fused: bool = False
    overlaps: bool = False
    prefetched: int = 0
    ahead: bool = False


WAYS = {
    "library": Way(),
    "one product after the other": Way(products=True),
    "fused": Way(products=True, fused=True),
    "fused, overlapping": Way(products=True, fused=True, overlaps=True),
    "fused, overlapping, 4 MB ahead": Way(products=True, fused=True, overlaps=True, prefetched=4),
    "fused, overlapping, 8 MB ahead": Way(products=True, fused=True, overlaps=True, prefetched=8),
    "fused, overlapping, 24 MB ahead": Way(products=True, fused=True, overlaps=True, prefetched=24),
    "fused, overlapping, first step ahead": Way(products=True, fused=True, overlaps=True, ahead=True),
    "fused, overlapping, first step and 8 MB ahead": Way(
        products=True, fused=True, overlaps=True, prefetched=8, ahead=True
    ),
    "fused, overlapping, first step and 24 MB ahead": Way(
        products=True, fused=True, overlaps=True, prefetched=24, ahead=True
    ),
}


class Pass:
    """A decode forward of ``rows`` sequences with ``KV_TOKENS`` tokens each."""

    def __init__(self, shape: Shape, weights: DecoderWeights, rows: int, attention: Attention) -> None:
        blocks = triton.cdiv(KV_TOKENS, TOKENS_PER_BLOCK)
        pool = torch.empty(
            rows * blocks, shape.kv_heads, shape.layers, 2, TOKENS_PER_BLOCK, shape.head_dim, dtype=DTYPE, device=DEVICE
        ).normal_()  # fmt: skip
        table = torch.zeros(rows + 1, blocks, dtype=torch.int32, device=DEVICE)
        table[:rows] = torch.randperm(rows * blocks, device=DEVICE).int().view(rows, blocks)
        self._config, self._weights, self._attention = shape.config(), weights, attention
        self._cache = KvCache.of(pool, table)
        self._rotary = rotary_table(self._config.rope, shape.head_dim, blocks * TOKENS_PER_BLOCK, DEVICE)
        slots = torch.arange(rows, dtype=torch.int32, device=DEVICE)
        self._inputs = PassInputs(slots + 7, torch.full_like(slots, KV_TOKENS - 1), slots)
        self._workspace = Workspace.of(DEVICE)
        self._logits = torch.empty(rows, shape.vocab, dtype=DTYPE, device=DEVICE)

    def run(self, way: Way) -> Callable[[], Tensor]:
        processors = torch.cuda.get_device_properties(0).multi_processor_count if IS_GPU else 4
        kernels = TritonKernels(
            self._config, self._cache, self._rotary, processors, self._attention, MOST_ROWS if way.overlaps else 0
        )
        layers = FewRowsLayers(
            self._weights,
            kernels,
            EPS,
            self._workspace,
            overlaps=way.overlaps,
            ahead=way.ahead,
            prefetched_bytes=way.prefetched << 20,
        )
        multiplier = FewRowsMultiplier(self._workspace) if way.products else LIBRARY_MULTIPLIER
        weights = self._weights
        if way.products and not way.fused:
            weights = replace(weights, layers=tuple(_multiplied(layer, multiplier) for layer in weights.layers))
        decoder = Decoder(weights, kernels, multiplier=multiplier, few_tokens=layers if way.fused else None)
        return lambda: decoder.logits(decoder.hidden(self._inputs), out=self._logits)


def _multiplied(layer: LayerWeights, multiplier: Any) -> LayerWeights:
    def by(linear: Any) -> PlainLinear:
        made: PlainLinear = replace(linear, multiplier=multiplier)
        return made

    return replace(
        layer, qkv=by(layer.qkv), output=by(layer.output), gate_up=by(layer.gate_up), down=by(layer.down)
    )  # fmt: skip


def table(results: list[tuple[str, str, int, tuple[int, int], Found]]) -> None:
    print(f"{'':>6} {'product':>8} {'rows':>4} {'limit':>7} {'library':>8} {'ours':>7}  the fastest")
    for shape, product, rows, (outputs, width), found in results:
        own = sorted(((us, name) for name, us in found.us.items() if name != "library"))
        limit = outputs * width * 2 / BYTES_PER_S * 1e6
        print(
            f"{shape:>6} {product:>8} {rows:>4} {limit:>7.1f} {found.us['library']:>8.1f} {own[0][0]:>7.1f}  "
            + ", ".join(f"{name} {us:.1f}" for us, name in own[:4]),
            flush=True,
        )


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", default="1,2,8,16" if IS_GPU else "1,8", help="of the products; empty: none")
    parser.add_argument("--pass-rows", default="1,2,4,8,16" if IS_GPU else "1,3", help="of whole passes; empty: none")
    parser.add_argument("--shapes", default="8b,0.6b" if IS_GPU else "tiny")
    parser.add_argument("--attention", choices=[way.value for way in Attention], default=DEFAULT_ATTENTION.value)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--workers", type=int, default=min(14, os.cpu_count() or 1), help="processes that compile")
    args = parser.parse_args()
    began = time.monotonic()
    shapes = SHAPES if IS_GPU else TINY
    product_rows, pass_rows = ([int(part) for part in text.split(",") if part] for text in (args.rows, args.pass_rows))
    compiler = Compiler(args.workers)
    compiler.compile(
        [(tile, PLAIN) for rows in product_rows for tile in tiles(rows)]
        + [one for rows in pass_rows for one in fused(rows)]
    )
    device = torch.cuda.get_device_name() if IS_GPU else "interpreter"
    print(
        f"{device}, torch {torch.__version__}, Triton {triton.__version__}; compiled {time.monotonic() - began:.0f} s"
    )
    document: dict[str, Any] = {"device": device, "attention": args.attention, "products": [], "passes": []}
    for name in args.shapes.split(","):
        shape = shapes[name]
        weights = weights_of(shape)
        results = []
        for rows in product_rows:
            tensors = {of: [getattr(layer, of).weight for layer in weights.layers] for of in shape.products()}
            for product, group in (*tensors.items(), ("head", [weights.head])):
                found = measure(group, rows, args.rounds)
                results.append((name, product, rows, (group[0].shape[0], group[0].shape[1]), found))
                document["products"].append(
                    {"shape": name, "product": product, "rows": rows, "us": found.us, "error": found.error,
                     "library error": found.library_error}
                )  # fmt: skip
        if results:
            table(results)
            worst = max(result[-1].error for result in results)
            print(f"largest error {worst:.1e}, the library's {max(result[-1].library_error for result in results):.1e}")
        read = sum(outputs * width * 2 for outputs, width in shape.products().values()) * shape.layers
        for rows in pass_rows:
            one = Pass(shape, weights, rows, Attention(args.attention))
            kv = rows * shape.layers * shape.kv_heads * KV_TOKENS * shape.head_dim * 4
            limit = (read + kv + weights.head.numel() * 2) / BYTES_PER_S * 1e3
            print(f"{name}, a pass of {rows} rows: limit {limit:.2f} ms   ({time.monotonic() - began:.0f} s)")
            reference = None
            for label, what in WAYS.items():
                if (what.overlaps and not IS_GPU) or (what.ahead and rows > 1):
                    continue
                run = one.run(what)
                ms = replays_us(run, args.rounds + 4) / 1e3
                answer = run().clone()
                reference = answer if reference is None else reference
                differs = ((answer.float() - reference.float()).norm() / reference.float().norm()).item()
                print(f"{ms:>9.3f} ms, differs {differs:.1e}  {label}", flush=True)
                document["passes"].append({"shape": name, "rows": rows, "way": label, "ms": ms, "differs": differs})
        del weights
    compiler.close()
    print(f"{time.monotonic() - began:.0f} s")
    print(json.dumps(document))


if __name__ == "__main__":
    main()
