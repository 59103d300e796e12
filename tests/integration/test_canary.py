"""Dynamo's health canary against real workers: what the system port says, and what the canary leaves behind."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
from processes import HTTP, Child, Topology, freeze, topology, until
from test_worker import metric, post
from test_worker_torch import TORCH

from trtx.checkpoint import resolve_checkpoint

pytestmark = pytest.mark.proof

ENGINES: dict[str, dict[str, Any]] = {"paced": {}, "torch": TORCH}
QUICK = {"DYN_HEALTH_CHECK_ENABLED": "true", "DYN_CANARY_WAIT_TIME": "1", "DYN_HEALTH_CHECK_REQUEST_TIMEOUT": "1"}


@pytest.fixture(scope="module")
def model() -> Path:
    return resolve_checkpoint("synthetic:tiny").path


def health(worker: Child) -> int:
    return HTTP.get(f"http://127.0.0.1:{worker.system_port}/health", timeout=10).status_code


def start(running: Topology, engine: str, *roles: str) -> list[Child]:
    running.extra_environment = dict(QUICK)
    running.start_frontend()
    workers = [running.start_worker(f"{role}-0", role=role, engine=engine, **ENGINES[engine]) for role in roles]
    running.wait_ready(**{"aggregated" if role == "agg" else role: 1 for role in roles})
    return workers


@pytest.mark.parametrize(
    ("engine", "roles"), [("paced", ("agg",)), ("paced", ("prefill", "decode")), ("torch", ("prefill", "decode"))]
)
def test_the_canary_alone_makes_a_worker_healthy_and_leaves_nothing_behind(
    model: Path, tmp_path: Path, engine: str, roles: tuple[str, ...]
) -> None:
    with topology(tmp_path, model) as running:
        for worker in start(running, engine, *roles):
            until(f"{worker.name} healthy", lambda w=worker: health(w) == 200, seconds=30)
            assert metric(worker, "trtx_requests_total") == 0  # a canary is no client's request
            assert metric(worker, "trtx_open_requests") == 0
            if engine == "torch":
                assert metric(worker, "trtx_leases") == 0
        for worker in running.children[1:]:
            assert worker.end() == 0
            assert "end unread" not in worker.log()


def test_an_engine_that_does_not_answer_is_unhealthy_until_it_does_and_nothing_dies(
    model: Path, tmp_path: Path
) -> None:
    with topology(tmp_path, model) as running:
        (worker,) = start(running, "torch", "agg")
        until("healthy", lambda: health(worker) == 200, seconds=30)
        freeze(worker.status()["engine_pid"])
        until("unhealthy", lambda: health(worker) == 503, seconds=30)
        os.kill(worker.status()["engine_pid"], signal.SIGCONT)
        until("healthy again", lambda: health(worker) == 200, seconds=30)
        assert post(running, prompt="hello", max_tokens=3).json()["usage"]["completion_tokens"] == 3
        assert worker.process.poll() is None
