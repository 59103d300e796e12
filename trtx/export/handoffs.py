"""Whether KV really moves between the workers of a topology that somebody else started.

As the launcher asks it of its own: a handoff that fails answers its request all the same,
by computing the prompt again.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path

from trtx.errors import LaunchError
from trtx.launch import HandoffProofs
from trtx.topology import Plan, ProcessSpec

_NAMES_S = 30.0  # for the workers' own words of themselves to reach the frontend, after it counts them
_PAUSE_S = 0.5
_LEAST_S = 30.0


def prove_handoffs(
    url: str, model: str, workers: Mapping[str, int], *, engine: str, logs: Path, timeout_s: float
) -> str:
    """What was proved, as a clause; empty where no KV is handed over. Raises LaunchError with the first pair that moved
    none, and the cause.

    ``workers``: of each role, called prefill-0, prefill-1 and so on; ``logs``: the directory of their logs.
    """
    names = [(role, f"{role}-{index}") for role, count in workers.items() for index in range(count)]
    proofs = HandoffProofs(_plan(model, engine, names, logs), url)
    if not proofs.pairs:
        return ""
    deadline = time.monotonic() + _NAMES_S
    while not (names_there := {name for _, name in names} <= (ids := proofs.worker_ids()).keys()):
        if time.monotonic() >= deadline:
            break
        time.sleep(_PAUSE_S)
    if not names_there:
        lacking = ", ".join(sorted({name for _, name in names} - ids.keys()))
        raise LaunchError(f"{url}/trtx/workers does not name {lacking}, so that no handoff can be asked for")
    if (problem := proofs.prove_missing(ids, max(_LEAST_S, timeout_s))) is not None:
        raise LaunchError(problem)
    return proofs.told


def _plan(model: str, engine: str, names: list[tuple[str, str]], logs: Path) -> Plan:
    """What the proof looks at of a plan, and nothing else."""
    return Plan(
        mode="disagg" if any(role == "prefill" for role, _ in names) else "agg",
        engine=engine,
        model=model,
        model_path=Path(),
        namespace="",
        host="",
        port=0,
        internal_ports=(),
        run_dir=Path(),
        scratch_dir=Path(),
        processes=tuple(
            ProcessSpec(name=name, role=role, argv=(), env={}, log_path=logs / f"{name}.log")  # type: ignore[arg-type]
            for role, name in names
        ),
        engine_configs={},
        gpu_names=(),
        reasons=(),
    )
