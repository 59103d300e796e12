"""Measures single steps of the embedded engine's runner: decodes, prompt tokens, or both, by groups of kernels.

    python benchmarks/step_profile.py --model synthetic:qwen3-8b --steps 8x640,32x2600,32x2600+224@2048

A step is ``DECODES x CONTEXT``, ``+ TOKENS @ PREFIX`` for a prompt chunk behind a cached prefix, or a chunk alone
(``0x0+8192@0``). ``wall`` is the median time of a step until its tokens are on the host. The other times are those of
the GPU's kernels in the same step, by torch's profiler, in ms a step; kernels that overlap count fully. ``--kernels N``
prints the N slowest kernels of each step as well. The last line of stdout is one JSON document.
"""

# torch leaves its profiler untyped.
# mypy: disable-error-code="no-untyped-call"

from __future__ import annotations

import argparse
import json
import re
import statistics
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from trtx.checkpoint import resolve_checkpoint
from trtx.torch_engine.llmapi.sampling import SamplingParams, resolve_sampling
from trtx.torch_engine.runner import RunnerArgs, create_runner
from trtx.torch_engine.step import Batch, ModelRunner, ScheduledSequence

STEPS = "1x640,8x640,64x640,32x2600,32x640+224@0,32x2600+224@2048,64x640+448@0,0x0+8192@0"
TIMED = 12
PROFILED = 4
PLACES = re.compile(r"(\d+)x(\d+)(?:\+(\d+)@(\d+))?")
GROUPS = {
    "matmul": re.compile(r"gemm|nvjet|cutlass|splitK|cublas|one_row_kernel|few_rows_kernel", re.IGNORECASE),
    "attention": re.compile(r"attention_kernel|plan_kernel"),
}


@dataclass(frozen=True, slots=True)
class Wanted:
    """A step to measure. ``tokens`` is 0 without a prompt chunk."""

    name: str
    decodes: int
    context: int
    tokens: int
    prefix: int

    @classmethod
    def of(cls, text: str) -> Wanted:
        """Parses one step of ``--steps``. Raises ValueError."""
        found = PLACES.fullmatch(text)
        if found is None or (found[1] == "0" and found[3] is None):
            raise ValueError(f"{text!r} is no step; expected such as 8x640 or 32x2600+224@2048")
        return cls(text, *(int(part or 0) for part in found.groups()))

    def lengths(self) -> list[int]:
        """Tokens of KV of each sequence after the step."""
        return [self.context] * self.decodes + ([self.prefix + self.tokens] if self.tokens else [])

    def sequences(self, blocks: list[int], per_block: int, groups: int, vocabulary: int) -> list[ScheduledSequence]:
        generator, sampling = torch.Generator().manual_seed(1), resolve_sampling(SamplingParams())
        found, free = [], iter(blocks)
        for slot, length in enumerate(self.lengths()):
            count = 1 if slot < self.decodes else self.tokens
            ids = torch.randint(vocabulary, (length,), generator=generator).tolist()
            table = [[next(free) for _ in range(-(-length // per_block))] for _ in range(groups)]
            found.append(
                ScheduledSequence(
                    slot, True, ids[length - count :], length - count, table, True, sampling, ids, [], slot
                )
            )
        return found


def group_of(kernel: str) -> str:
    return next((group for group, pattern in GROUPS.items() if pattern.search(kernel)), "other")


def kernels_of(profile: torch.profiler.profile) -> dict[str, float]:
    """Returns the ms of each kernel's name over all profiled steps."""
    found: dict[str, float] = {}
    for event in profile.events() or []:
        if event.device_type.name == "CUDA" and event.device_time_total:
            found[event.name] = found.get(event.name, 0.0) + event.device_time_total / 1e3
    return found


def measure(runner: ModelRunner, wanted: Wanted, blocks: list[int], shown: int) -> dict[str, Any]:
    groups = len(runner.geometry.groups)
    sequences = wanted.sequences(blocks, runner.geometry.tokens_per_block, groups, runner.vocab_size)
    walls = []
    for _ in range(TIMED):
        began = time.perf_counter()
        runner.launch(Batch(sequences)).results()
        walls.append((time.perf_counter() - began) * 1e3)
        for sequence in sequences:
            sequence.is_first = False
    row: dict[str, Any] = {"step": wanted.name, "wall_ms": statistics.median(walls[2:])}
    if torch.cuda.is_available():
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            for _ in range(PROFILED):
                runner.launch(Batch(sequences)).results()
        kernels = {name: total / PROFILED for name, total in kernels_of(profile).items()}
        for group in (*GROUPS, "other"):
            row[f"{group}_ms"] = sum(each for name, each in kernels.items() if group_of(name) == group)
        row["kernels"] = dict(sorted(kernels.items(), key=lambda one: -one[1])[:shown])
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="synthetic:qwen3-8b", help="synthetic:<shape> or a checkpoint directory")
    parser.add_argument("--steps", default=STEPS)
    parser.add_argument("--kernels", type=int, default=0)
    parser.add_argument("--max-num-tokens", type=int, default=8192)
    parser.add_argument("--tokens-per-block", type=int, default=32)
    options = parser.parse_args()
    try:
        steps = [Wanted.of(text) for text in options.steps.split(",")]
    except ValueError as error:
        parser.error(str(error))
    per_block = options.tokens_per_block
    most = max(sum(-(-length // per_block) for length in step.lengths()) for step in steps)
    checkpoint = resolve_checkpoint(options.model, on_gpu=torch.cuda.is_available())
    args = RunnerArgs(
        model_dir=Path(checkpoint.path), max_batch_size=max(len(step.lengths()) for step in steps),
        max_num_tokens=options.max_num_tokens, max_seq_len=max(max(step.lengths()) for step in steps) + 1,
        tokens_per_block=per_block, max_tokens=(most + 1) * per_block,
    )  # fmt: skip
    runner = create_runner(args)
    blocks = torch.randperm(runner.num_blocks, generator=torch.Generator().manual_seed(0)).tolist()
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    print(f"{options.model}, {device}, torch {torch.__version__}")
    print(f"{'step':>24}  {'wall ms':>8}  " + "  ".join(f"{group:>9}" for group in (*GROUPS, "other")))
    rows = []
    for step in steps:
        row = measure(runner, step, blocks, options.kernels)
        rows.append(row)
        parts = [row.get(f"{group}_ms") for group in (*GROUPS, "other")]
        shown = "  ".join(f"{'–' if part is None else format(part, '.3f'):>9}" for part in parts)
        print(f"{step.name:>24}  {row['wall_ms']:>8.3f}  {shown}", flush=True)
        for name, each in row.get("kernels", {}).items():
            print(f"{'':>24}  {each:>8.3f}  {name[:110]}", flush=True)
    runner.close()
    print(json.dumps({"model": options.model, "device": device, "rows": rows}))


if __name__ == "__main__":
    main()
