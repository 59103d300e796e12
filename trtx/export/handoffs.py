"""Proves that KV is transferred between the workers of a topology that trtx did not start.

The launcher makes the same proof for its own topologies. It is necessary because a request whose KV handoff fails is
still answered: the decode worker recomputes the prompt.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path

import httpx

from trtx.engine.worker_facts import PATH, of_body
from trtx.errors import LaunchError
from trtx.launch import HandoffProofs
from trtx.tls import trust_of
from trtx.topology import Plan, ProcessSpec

_NAMES_S = 30.0  # how long the facts that workers publish may take to reach the frontend after it counts the workers
_PAUSE_S = 0.5
_LEAST_S = 30.0
_ASKED_S = 5.0


def prove_handoffs(
    url: str, model: str, workers: Mapping[str, int], *, engine: str, logs: Path, timeout_s: float
) -> str:
    """Proves the KV handoff of each pair of workers; returns a clause that says so, or "" without disaggregation.

    ``workers``: the minimum number of workers of each role. ``logs``: the directory of their logs, which have the names
    that the workers publish. Raises LaunchError, which names the first pair without a transfer and the cause.
    """
    if not HandoffProofs(_plan(model, engine, [(role, role) for role in workers], logs), url).pairs:
        return ""
    proofs = HandoffProofs(_plan(model, engine, _published(url, model, workers), logs), url)
    if (problem := proofs.prove_missing(proofs.worker_ids(), max(_LEAST_S, timeout_s))) is not None:
        raise LaunchError(problem)
    return proofs.summary


def _published(url: str, model: str, workers: Mapping[str, int]) -> list[tuple[str, str]]:
    """Returns role and name of each worker, once the frontend lists enough. Raises LaunchError after a timeout."""
    deadline = time.monotonic() + _NAMES_S
    while True:
        found = _told(url, model)
        lacking = [
            f"{sum(role == one for one, _ in found)} of {count} {role} workers"
            for role, count in workers.items()
            if sum(role == one for one, _ in found) < count
        ]
        if not lacking:
            return found
        if time.monotonic() >= deadline:
            raise LaunchError(f"{url}{PATH} names {' and '.join(lacking)}, so that not every handoff can be asked for")
        time.sleep(_PAUSE_S)


def _told(url: str, model: str) -> list[tuple[str, str]]:
    try:
        answer = httpx.get(f"{url}{PATH}", timeout=_ASKED_S, trust_env=False, verify=trust_of(url))
    except httpx.HTTPError:
        return []
    told = of_body(answer.content) if answer.status_code == 200 else None
    return sorted((one.facts.role, one.facts.name) for one in told or () if one.model == model)


def _plan(model: str, engine: str, names: list[tuple[str, str]], logs: Path) -> Plan:
    """Returns a plan with only the fields that the proof reads."""
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
