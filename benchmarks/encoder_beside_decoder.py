"""Measures how a vision tower and a decoder on one GPU slow each other: in two processes, or on two streams of one.

    python benchmarks/encoder_beside_decoder.py --model synthetic:qwen2.5-vl-7b --grid 1,72,72    # on a GPU
    python benchmarks/encoder_beside_decoder.py --model synthetic:tiny-qwen2.5-vl --grid 1,8,8 --seconds 2

The decoder is the whole engine except its client, with an endless load: ``decodes`` (``--batch`` sequences of ``--isl``
tokens) or ``prompts`` (as many prompts as fit in a forward, one output token each, one after the other). The encoder
encodes one image after the other, including copies to the device. The ways are ``alone`` (each without the other),
``processes`` (as in serving), ``streams`` (a thread in the decoder's process with its own CUDA stream) and ``urgent``
(the same, with a stream of higher priority than the decoder's). The last line of stdout is one JSON document.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import random
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from encoder_batches import pixels

from trtx.checkpoint import resolve_checkpoint
from trtx.ipc.encoder_messages import EncoderArgs
from trtx.torch_engine.core.engine_core import EngineCore
from trtx.torch_engine.core.scheduler import SchedulerLimits
from trtx.torch_engine.llmapi.sampling import SamplingParams, resolve_sampling
from trtx.torch_engine.messages import Submit
from trtx.torch_engine.runner import RunnerArgs, TorchRunner, create_runner
from trtx.torch_engine.vision.load import load_tower
from trtx.torch_engine.vision.towers import Tower

WAYS = ("alone", "processes", "streams", "urgent")
LOADS = ("decodes", "prompts")
WARM = 3  # images, and steps, that don't count


@torch.inference_mode()
def encode(tower: Tower, grid: tuple[int, int, int], stop: Callable[[], bool]) -> list[float]:
    """Encodes images on the caller's stream until ``stop``; returns the milliseconds of each."""
    item, took = pixels(tower, 0, grid), list[float]()
    while not stop():
        began = time.perf_counter()
        rows = tower.encode([item])[0]
        if rows.is_cuda:
            torch.cuda.current_stream().synchronize()
        took.append(1e3 * (time.perf_counter() - began))
    return took[WARM:]


def decode(runner: TorchRunner, load: str, options: argparse.Namespace, stop: Callable[[], bool]) -> list[float]:
    """Runs the decoder until ``stop``; returns the milliseconds of each step that the engine reports."""
    dice = random.Random(7)
    batch = options.batch if load == "decodes" else max(1, options.max_num_tokens // options.isl)
    core = EngineCore(runner, SchedulerLimits(batch, options.max_num_tokens))
    osl = options.longest - options.isl if load == "decodes" else 1
    plan = resolve_sampling(SamplingParams(max_tokens=osl, ignore_eos=True, temperature=1.0))
    count, ended, took, decoding = 0, 0, list[float](), set[int]()
    began = time.perf_counter()
    while not stop() or len(took) < WARM:
        while count - ended < batch:
            core.submit(Submit(count, dice.choices(range(runner.vocab_size), k=options.isl), plan))
            count += 1
        report = core.step()
        if report is None:
            continue
        now = time.perf_counter()
        decoding |= {update.sequence_id for update in report.updates}
        ended += sum(update.finish_reason is not None for update in report.updates)
        if load == "prompts" or len(decoding) >= batch:
            took.append(1e3 * (now - began))
        began = now
    core.abort(range(count))
    while core.wait_s == 0.0:
        core.step()
    return took[WARM:]


class OtherProcess:
    """A tower in another process, which encodes between :meth:`start` and :meth:`stop`."""

    def __init__(self, options: argparse.Namespace) -> None:
        self._process = subprocess.Popen(
            [sys.executable, __file__, "--model", options.model, "--grid", options.grid, "--encoder"],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        self._read()

    def _read(self) -> Any:
        assert self._process.stdout is not None
        return json.loads(self._process.stdout.readline())

    def _say(self, word: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(word + "\n")
        self._process.stdin.flush()

    def start(self) -> None:
        self._say("start")
        self._read()

    def stop(self) -> list[float]:
        self._say("stop")
        found: list[float] = self._read()
        return found

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


def be_encoder(options: argparse.Namespace) -> None:
    """Runs the other process: prints a JSON line when loaded, one when encoding starts, and one with the times."""
    tower, grid = tower_of(options), grid_of(options)
    encode(tower, grid, times(WARM + 2))
    print("{}", flush=True)
    for _ in sys.stdin:
        stopped = threading.Event()
        threading.Thread(target=set_at_next_line, args=[stopped], daemon=True).start()
        print("{}", flush=True)
        print(json.dumps(encode(tower, grid, stopped.is_set)), flush=True)


def set_at_next_line(event: threading.Event) -> None:
    sys.stdin.readline()
    event.set()


def times(count: int) -> Callable[[], bool]:
    left = iter(range(count))
    return lambda: next(left, None) is None


def after(seconds: float) -> Callable[[], bool]:
    end = time.perf_counter() + seconds
    return lambda: time.perf_counter() >= end


def grid_of(options: argparse.Namespace) -> tuple[int, int, int]:
    time_, height, width = (int(one) for one in options.grid.split(","))
    return time_, height, width


def tower_of(options: argparse.Namespace) -> Tower:
    return load_tower(EncoderArgs(model=str(resolve_checkpoint(options.model).path)))


@contextlib.contextmanager
def encoding(tower: Tower, options: argparse.Namespace, priority: int, took: list[float]) -> Iterator[None]:
    """A context manager whose thread encodes while the block runs, on its own CUDA stream if there is a GPU."""
    stopped = threading.Event()

    def run() -> None:
        with contextlib.ExitStack() as stack:
            if tower.device.type == "cuda":
                own = torch.cuda.Stream(priority=priority)  # type: ignore[no-untyped-call]
                stack.enter_context(torch.cuda.stream(own))
            took.extend(encode(tower, grid_of(options), stopped.is_set))

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield
    finally:
        stopped.set()
        thread.join()


def measure(
    way: str, load: str, runner: TorchRunner, tower: Tower, other: OtherProcess, options: argparse.Namespace
) -> tuple[list[float], list[float]]:
    """Returns the milliseconds of each image, and of each step."""
    pictures: list[float] = []
    if way == "alone":
        pictures = encode(tower, grid_of(options), after(options.seconds))
        return pictures, decode(runner, load, options, after(options.seconds))
    if way == "processes":
        other.start()
        steps = decode(runner, load, options, after(options.seconds))
        return other.stop(), steps
    with encoding(tower, options, -1 if way == "urgent" else 0, pictures):
        steps = decode(runner, load, options, after(options.seconds))
    return pictures, steps


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="synthetic:qwen2.5-vl-7b")
    parser.add_argument("--grid", default="1,72,72", help="of a picture: time, height, width in patches")
    parser.add_argument("--batch", type=int, default=8, help="sequences that decode")
    parser.add_argument("--isl", type=int, default=1300, help="of a sequence: a picture's rows and a question")
    parser.add_argument("--longest", type=int, default=8192, help="tokens of a sequence that decodes")
    parser.add_argument("--max-num-tokens", type=int, default=2048, help="of a pass")
    parser.add_argument("--seconds", type=float, default=4.0, help="of each measurement")
    parser.add_argument("--encoder", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.encoder:
        be_encoder(options)
        return
    checkpoint = resolve_checkpoint(options.model, on_gpu=torch.cuda.is_available())
    runner = create_runner(
        RunnerArgs(
            model_dir=Path(checkpoint.path), max_batch_size=options.batch, max_num_tokens=options.max_num_tokens,
            max_seq_len=options.longest, tokens_per_block=32, max_tokens=(options.batch + 1) * options.longest,
        )
    )  # fmt: skip
    tower, other = tower_of(options), OtherProcess(options)
    gc.collect()
    gc.freeze()
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    print(f"{options.model}, {device}, torch {torch.__version__}, a picture of {options.grid} patches", flush=True)
    print(f"{'load':>8} {'way':>10} {'ms a picture: p50':>18} {'p90':>8} {'pictures/s':>11} {'step ms p50':>12} "
          f"{'p90':>8} {'steps/s':>8}", flush=True)  # fmt: skip
    rows = []
    try:
        for load in LOADS:
            for way in WAYS:
                pictures, steps = measure(way, load, runner, tower, other, options)
                row: dict[str, Any] = {"load": load, "way": way, "pictures": pictures, "steps": steps}
                rows.append(row)
                shown = " ".join(
                    f"{statistics.median(took):{wide}.2f} {sorted(took)[int(0.9 * (len(took) - 1))]:8.2f} "
                    f"{1e3 * len(took) / sum(took):{rate}.1f}"
                    for took, wide, rate in ((pictures, 18, 11), (steps, 12, 8))
                )
                print(f"{load:>8} {way:>10} {shown}", flush=True)
    finally:
        other.close()
    print(json.dumps({"model": options.model, "device": device, "rows": rows}))


if __name__ == "__main__":
    main()
