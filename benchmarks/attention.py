"""Measures attention of one layer with every way to split its work, compared with the limits of bandwidth and compute.

    python benchmarks/attention.py                          # one GPU, 45 GB of it, below 100 s
    python benchmarks/attention.py --cases prompts,"1 x 640" --ways "by length,fixed"
    python benchmarks/attention.py --window 4096 --cases 32768,8192    # layers that attend to a window
    TRITON_INTERPRET=1 python benchmarks/attention.py       # on a CPU, tiny shapes: that it runs, no figure

The shape is Qwen3-8B's, with 32-token blocks in random places, in bf16 and, with ``--fp8``, also with an FP8 cache. A
decode of N x L is N sequences with one new token and L tokens in total; a chunk of S on C is S new tokens after C
cached ones. Chunks together with decodes are one padded mixed batch, which only split-KV by length supports. Times are
microseconds per layer, the median of ``--rounds`` replays of a CUDA graph over all layers of a case (36, or as many as
fit); the graph makes the work list once, as a step does. The ways take turns, and their graphs share memory. "/2" and
"x2" use the work list for half and twice as many processors, which shows whether its number of items is right. The
limit is the larger of two times: reading the KV of every sequence once at the rate of a copy, and the matmuls of every
query at the rate of a large bf16 matmul. "differs" is the largest difference from the first way's answers. The last
line of stdout is one JSON document.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from gpu_limits import copy_bytes_per_s, operations_per_s

from trtx.checkpoint.model_config import ModelConfig
from trtx.checkpoint.rope import RopeConfig
from trtx.torch_engine.runner.fp8 import FP8, to_fp8
from trtx.torch_engine.runner.kernels import Attention, KvCache, PassInputs, Spans
from trtx.torch_engine.runner.triton_kernels import TritonKernels

IS_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if IS_GPU else "cpu")
DTYPE = torch.bfloat16 if IS_GPU else torch.float32  # the interpreter has no bfloat16
HEADS, KV_HEADS, DIM = (32, 8, 128) if IS_GPU else (4, 2, 16)
LAYERS, TOKENS_PER_BLOCK = (36, 32) if IS_GPU else (2, 8)
LONG, SHORT = (32768, 640) if IS_GPU else (1100, 40)
WAYS: dict[str, tuple[Attention, float]] = {  # (kind, the number of processors as a multiple of the real one)
    "by length": (Attention.BY_LENGTH, 1),
    "/2": (Attention.BY_LENGTH, 0.5),
    "x2": (Attention.BY_LENGTH, 2),
    "fixed": (Attention.FIXED, 1),
}


@dataclass(frozen=True)
class Case:
    """One case. ``sequences``: (cached tokens, new tokens) of each; the first ``num_decodes`` of them are decodes."""

    name: str
    sequences: list[tuple[int, int]]
    num_decodes: int = 0

    @property
    def is_mixed(self) -> bool:
        return 0 < self.num_decodes < len(self.sequences)


def decode(name: str, lengths: list[int]) -> Case:
    return Case(f"decode {name}", [(length - 1, 1) for length in lengths], len(lengths))


def beside(decodes: int, chunks: list[tuple[int, int]], length: int = SHORT * 9 // 10) -> Case:
    context, new = chunks[0]
    name = f"{len(chunks)} x {new} behind {context} beside {decodes} x {length}"
    return Case(name, [(length - 1, 1)] * decodes + chunks, decodes)


def cases() -> list[Case]:
    counts = (1, 8, 32, 64, 256) if IS_GPU else (1, 3)
    found = [decode(f"{count} x {SHORT}", [SHORT] * count) for count in counts]
    found += [decode(f"{count} x {LONG}", [LONG] * count) for count in ((1, 8, 64) if IS_GPU else (1,))]
    for others in (7, 31, 63, 255) if IS_GPU else (3,):
        found.append(decode(f"{others} x {SHORT} + 1 x {LONG}", [SHORT] * others + [LONG]))
    for cached in (LONG // 4, LONG):
        for new in (16, 64, 256) if IS_GPU else (16, 40):
            found.append(Case(f"chunk of {new} on {cached}", [(cached, new)]))
    prompts = ((1, 8192), (64, 512)) if IS_GPU else ((1, 70),)
    found += [Case(f"prompts {count} x {length}", [(0, length)] * count) for count, length in prompts]
    few = [(SHORT, 4)] * (16 if IS_GPU else 2)
    found.append(Case(f"{len(few)} x 4 new on {SHORT}", few))
    if IS_GPU:
        found += [beside(255, [(0, 512)] * 2), beside(255, [(171, 341)] * 3), beside(64, [(256, 256)])]
        found += [beside(64, [(LONG, 256)]), beside(64, [(LONG // 4, 1024)])]
        # Long prompts, whose few wide tiles are split by the waves of programs that they fill.
        for chunk in ((6000, 637), (11_000, 375), (2500, 375), (8000, 1024)):
            found.append(beside(3, [chunk], 12_000))
        found += [beside(32, [(2048, 224)], 2600), beside(64, [(2500, 128)], 640)]
        found.append(beside(16, [(2500, 250)] * 2, 2200))
        found += [Case(f"chunk of {new} on {cached}", [(cached, new)]) for cached, new in ((2048, 512), (8192, 3808))]
    else:
        found += [beside(3, [(0, 24)] * 2)]
    return found


def config_of(num_layers: int, window: int | None) -> ModelConfig:
    return ModelConfig(
        architecture="Qwen3ForCausalLM", vocab_size=64, hidden_size=4096, intermediate_size=12288,
        num_layers=num_layers, num_heads=HEADS, num_kv_heads=KV_HEADS, head_dim=DIM, norm_eps=1e-6, max_position=40960,
        rope=RopeConfig(theta=1e6), tied_head=False, qkv_bias=False, output_bias=False, qk_norm=True,
        dtype="bfloat16", synthetic_seed=None, synthetic_std=0.02,
        windows=() if window is None else (window,) * num_layers,
    )  # fmt: skip


def inputs_of(case: Case) -> PassInputs:
    ints: dict[str, Any] = {"dtype": torch.int32, "device": DEVICE}
    slots = [slot for slot, (_, new) in enumerate(case.sequences) for _ in range(new)]
    positions = [position for context, new in case.sequences for position in range(context, context + new)]
    spans = decodes = None
    first, chunks = case.num_decodes, case.sequences[case.num_decodes :]
    if chunks:
        starts = [first + sum(new for _, new in chunks[:index]) for index in range(len(chunks) + 1)]
        order = torch.arange(first, len(case.sequences), **ints)
        contexts = torch.tensor([context for context, _ in chunks], **ints)
        # A padded forward knows neither the lengths of its chunks nor the lengths of their contexts.
        most = len(slots) if case.is_mixed else max(new for _, new in chunks)
        known = None if case.is_mixed else max(context for context, _ in chunks)
        spans = Spans(order, torch.tensor(starts, **ints), contexts, most, known)
    if case.is_mixed:
        decodes = Spans(
            torch.arange(first, **ints), torch.arange(first + 1, **ints), torch.tensor(positions[:first], **ints), 1
        )
    return PassInputs(
        torch.zeros(len(slots), **ints), torch.tensor(positions, **ints), torch.tensor(slots, **ints), spans,
        decodes=decodes,
    )  # fmt: skip


class Measured:
    """One case over one storage: its KV pool, and a timed run of each way."""

    def __init__(self, case: Case, storage: torch.Tensor, processors: int, window: int | None) -> None:
        self._case, self._inputs, self._processors, self._window = case, inputs_of(case), processors, window
        blocks = [-(-(context + new) // TOKENS_PER_BLOCK) for context, new in case.sequences]
        width = (max(blocks) + 1) | 1  # odd, so that one compiled kernel serves all cases
        layer_elements = sum(blocks) * 2 * TOKENS_PER_BLOCK * KV_HEADS * DIM
        self.layers = min(LAYERS, storage.numel() // layer_elements)
        pool = storage[: self.layers * layer_elements]
        pool = pool.view(sum(blocks), KV_HEADS, self.layers, 2, TOKENS_PER_BLOCK, DIM)
        order = torch.randperm(sum(blocks), device=DEVICE).int()
        table = torch.zeros(len(blocks) + 1, width, dtype=torch.int32, device=DEVICE)
        taken = 0
        for slot, count in enumerate(blocks):
            table[slot, :count] = order[taken : taken + count]
            taken += count
        scales = torch.full((self.layers, 2), 0.02, device=DEVICE) if storage.dtype == FP8 else None
        self._cache = KvCache.of(pool, table, scales)
        self._graphs = torch.cuda.graph_pool_handle() if IS_GPU else None
        self._q = torch.randn(len(self._inputs.token_ids), HEADS, DIM, device=DEVICE).to(DTYPE)

    def limit_us(self, bandwidth: float, operations: float) -> float:
        token_bytes = 2 * KV_HEADS * DIM * self._cache.pool.element_size()
        window = self._window or LONG * 2  # more than any sequence has
        moved = token_bytes * sum(new + min(context, window - 1) for context, new in self._case.sequences)
        pairs = sum(
            min(position + 1, window)
            for context, new in self._case.sequences
            for position in range(context, context + new)
        )
        return max(moved / bandwidth, 4 * HEADS * DIM * pairs / operations) * 1e6

    def run(self, way: str) -> tuple[Callable[[], float], torch.Tensor]:
        """Returns a function that times a forward over all layers, in us per layer, and the last layer's answers.

        The answers are valid until another way runs.
        """
        attention, part = WAYS[way]
        processors = max(1, int(self._processors * part))
        config = config_of(self.layers, self._window)
        kernels = TritonKernels(config, self._cache, torch.empty(0), processors, attention)
        q, inputs, layers = self._q, self._inputs, self.layers

        def attend() -> torch.Tensor:
            planned = kernels.planned(inputs, q.dtype)
            for layer in range(layers):
                answers = kernels.attend(q, layer, planned)  # the memory of the previous layer's answers is reused
            return answers

        return self.timed(attend)

    def timed(self, attend: Callable[[], torch.Tensor]) -> tuple[Callable[[], float], torch.Tensor]:
        layers = self.layers

        if not IS_GPU:
            answers = attend()

            def by_clock() -> float:
                began = time.perf_counter()
                attend()
                return (time.perf_counter() - began) * 1e6 / layers

            return by_clock, answers
        attend()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._graphs):
            answers = attend()

        def replay() -> float:
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]  # torch's
            begin.record()
            graph.replay()
            end.record()
            end.synchronize()
            return float(begin.elapsed_time(end)) * 1e3 / layers

        replay()
        return replay, answers


def storage_of(dtype: torch.dtype, bytes_held: int) -> torch.Tensor:
    storage = torch.empty(bytes_held // dtype.itemsize, dtype=dtype, device=DEVICE)
    for part in storage.split(1 << 28):  # type: ignore[no-untyped-call]  # torch's
        drawn = torch.randn(part.numel(), device=DEVICE)
        part.copy_(to_fp8(drawn, torch.tensor(0.02, device=DEVICE)) if dtype == FP8 else drawn)
    return storage


def measure(
    storage: torch.Tensor, chosen: list[Case], ways: list[str], rounds: int, processors: int, bandwidth: float,
    operations: float, window: int | None,
) -> list[dict[str, Any]]:  # fmt: skip
    """Measures every case over one storage and prints one line of the table for each."""
    name = str(storage.dtype).removeprefix("torch.")
    headings = " ".join(f"{way:>10}" for way in ways)
    print(f"{name:>40} {'layers':>6} {headings} {'limit':>9} {'differs':>8} {'spread':>7}")
    rows = []
    for case in chosen:
        measured = Measured(case, storage, processors, window)
        if not measured.layers:
            print(f"{case.name:>40}: does not fit into {storage.nbytes >> 20} MiB")
            continue
        runs: dict[str, Callable[[], float]] = {}
        first, differs = None, 0.0
        for way in ways:
            if case.is_mixed and WAYS[way][0] is not Attention.BY_LENGTH:
                continue
            runs[way], answers = measured.run(way)
            first = answers.clone() if first is None else first
            differs = max(differs, float((answers.float() - first.float()).abs().max()))
        if not runs:
            continue
        times: dict[str, list[float]] = {way: [] for way in runs}
        for _ in range(rounds):
            for way, timed in runs.items():
                times[way].append(timed())
        us = {way: statistics.median(taken) for way, taken in times.items()}
        limit = measured.limit_us(bandwidth, operations)
        of_first = next(iter(times.values()))
        spread = (max(of_first) - min(of_first)) / statistics.median(of_first)
        rows.append({"case": case.name, "dtype": name, "layers": measured.layers, "us": us, "limit_us": limit,
                     "differs": differs})  # fmt: skip
        cells = " ".join(f"{us[way]:>10.2f}" if way in us else f"{'–':>10}" for way in ways)
        print(f"{case.name:>40} {measured.layers:>6} {cells} {limit:>9.2f} {differs:>8.1e} {spread:>7.1%}", flush=True)
    return rows


def picked(text: str, names: list[str], what: str) -> list[str]:
    """Returns the ``names`` that contain one of the comma-separated words."""
    words = [word.strip() for word in text.split(",") if word.strip()]
    for word in words:
        if not any(word in name for name in names):
            raise SystemExit(f"attention.py: no {what} has {word!r} in its name; there are {', '.join(names)}")
    return [name for name in names if not words or any(word in name for word in words)]


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gib", type=float, default=40 if IS_GPU else 0.01, help="of the KV that cases share")
    parser.add_argument("--rounds", type=int, default=5 if IS_GPU else 1)
    parser.add_argument("--cases", default="", help="those with one of these words in their name, by commas")
    parser.add_argument("--ways", default="", help="likewise; the first is what answers are compared with")
    parser.add_argument("--fp8", action="store_true", help="an FP8 cache too")
    parser.add_argument("--window", type=int, help="positions that a query attends to; default: all")
    options = parser.parse_args()
    if not IS_GPU and os.environ.get("TRITON_INTERPRET") != "1":
        parser.error("no GPU here; with TRITON_INTERPRET=1 the kernels run on the CPU, for no figure")
    name = torch.cuda.get_device_name() if IS_GPU else "CPU, interpreted"
    processors = torch.cuda.get_device_properties(0).multi_processor_count if IS_GPU else 132
    bandwidth, operations = copy_bytes_per_s(DEVICE.type), operations_per_s(DEVICE.type)
    print(f"{name}, torch {torch.__version__}, us a layer, {options.rounds} rounds, copy {bandwidth / 1e12:.2f} TB/s, "
          f"bf16 {operations / 1e12:.0f} TFLOP/s")  # fmt: skip
    bytes_held = int(options.gib * 2**30)
    ways = picked(options.ways, list(WAYS), "way")
    names = picked(options.cases, [case.name for case in cases()], "case")
    chosen = [case for case in cases() if case.name in names]
    rows: list[dict[str, Any]] = []
    for dtype in (DTYPE, FP8) if options.fp8 else (DTYPE,):
        storage = storage_of(dtype, bytes_held)
        rows += measure(storage, chosen, ways, options.rounds, processors, bandwidth, operations, options.window)
        del storage
    print(json.dumps({"device": name, "copy_bytes_per_s": bandwidth, "operations_per_s": operations, "rows": rows}))


if __name__ == "__main__":
    main()
