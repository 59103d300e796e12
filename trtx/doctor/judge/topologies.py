"""Checks running topologies, leftovers of earlier runs, and environment variables that workers inherit."""

from __future__ import annotations

import shlex
from collections.abc import Iterator

from trtx.doctor.check import Check, failed, ok, warning
from trtx.doctor.facts import Facts
from trtx.engine.tensorrt_llm.environment import job_variables

_RANK_COUNTS = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "PMIX_SIZE", "SLURM_STEP_NUM_TASKS")


def judge_topologies(facts: Facts) -> Iterator[Check]:
    running = [topology for topology in facts.topologies if topology.is_guarded]
    orphans = [topology for topology in facts.topologies if not topology.is_guarded and topology.pids]
    scratches = [topology.scratch for topology in facts.topologies if not topology.is_guarded and topology.scratch]
    if running:
        names = ", ".join(f"{topology.name} ({len(topology.pids)} processes)" for topology in running)
        yield ok("running topologies", names)
    if orphans:
        pids = [pid for topology in orphans for pid in topology.pids]
        yield failed(
            "leftover processes",
            f"{len(pids)} of {', '.join(topology.name for topology in orphans)}, whose launcher is gone",
            "none: they hold ports and memory",
            f"kill -9 {' '.join(map(str, pids))}",
        )
    if scratches:
        yield warning(
            "leftover files",
            f"{len(scratches)} directories of topologies that have ended",
            "none",
            f"rm -r {' '.join(shlex.quote(str(path)) for path in scratches)}",
        )
    if not running and not orphans and not scratches:
        yield ok("leftovers", "none of an earlier run")


def judge_environment(facts: Facts) -> Iterator[Check]:
    """Checks for variables of an MPI job. An engine that sees them joins that job (TensorRT-LLM #5495, ai-dynamo #808),
    so trtx removes them."""
    environment = facts.environment
    # isdecimal, because isdigit accepts ², which int() refuses. Only 9 digits, because int() refuses very long numbers.
    counts = {name: environment.get(name, "") for name in _RANK_COUNTS}
    ranks = [name for name, count in counts.items() if count[:9].isdecimal() and int(count[:9]) > 1]
    if ranks:
        yield failed(
            "MPI variables",
            f"{ranks[0]}={environment[ranks[0]]}: one trtx for each rank would start a topology of its own",
            "one process: trtx starts the ranks of its engines",
            "start trtx without mpirun, or with srun --ntasks=1",
        )
        return
    if found := job_variables(environment):
        yield ok("MPI variables", f"{_few(found)}: kept from the engines")


def _few(names: list[str]) -> str:
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if names[4:] else "")
