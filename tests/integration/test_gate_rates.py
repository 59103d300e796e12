"""How often a gate is right: builds whose difference is known, held against each other round after round.

The rates want a machine with nothing else to do: where others compute meanwhile, a trial now and then is theirs, and
what was to pass gets no verdict.

``TRTX_ROUNDS=6`` asks six times in place of twenty. Each prints what it saw.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median

import pytest
from processes import TRTX

ROUNDS = int(os.environ.get("TRTX_ROUNDS", "20"))
TTFT_MS, ITL_MS = 40, 12
# What the engine alone decides. In TTFT, E2E and tokens/s is what the client and the frontend take of a request, too.
METRICS = ("inter_token_latency:p50",)
# One at a time, as the paced engine's TTFT is exact then; a median takes 11 requests.
LOAD = ("--concurrency", "1", "--request-count", "12", "--warmup-request-count", "1", "--isl", "32", "--osl", "16")
LOAD = (*LOAD, "--prompt-corpus", "random")
MOST_HALF_WIDTH = 0.007
SLOWED = {"3 % slower": 1.03, "10 % slower": 1.1}
LIMIT = ("--max-regression", "5%", "--metrics", ",".join(METRICS))


def trtx(directory: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*TRTX, *arguments], cwd=directory, capture_output=True, text=True, timeout=400,
        env=dict(os.environ),
    )  # fmt: skip


def bench(directory: Path, *arguments: str) -> tuple[Path, subprocess.CompletedProcess[str]]:
    """One run, and the directory that it was measured in."""
    before = set((directory / "runs").glob("*"))
    done = trtx(directory, "bench", "--model", "synthetic:tiny", *LOAD, *arguments)
    (run,) = set((directory / "runs").glob("*")) - before or {directory}
    return run, done


@dataclass(frozen=True)
class Gated:
    """What one gate of 5 % said."""

    exit_code: int
    intervals: dict[str, tuple[float, float, float]]  # by metric: ratio, and its ends

    @property
    def half_width(self) -> float:
        """Of the widest interval."""
        return max((high - low) / 2 for _, low, high in self.intervals.values())

    def __str__(self) -> str:
        told = (f"{name} {ratio:.4f} ± {(high - low) / 2:.4f}" for name, (ratio, low, high) in self.intervals.items())
        return f"exit {self.exit_code}; {', '.join(told)}"


def measured(directory: Path, slowed: float) -> Path:
    """A run of the paced engine, of a build that takes so many times as long for each token."""
    return paced(directory, slowed)[0]


def gated(directory: Path, slowed: float, baseline: Path) -> tuple[Path, Gated]:
    """The same, held against another run: the exit code of ``trtx bench``, and its verdict.json."""
    run, done = paced(directory, slowed, "--baseline", str(baseline), *LIMIT)
    found = json.loads((run / "verdict.json").read_text())["judgements"]
    ends = {one["criterion"]: one["interval"] for one in found if one["criterion"] in METRICS}
    return run, Gated(done, {name: (end["estimate"], end["low"], end["high"]) for name, end in ends.items()})


def paced(directory: Path, slowed: float, *gate: str) -> tuple[Path, int]:
    engine = ("--engine", "paced", "--set", f"paced_ttft_ms={TTFT_MS * slowed:g}")
    run, done = bench(directory, *engine, "--set", f"paced_itl_ms={ITL_MS * slowed:g}", "--trials", "5", *gate)
    assert run != directory and (gate or done.returncode == 0), done.stderr
    return run, done.returncode


def compared(directory: Path, baseline: Path, candidate: Path) -> Gated:
    """Two runs by ``trtx compare``, which has the same gate."""
    done = trtx(directory, "compare", str(baseline), str(candidate), *LIMIT, "--json")
    (found,) = json.loads(done.stdout)["comparisons"]
    ratios = {one["metric"]: one["ratio"] for one in found["metrics"]}
    return Gated(
        done.returncode, {name: (ends["estimate"], ends["low"], ends["high"]) for name, ends in ratios.items()}
    )


@pytest.mark.proof
def test_a_gate_of_5_percent_lets_3_pass_and_stops_10(tmp_path: Path) -> None:
    """Each run of a slower build lies between two of the baseline's build, and is held against both; each run of a
    build is held against the one before it."""
    seen: dict[str, list[Gated]] = {"one build": [], **{name: [] for name in SLOWED}}

    def note(name: str, gate: Gated) -> None:
        seen[name].append(gate)
        print(f"{name} {len(seen[name])}: {gate}", flush=True)

    baseline, before = measured(tmp_path, 1.0), dict[str, Path]()
    for _ in range(max(1, ROUNDS // 2)):
        slower = {}
        for name, slowed in SLOWED.items():
            slower[name], gate = gated(tmp_path, slowed, baseline)
            note(name, gate)
        baseline, gate = gated(tmp_path, 1.0, baseline)
        note("one build", gate)
        for name, run in slower.items():
            note(name, compared(tmp_path, baseline, run))
            if name in before:
                note("one build", compared(tmp_path, before[name], run))
        before = slower
    for name, found in seen.items():
        widths = [gate.half_width for gate in found]
        exits = Counter(gate.exit_code for gate in found)
        print(f"{name}: exits {dict(exits)}; half-width {median(widths):.2%} in the middle, at most {max(widths):.2%}")
    assert {gate.exit_code for gate in (*seen["one build"], *seen["3 % slower"])} == {0}
    assert {gate.exit_code for gate in seen["10 % slower"]} == {1}
    assert max(gate.half_width for found in seen.values() for gate in found) <= MOST_HALF_WIDTH


BURSTS = """
import random, sys, time
draw = random.Random(int(sys.argv[1]))
while True:
    end = time.monotonic() + draw.uniform(0.1, 2)
    while time.monotonic() < end:
        pass
    time.sleep(draw.uniform(0.1, 2))
"""


@contextlib.contextmanager
def busy_machine() -> Iterator[None]:
    """Two processes a core, each of which computes and rests by turns for up to two seconds."""
    count = 2 * len(os.sched_getaffinity(0))
    loops = [subprocess.Popen([sys.executable, "-c", BURSTS, str(seed)]) for seed in range(count)]
    try:
        yield
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()


@pytest.mark.proof
def test_on_a_busy_machine_two_runs_of_one_build_get_no_verdict(tmp_path: Path) -> None:
    """An engine that computes, three trials a run, and a limit that such a machine can't resolve."""
    rounds = max(2, ROUNDS // 4)
    engine = ("--engine", "torch", "--trials", "3")
    with busy_machine():
        runs = []
        for _ in range(rounds + 1):
            run, done = bench(tmp_path, *engine)
            assert done.returncode == 0, done.stderr
            runs.append(run)
        _, judged = bench(tmp_path, *engine, "--baseline", str(runs[0]), "--max-regression", "3%")
    found: list[int] = []
    for baseline, candidate in pairwise(runs):
        done = trtx(tmp_path, "compare", str(baseline), str(candidate), "--max-regression", "3%", "--json")
        found.append(done.returncode)
        (comparison,) = json.loads(done.stdout)["comparisons"]
        told = [
            f"{one['metric']} {one['ratio']['estimate']:.3f} ({one['verdict']})"
            for one in comparison["metrics"]
            if one["ratio"]
        ]
        print(f"{len(found)}/{rounds}: exit {done.returncode}; {', '.join(told)}", flush=True)
    assert found == [3] * rounds
    # A baseline whose trials differ by more than the limit is refused before anything is measured.
    assert judged.returncode == 3 or (judged.returncode == 2 and "can't be resolved" in judged.stderr), judged.stderr
