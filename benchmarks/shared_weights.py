"""Memory and start of engines that share one copy of the weights, beside engines with a copy each.

    python benchmarks/shared_weights.py --model synthetic:qwen3-8b      # one GPU that holds the weights twice
    python benchmarks/shared_weights.py --model synthetic:qwen3-0.6b    # a CPU

It uses the Python API, without Dynamo. Two engines are started one after the other, first with a copy each, then with a
``weight_group``. Each must give the same answers. Host memory is ``/proc/PID/smaps_rollup`` of both engine processes:
what they have alone (``Pss_Anon``), and their parts of shared memory (``Pss_Shmem``). GPU memory is what the driver
reports for the whole GPU, so nothing else may use it; on a CPU it is "–". The last line of stdout is one JSON document.
The exit code is 1 if an answer differs.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from contextlib import ExitStack
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from trtx.torch_engine.llmapi import LLM, SamplingParams

MIB = 1 << 20
GREEDY = SamplingParams(max_tokens=16, temperature=0.0, ignore_eos=True)
PROMPTS = [[(at * 37 + number * 101) % 3000 + 5 for at in range(40)] for number in range(3)]
FIELDS = ("Pss_Anon", "Pss_Shmem")


def gpu_mib() -> int | None:
    if not torch.cuda.is_available():
        return None
    free, total = torch.cuda.mem_get_info()
    return (total - free) // MIB


def host_mib(pid: int) -> dict[str, int]:
    rows = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:]
    found = {row.split(":")[0]: int(row.split()[1]) // 1024 for row in rows}
    return {name: found[name] for name in FIELDS}


def generated(llm: LLM) -> list[Any]:
    return [llm.generate(prompt, GREEDY) for prompt in PROMPTS]


def start_two(model: str, directory: str | None, config: dict[str, Any]) -> dict[str, Any]:
    """Starts two engines. ``directory``: of the group in which they share weights; None: a copy each."""
    seconds, used = [], [gpu_mib()]
    with ExitStack() as stack:
        engines = []
        for name in ("first", "second"):
            group = {"directory": directory, "name": name} if directory is not None else None
            began = time.perf_counter()
            engines.append(stack.enter_context(LLM(model, weight_group=group, **config)))
            seconds.append(round(time.perf_counter() - began, 2))
            used.append(gpu_mib())
        answers = [[one.outputs[0].token_ids for one in generated(llm)] for llm in engines]
        return {
            "shared_mib": None if engines[0].shared_weights is None else engines[0].shared_weights.num_bytes // MIB,
            "start_s": seconds,
            "gpu_mib": [
                None if before is None or after is None else after - before for before, after in pairwise(used)
            ],
            "host_mib": [host_mib(llm.engine_pid) for llm in engines],
            "answers": answers,
        }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="synthetic:tiny")
    parser.add_argument("--max-tokens", type=int, default=8192, help="of each KV pool")
    asked = parser.parse_args()
    config: dict[str, Any] = {
        "max_seq_len": 512,
        "max_batch_size": 8,
        "kv_cache_config": {"max_tokens": asked.max_tokens},
    }
    if torch.cuda.is_available():
        torch.zeros(1, device="cuda")  # this process's own context
    LLM(asked.model, **config).shutdown()  # reads the checkpoint into the page cache, or compiles kernels
    with tempfile.TemporaryDirectory() as directory:
        found = {"own": start_two(asked.model, None, config), "shared": start_two(asked.model, directory, config)}
    same = len({str(one) for variant in found.values() for one in variant.pop("answers")}) == 1
    for label, variant in found.items():
        for at, name in enumerate(("first", "second")):
            host = ", ".join(f"{field} {value} MiB" for field, value in variant["host_mib"][at].items())
            gpu = "–" if variant["gpu_mib"][at] is None else f"{variant['gpu_mib'][at]} MiB"
            print(f"{label:>6} {name:>6}: started in {variant['start_s'][at]} s, GPU {gpu}, {host}")
    print(json.dumps({"model": asked.model, "torch": torch.__version__, "same_answers": same, **found}))
    return 0 if same else 1


if __name__ == "__main__":
    sys.exit(main())
