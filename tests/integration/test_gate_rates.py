"""How often a gate is right: builds whose difference is known, held against each other round after round.

``TRTX_ROUNDS=5`` has fewer rounds. Each prints what it saw.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import pytest

TRTX = [sys.executable, "-c", "from trtx.cli.app import main; main()"]
ROUNDS = int(os.environ.get("TRTX_ROUNDS", "20"))
TTFT_MS, ITL_MS = 40, 12
# Medians of what the engine alone decides: in tokens/s is what the client takes between requests, too.
METRICS = ("inter_token_latency:p50", "request_latency:p50")
# One at a time, as the paced engine's TTFT is exact then; a median takes 11 requests.
LOAD = ("--concurrency", "1", "--request-count", "12", "--warmup-request-count", "1", "--isl", "32", "--osl", "16")
LOAD = (*LOAD, "--prompt-corpus", "random")
MOST_HALF_WIDTH = 0.007
SLOWED = {"as it was": 1.0, "3 % slower": 1.03, "10 % slower": 1.1}


def trtx(directory: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*TRTX, *arguments], cwd=directory, capture_output=True, text=True, timeout=400,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )  # fmt: skip


def bench(directory: Path, *arguments: str) -> tuple[Path, subprocess.CompletedProcess[str]]:
    """One run, and the directory that it was measured in."""
    before = set((directory / "runs").glob("*"))
    done = trtx(directory, "bench", "--model", "synthetic:tiny", *LOAD, *arguments)
    (run,) = set((directory / "runs").glob("*")) - before or {directory}
    return run, done


@dataclass(frozen=True)
class Gated:
    """What one gate said."""

    exit_code: int
    compared: tuple[dict[str, Any], ...]  # judgements of a ratio to the baseline

    @property
    def half_width(self) -> float:
        """Of the widest interval."""
        ends = [(one["interval"]["high"] - one["interval"]["low"]) / 2 for one in self.compared]
        return max(ends)

    @classmethod
    def of(cls, exit_code: int, verdict: dict[str, Any]) -> Gated:
        judged = [one for one in verdict["judgements"] if one["criterion"] in METRICS]
        return cls(exit_code, tuple(judged))


def paced(directory: Path, slowed: float, baseline: Path | None = None) -> tuple[Path, Gated | None]:
    """A run of the paced engine, held against another at a limit of 5 %."""
    engine = ("--engine", "paced", "--set", f"paced_ttft_ms={TTFT_MS * slowed:g}")
    engine = (*engine, "--set", f"paced_itl_ms={ITL_MS * slowed:g}", "--trials", "5")
    gate = ("--baseline", str(baseline), "--max-regression", "5%", "--metrics", ",".join(METRICS))
    run, done = bench(directory, *engine, *(gate if baseline else ()))
    if baseline is None:
        assert done.returncode == 0, done.stderr
        return run, None
    assert run != directory, done.stderr
    return run, Gated.of(done.returncode, json.loads((run / "verdict.json").read_text()))


@pytest.mark.proof
def test_a_gate_of_5_percent_lets_3_pass_and_stops_10(tmp_path: Path) -> None:
    seen: dict[str, list[Gated]] = {name: [] for name in SLOWED}
    baseline, _ = paced(tmp_path, 1.0)
    for number in range(1, ROUNDS + 1):
        of_round = baseline
        for name, slowed in SLOWED.items():
            run, gated = paced(tmp_path, slowed, of_round)
            assert gated is not None
            seen[name].append(gated)
            print(f"{number}/{ROUNDS} {name}: exit {gated.exit_code}; {_told(gated)}", flush=True)
            if slowed == 1.0:
                baseline = run  # of the next round
    for name, found in seen.items():
        widths = sorted(gated.half_width for gated in found)
        print(f"{name}: exits {[one.exit_code for one in found]}; half-widths {median(widths):.2%}, {widths[-1]:.2%}")
    assert [gated.exit_code for gated in seen["as it was"]] == [0] * ROUNDS
    assert [gated.exit_code for gated in seen["3 % slower"]] == [0] * ROUNDS
    assert [gated.exit_code for gated in seen["10 % slower"]] == [1] * ROUNDS
    assert max(gated.half_width for found in seen.values() for gated in found) <= MOST_HALF_WIDTH


def _told(gated: Gated) -> str:
    return ", ".join(
        f"{one['criterion']} {one['value']:.4f} ± {(one['interval']['high'] - one['interval']['low']) / 2:.4f}"
        for one in gated.compared
    )


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
        _, gated = bench(tmp_path, *engine, "--baseline", str(runs[0]), "--max-regression", "3%")
    found = []
    for baseline, candidate in pairwise(runs):
        done = trtx(tmp_path, "compare", str(baseline), str(candidate), "--max-regression", "3%", "--json")
        found.append(done.returncode)
        (comparison,) = json.loads(done.stdout)["comparisons"]
        told = [
            f"{one['metric']} {one['ratio']:.3f} ({one['verdict']})" for one in comparison["metrics"] if one["ratio"]
        ]
        print(f"{len(found)}/{rounds}: exit {done.returncode}; {', '.join(told)}", flush=True)
    assert found == [3] * rounds
    # A baseline whose trials differ by more than the limit is refused before anything is measured.
    assert gated.returncode == 3 or (gated.returncode == 2 and "can't be resolved" in gated.stderr), gated.stderr
