"""Times sleep and wake of an engine, and compares its answers and its GPU memory before and after.

    python benchmarks/sleep.py --model synthetic:qwen3-8b                              # one H100, about 70 s
    python benchmarks/sleep.py --model synthetic:tiny --cycles 3 --max-seq-len 512     # a CPU

It uses the Python API, without Dynamo. Each of ``--cycles`` cycles starts ``--open`` requests of ``--tokens`` tokens,
calls ``release`` while they are open, and then ``resume``. After each wake, the first prompt must get the answer that
it got before the first sleep. The KV pool and the weights are then timed alone, without requests.
``--updates`` also times an update to other weights and back. ``--restore`` is the restore mode of the weights.

GPU memory is what ``nvidia-smi`` shows for the whole first GPU, so nothing else may use it; on a CPU it is "–". The
last line of stdout is one JSON document. The exit code is 1 if an answer differs or a request did not finish.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from trtx.checkpoint import resolve_checkpoint
from trtx.torch_engine.llmapi import LLM, SamplingParams

PROMPT_TOKENS = 200
ANSWER_TOKENS = 32
PROMPTS = 4
DRAIN_S = 300.0


def used_mib() -> int | None:
    """MiB in use on the first GPU; None without one."""
    command = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    try:
        return int(subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()[0])
    except (OSError, subprocess.CalledProcessError, IndexError, ValueError):
        return None


def timed(call: Callable[..., Any], *arguments: Any) -> float:
    began = time.perf_counter()
    call(*arguments)
    return time.perf_counter() - began


def spread(values: list[float]) -> dict[str, float]:
    return {"p50": statistics.median(values), "min": min(values), "max": max(values)}


class Sleeper:
    """One engine, and the answers that it gave before its first sleep."""

    def __init__(self, options: argparse.Namespace, model: Path) -> None:
        self.options, self.model = options, model
        sleeps = {"restore_modes": {"model_weights": options.restore}}
        self.llm = LLM(
            model, sleep_config=sleeps, max_batch_size=64, max_seq_len=options.max_seq_len,
            tensor_parallel_size=options.tp,
        )  # fmt: skip
        self.greedy = SamplingParams(max_tokens=ANSWER_TOKENS, temperature=0.0, ignore_eos=True)
        ids = options.vocabulary - 100
        self.prompts = [[(at * 37 + n * 101) % ids + 50 for at in range(PROMPT_TOKENS)] for n in range(PROMPTS)]
        self.expected = self.answers()

    def answers(self, count: int = PROMPTS) -> list[list[int]]:
        return [
            list(self.llm.generate_async(one, self.greedy).result().outputs[0].token_ids)
            for one in self.prompts[:count]
        ]

    def cycles(self) -> dict[str, Any]:
        options, llm = self.options, self.llm
        asked = SamplingParams(max_tokens=options.tokens, temperature=0.0, ignore_eos=True)
        sleeps, wakes, asleep = [], [], []
        equal = whole = 0
        for _ in range(options.cycles):
            load = [llm.generate_async(self.prompts[n % PROMPTS], asked) for n in range(options.open)]
            sleeps.append(timed(partial(llm.release, timeout_s=DRAIN_S)))
            whole += sum(len(one.result().outputs[0].token_ids) == options.tokens for one in load)
            asleep.append(used_mib())
            wakes.append(timed(llm.resume))
            equal += self.answers(1) == self.expected[:1]
        return {
            "sleep_s": spread(sleeps), "wake_s": spread(wakes), "asleep_mib": asleep[-1], "awake_mib": used_mib(),
            "equal_answers": equal, "whole_requests": whole,
        }  # fmt: skip

    def alone(self, tag: str) -> dict[str, Any]:
        """Sleep and wake of one kind of memory, five times, without requests."""
        pairs = [(timed(self.llm.release, [tag]), timed(self.llm.resume, [tag])) for _ in range(5)]
        return {"sleep_s": spread([one for one, _ in pairs]), "wake_s": spread([one for _, one in pairs])}

    def updates(self) -> dict[str, Any]:
        with tempfile.TemporaryDirectory() as directory:
            other = Path(directory) / "other"
            shutil.copytree(self.model, other)
            config = json.loads((other / "config.json").read_text())
            config["trtx_synthetic"]["seed"] = 5
            (other / "config.json").write_text(json.dumps(config))
            there = timed(self.llm.update_weights, other)
            differ = self.answers() != self.expected
            back = timed(self.llm.update_weights, self.model)
        return {"update_s": there, "update_back_s": back, "answers_differ": differ,
                "first_answers_again": self.answers() == self.expected}  # fmt: skip


def _seconds(of: dict[str, float]) -> str:
    return f"{of['p50']:.2f} ({of['min']:.2f} to {of['max']:.2f})"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="synthetic:qwen3-8b", help="synthetic:<shape> or a checkpoint directory")
    parser.add_argument("--restore", choices=("PINNED", "CPU", "NONE"), default="PINNED", help="of the weights")
    parser.add_argument("--tp", type=int, default=1, help="GPUs that share each layer")
    parser.add_argument("--cycles", type=int, default=20)
    parser.add_argument("--open", type=int, default=16, help="requests at each sleep")
    parser.add_argument("--tokens", type=int, default=48, help="of each of these requests")
    parser.add_argument("--max-seq-len", type=int, default=4096)
    parser.add_argument("--vocabulary", type=int, default=1000, help="ids of prompts are below")
    parser.add_argument(
        "--updates", action="store_true", help="needs a synthetic shape of a real model, such as qwen3-8b"
    )
    options = parser.parse_args()
    model = resolve_checkpoint(options.model, on_gpu=torch.cuda.is_available()).path
    found: dict[str, Any] = {"empty_mib": used_mib()}
    began = time.perf_counter()
    sleeper = Sleeper(options, model)
    found |= {"ready_s": time.perf_counter() - began, "serving_mib": used_mib()}
    found["first_sleep_s"], found["first_asleep_mib"] = timed(sleeper.llm.release), used_mib()
    found["first_wake_s"] = timed(sleeper.llm.resume)
    found["equal_after_first"] = sleeper.answers() == sleeper.expected
    found |= sleeper.cycles()
    found["alone"] = {tag: sleeper.alone(tag) for tag in ("kv_cache", "model_weights")}
    if options.updates:
        found["updates"] = sleeper.updates()
    sleeper.llm.shutdown()
    mib = {name: "–" if found[name] is None else f"{found[name]:,}" for name in found if name.endswith("_mib")}
    rows = [
        ("First sleep", f"{found['first_sleep_s']:.2f}"),
        (f"Sleep with {options.open} open requests of {options.tokens} tokens, {options.cycles} times",
         _seconds(found["sleep_s"])),
        (f"Wake, {options.cycles} times", _seconds(found["wake_s"])),
        *((f"{step} of {tag} alone, 5 times", _seconds(found["alone"][tag][f"{step.lower()}_s"]))
          for tag in found["alone"] for step in ("Sleep", "Wake")),
    ]  # fmt: skip
    print("| Step | Seconds, median (lowest to highest) |\n|---|--:|")
    for step, seconds in rows:
        print(f"| {step} | {seconds} |")
    print(
        f"GPU memory in MiB: {mib['empty_mib']} before, {mib['serving_mib']} serving, {mib['first_asleep_mib']} "
        f"asleep, {mib['asleep_mib']} asleep in the last cycle, {mib['awake_mib']} awake again"
    )
    asked = options.cycles * options.open
    print(f"{found['equal_answers']} of {options.cycles} first answers are equal; {found['whole_requests']} of {asked} "
          "requests finished")  # fmt: skip
    if options.updates:
        print(f"updates: {found['updates']}")
    print(json.dumps({"options": vars(options), "torch": torch.__version__, **found}))
    good = found["equal_after_first"] and found["equal_answers"] == options.cycles and found["whole_requests"] == asked
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
