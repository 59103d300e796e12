"""Measures the seconds from ``trtx serve`` to a topology that has answered, by step.

    python benchmarks/start_time.py --model synthetic:qwen3-8b --starts 2

Each start is a new process that does what ``trtx serve`` does, and ends once the topology is ready. Frontend and worker
start in parallel, so their times overlap, and the worker's times make up the sum. Then the engine alone is loaded in
new processes with the same arguments, step by step, which is the part that the worker reports as its engine's load. The
first start on a machine compiles kernels, which later starts find in Triton's cache (``TRITON_CACHE_DIR``). The last
line of stdout is one JSON document.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

SERVE_S, ENGINE_S = 300.0, 200.0
_ENGINE_STEPS = {"load_weights": "weights", "num_kv_blocks": "size of the KV pool", "DecodeGraphs": "CUDA graphs"}
"""Functions that ``create_runner`` calls, with their names in the table. The rest of its time is kernels, tables and
zeroing the pool."""


def process_start() -> float:
    """Returns the creation time of this process in seconds since the epoch, with a resolution of 0.01 s."""
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    uptime_s = float(Path("/proc/uptime").read_text().split()[0])
    return time.time() - (uptime_s - int(fields[19]) / os.sysconf("SC_CLK_TCK"))


def serve_once(model: str, settings: list[str], output: Path) -> dict[str, Any]:
    """Starts a topology once; returns the seconds of each step, and the arguments of its engine."""
    began = process_start()
    from trtx.config import TopologySpec
    from trtx.launch import Event, Interruption, prepare, serve

    imported = time.time()
    spec = TopologySpec(model=model, engine="torch", mode="agg", port=0, overrides=tuple(settings))
    plan = prepare(spec, run_dir=output)
    planned = time.time()
    events: list[Event] = []
    with serve(plan, on_event=events.append, interruption=Interruption()) as topology:
        ready = time.time()
        (engine_s,) = [slot.status.load_seconds for slot in topology.slots if slot.status is not None]
        at = {(event.kind, event.name): event.at for event in events}
        worker, frontend = (
            next(slot.spec.name for slot in topology.slots if (slot.status is not None) is is_worker)
            for is_worker in (True, False)
        )
        steps = {
            "trtx: imports": imported - began,
            "trtx: checkpoint, plan": planned - imported,
            "frontend: started to listening": at["up", frontend] - at["starting", frontend],
            "worker: started to registered": at["up", worker] - at["starting", worker],
            "worker: of it, its engine": engine_s,
            "registered to routed": topology.load_seconds - (at["up", worker] - at["starting", frontend]),
            "first request (warm-up)": topology.warm_up_seconds,
            "all: trtx serve to ready": ready - began,
        }
    return {"steps": steps, "engine": {"model": str(plan.model_path), "arguments": plan.engine_configs["agg"]}}


def load_engine_once(model: str, arguments: dict[str, Any]) -> dict[str, float]:
    """Loads the engine in this process as its own process would; returns the seconds of each step."""
    began, steps = process_start(), {}
    begin = time.time()
    steps["interpreter"] = begin - began

    def lap(name: str) -> None:
        nonlocal begin
        steps[name] = steps.get(name, 0.0) + time.time() - begin
        begin = time.time()

    import torch

    lap("import torch")
    from trtx.torch_engine.core.process import runner_args
    from trtx.torch_engine.llmapi.arguments import resolve_llm_args
    from trtx.torch_engine.runner import create
    from trtx.torch_engine.runner.sampler import Sampler

    lap("import trtx")
    if torch.cuda.is_available():
        torch.zeros(1, device="cuda").cpu()
        lap("CUDA context")

    def timed(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def measured(*given: Any, **named: Any) -> Any:
            lap("kernels, tables, pool")
            found = call(*given, **named)
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            lap(name)
            return found

        return measured

    for attribute, name in _ENGINE_STEPS.items():
        setattr(create, attribute, timed(name, getattr(create, attribute)))
    Sampler.warm_up = timed("sampler's kernels", Sampler.warm_up)  # type: ignore[method-assign]
    create.create_runner(runner_args(resolve_llm_args(model, arguments)[0]))
    lap("kernels, tables, pool")
    return steps | {"all: the engine's process": sum(steps.values())}


def called(limit_s: float, *words: str) -> dict[str, Any]:
    """Runs this script with ``words`` and returns the JSON document in its last line. Raises SystemExit on failure."""
    command = [sys.executable, str(Path(__file__).resolve()), *words]
    try:
        ended = subprocess.run(command, capture_output=True, text=True, timeout=limit_s, check=False)
    except subprocess.TimeoutExpired:
        raise SystemExit(f"{' '.join(words[:2])} did not end within {limit_s:g} s") from None
    if ended.returncode:
        raise SystemExit(f"{' '.join(words[:2])} ended with {ended.returncode}:\n{ended.stderr[-2000:]}")
    document: dict[str, Any] = json.loads(ended.stdout.splitlines()[-1])
    return document


def told(what: str, number: int, steps: dict[str, float]) -> None:
    """Prints one start's times at once; the table comes only after all starts."""
    shown = ", ".join(f"{name} {seconds:.2f} s" for name, seconds in steps.items())
    print(f"- {what}, start {number + 1}: {shown}", file=sys.stderr, flush=True)


def show(title: str, starts: list[dict[str, float]]) -> None:
    print(f"{title:<34}" + "".join(f"{f'start {number}':>10}" for number in range(1, len(starts) + 1)))
    for name in starts[0]:
        print(f"  {name:<32}" + "".join(f"{steps[name]:>9.2f} s" for steps in starts), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="synthetic:qwen3-8b", help="synthetic:<shape> or a checkpoint directory")
    parser.add_argument("--set", action="append", default=[], help="engine config field, as trtx serve takes it")
    parser.add_argument("--starts", type=int, default=2, help="of either kind (default: %(default)s)")
    parser.add_argument("--serve-once", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--engine-once", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve_once is not None:
        print(json.dumps(serve_once(options.model, options.set, options.serve_once)))
        return
    if options.engine_once is not None:
        print(json.dumps(load_engine_once(options.model, json.loads(options.engine_once))))
        return
    settings = [word for one in options.set for word in ("--set", one)]
    served, loaded = [], []
    with tempfile.TemporaryDirectory(prefix="trtx-start-") as output:
        for number in range(options.starts):
            place = str(Path(output, str(number)))
            served.append(called(SERVE_S, "--serve-once", place, "--model", options.model, *settings))
            told("trtx serve", number, served[-1]["steps"])
    engine = served[0]["engine"]
    for number in range(options.starts):
        arguments = json.dumps(engine["arguments"])
        loaded.append(called(ENGINE_S, "--engine-once", arguments, "--model", engine["model"]))
        told("the engine alone", number, loaded[-1])
    import torch

    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    print(f"{options.model}, {device}, torch {torch.__version__}")
    show("trtx serve", [one["steps"] for one in served])
    show("the engine alone", loaded)
    document = {"model": options.model, "device": device, "serve": [one["steps"] for one in served], "engine": loaded}
    print(json.dumps(document))


if __name__ == "__main__":
    main()
