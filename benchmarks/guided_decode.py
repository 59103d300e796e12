"""Measures what guided decoding costs the embedded engine: decode steps with and without a grammar, and compilations.

    python benchmarks/guided_decode.py --model synthetic:qwen3-8b --batch 1,64,256

Scheduler, grammars and runner run in this process, without HTTP. Free and guided rounds alternate; both sample at
temperature 1 and generate the same number of tokens. A step's time is the median over all steps in which every sequence
decodes. ``masks`` is the host's time to decide which tokens each sequence may sample, a part of the guided step that
the device's forward hides if it is longer. ``compile`` is the time of one compilation, over distinct schemas. The last
line of stdout is one JSON document.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

import torch
from user_loads import ENDLESS_SCHEMA

from trtx.checkpoint import read_end_ids, resolve_checkpoint
from trtx.torch_engine.core import guided
from trtx.torch_engine.core.engine_core import EngineCore
from trtx.torch_engine.core.grammars import Grammars, load_vocabulary
from trtx.torch_engine.core.scheduler_limits import SchedulerLimits
from trtx.torch_engine.messages import Submit
from trtx.torch_engine.runner import RunnerArgs, create_runner
from trtx.torch_engine.sampling_plan import Grammar, SamplingPlan

SCHEMAS = 200  # distinct ones, for compilations


class Masks:
    """Measures :func:`trtx.torch_engine.core.guided.write_masks`, which the engine calls once for each guided step."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self._write = getattr(guided, "write_masks")  # noqa: B009
        setattr(guided, "write_masks", self)  # noqa: B010

    def __call__(self, *arguments: Any) -> None:
        began = time.perf_counter()
        self._write(*arguments)
        self.seconds.append(time.perf_counter() - began)


def decode(core: EngineCore, prompts: list[list[int]], osl: int, grammar: Grammar | None) -> list[float]:
    """Generates ``osl`` tokens for each prompt. Returns the seconds of the steps in which all of them decode."""
    plan = SamplingPlan(is_greedy=False, max_tokens=osl, grammar=grammar)
    for number, prompt in enumerate(prompts):
        core.submit(Submit(number, prompt, plan))
    seconds, finished, last = [], 0, 0.0
    while finished < len(prompts):
        report = core.step()
        now = time.perf_counter()
        updates = report.updates if report is not None else []
        if failed := next((update for update in updates if update.error is not None), None):
            raise SystemExit(f"guided_decode.py: {failed.error}")
        finished += sum(update.finish_reason is not None for update in updates)
        if sum(len(update.token_ids) for update in updates) == len(prompts):
            seconds += [now - last] if last else []
            last = now
        else:
            last = 0.0
    return seconds


def compilations(grammars: Grammars) -> list[float]:
    """Seconds of each compilation of ``SCHEMAS`` schemas that differ in one name."""
    seconds = []
    for number in range(SCHEMAS):
        schema = {"type": "object", "properties": {f"list{number}": ENDLESS_SCHEMA}}
        began = time.perf_counter()
        grammars.compile(Grammar("json", json.dumps(schema))).result()
        seconds.append(time.perf_counter() - began)
    return sorted(seconds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="synthetic:tiny", help="synthetic:<shape> or a checkpoint directory")
    parser.add_argument("--batch", default="1,16")
    parser.add_argument("--isl", type=int, default=512, help="prompt tokens")
    parser.add_argument("--osl", type=int, default=128, help="generated tokens")
    parser.add_argument("--rounds", type=int, default=3, help="free and guided ones each, at each batch size")
    options = parser.parse_args()
    batches = [int(batch) for batch in options.batch.split(",")]
    checkpoint = resolve_checkpoint(options.model, on_gpu=torch.cuda.is_available())
    model = Path(checkpoint.path)
    tokens = max(batches) * (options.isl + options.osl + 64)
    runner = create_runner(RunnerArgs(model_dir=model, max_batch_size=max(batches), max_tokens=tokens, guided=True))
    vocabulary = load_vocabulary(
        model / "tokenizer.json", vocab_size=runner.vocab_size, eos_ids=tuple(read_end_ids(model))
    )
    grammars = Grammars(vocabulary, vocab_size=runner.vocab_size)
    core = EngineCore(runner, SchedulerLimits(max(batches), 8192), enable_block_reuse=False, grammars=grammars)
    grammar, masks = Grammar("json", json.dumps(ENDLESS_SCHEMA)), Masks()
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else f"CPU, {torch.get_num_threads()} threads"
    print(f"{options.model}, {device}, torch {torch.__version__}, ISL {options.isl}, OSL {options.osl}")
    print(f"{'batch':>5}  {'free ms':>8}  {'guided ms':>9}  {'ratio':>6}  {'masks ms':>8}  {'p99':>8}")
    rows = []
    for batch in batches:
        generator = torch.Generator().manual_seed(batch)
        prompts = torch.randint(runner.vocab_size, (batch, options.isl), generator=generator).tolist()
        steps: dict[str, list[float]] = {"free": [], "guided": []}
        for number in range(options.rounds + 1):
            if number == 1:  # the first round of each kind does not count
                steps, masks.seconds = {"free": [], "guided": []}, []
            for kind in steps:
                steps[kind] += decode(core, prompts, options.osl, grammar if kind == "guided" else None)
        free, ours = statistics.median(steps["free"]) * 1e3, statistics.median(steps["guided"]) * 1e3
        spent = sorted(masks.seconds)
        row = {
            "batch": batch, "free_step_ms": free, "guided_step_ms": ours, "ratio": ours / free,
            "masks_ms": statistics.median(spent) * 1e3, "masks_p99_ms": spent[int(len(spent) * 0.99)] * 1e3,
        }  # fmt: skip
        masks.seconds = []
        rows.append(row)
        print(f"{batch:>5}  {free:>8.3f}  {ours:>9.3f}  {ours / free:>6.3f}  {row['masks_ms']:>8.3f}  "
              f"{row['masks_p99_ms']:>8.3f}", flush=True)  # fmt: skip
    seconds = compilations(grammars)
    compile_ms = {"p50": seconds[len(seconds) // 2] * 1e3, "p99": seconds[int(len(seconds) * 0.99)] * 1e3}
    print(f"compile: p50 {compile_ms['p50']:.2f} ms, p99 {compile_ms['p99']:.2f} ms, {SCHEMAS} schemas")
    print(json.dumps({"model": options.model, "device": device, "rows": rows, "compile_ms": compile_ms}))


if __name__ == "__main__":
    main()
