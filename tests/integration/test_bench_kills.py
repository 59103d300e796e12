"""``kill -9`` of ``trtx bench`` at random moments of every stage of a run, each followed by ``--resume``.

``TRTX_KILLS=8 TRTX_KILL_SEED=3`` kills fewer times, at other moments.
"""

from __future__ import annotations

import os
import random
from pathlib import Path

import pytest
from killed_runs import Benches, Stage, assert_resumed, benches, run_of, stages

from trtx.runs.forms import LOCK, PLAN

SEED = int(os.environ.get("TRTX_KILL_SEED", "7"))
LOAD = "isl: 32, osl: 6, request_count: 12, warmup_request_count: 0, prompt_corpus: random"
PACED = "{{model: synthetic:tiny, engine: paced, overrides: [paced_ttft_ms=5, paced_itl_ms={itl}]}}"
SWEEP = f"topology: {PACED.format(itl=8)}\nload: {{concurrency: [1, 2], trials: 2, {LOAD}}}\n"
ARM = f"topology: {PACED}\nload: {{{{concurrency: [1], {LOAD}}}}}\n"


def moments(stages: tuple[Stage, ...], seconds: list[float], count: int) -> list[tuple[Stage, float]]:
    """Each stage in turn, in an order that is drawn, and a time of it: the moments in which a run is written are short
    beside its trials."""
    draw = random.Random(SEED)
    order = draw.sample(range(len(stages)), len(stages))
    places = [order[number % len(order)] for number in range(count)]
    return [(stages[place], draw.uniform(0, seconds[place])) for place in places]


def kill_and_resume(bench: Benches, reference: Path, seconds: list[float], count: int) -> None:
    for number, (stage, after_s) in enumerate(moments(bench.stages, seconds, count), 1):
        print(f"{number}/{count} (seed {SEED}): killed {after_s:.3f} s after: {stage.name}", end="", flush=True)
        parent = bench.directory / f"killed-{number:02d}"
        run = bench.kill(parent, stage, after_s)
        if run is None or not (run / LOCK.file).exists():
            if run is not None:
                refused = bench.resume(run)
                assert refused.returncode == 2 and refused.stderr.startswith("trtx: "), refused.stderr
                assert refused.stderr.count("\n") == 1
                assert ("start a new run" if (run / PLAN.file).exists() else LOCK.file) in refused.stderr
            print("; nothing to resume", flush=True)
            assert bench.start(parent).wait(240) == 0
            run = run_of(parent)
            assert run is not None
        held, made = assert_resumed(bench, run, reference)
        print(f"; {held} trials held, {made} measured", flush=True)


@pytest.mark.proof
def test_a_sweep_that_was_killed_at_any_moment_goes_on_as_if_it_had_not_been(tmp_path: Path) -> None:
    (tmp_path / "sweep.yaml").write_text(SWEEP)
    with benches(["sweep.yaml"], stages(trials=4, cells=2), tmp_path) as bench:
        reference, seconds = bench.uninterrupted()
        kill_and_resume(bench, reference, seconds, int(os.environ.get("TRTX_KILLS", "25")))


@pytest.mark.proof
def test_an_ab_run_that_was_killed_at_any_moment_goes_on_as_if_it_had_not_been(tmp_path: Path) -> None:
    for name, itl in (("quick", 4), ("slow", 8)):
        (tmp_path / f"{name}.yaml").write_text(ARM.format(itl=itl))
    arguments = ["ab", "quick.yaml", "slow.yaml", "--rounds", "2"]
    with benches(arguments, stages(trials=4, cells=2), tmp_path) as bench:
        reference, seconds = bench.uninterrupted()
        kill_and_resume(bench, reference, seconds, int(os.environ.get("TRTX_KILLS", "8")))
