"""Plans of small Python programs, for tests of what starts, watches and stops processes."""

from __future__ import annotations

import os
import sys
import textwrap
from pathlib import Path

from trtx.launch.run_directory import RunDirectory
from trtx.topology import Plan, ProcessSpec
from trtx.topology.plan import ProcessRole


def _port() -> int:
    """Nobody listens there; one that a user who is not root may hold, and another test process does not."""
    return 10_000 + os.getpid() % 5_000


def process(
    tmp_path: Path, name: str, program: str = "", role: ProcessRole = "agg", cpus: tuple[int, ...] = ()
) -> ProcessSpec:
    """``program``: Python source to run."""
    return ProcessSpec(
        name=name,
        role=role,
        argv=(sys.executable, "-c", textwrap.dedent(program)),
        env={"TRTX_TOPOLOGY": namespace(tmp_path)},
        log_path=tmp_path / "run" / "serve" / "logs" / f"{name}.log",
        cpus=cpus,
        status_file=tmp_path / "run" / "serve" / "status" / f"{name}.json",
    )


def plan_of(tmp_path: Path, *processes: ProcessSpec, port: int | None = None) -> Plan:
    """With the files of its run directory, as ``serve`` writes them."""
    plan = Plan(
        mode="agg",
        engine="paced",
        model="tiny",
        model_path=tmp_path,
        namespace=namespace(tmp_path),
        host="127.0.0.1",
        port=port or _port(),
        internal_ports=(),
        run_dir=tmp_path / "run",
        scratch_dir=tmp_path / "scratch",
        processes=processes,
        engine_configs={},
        gpu_names=(),
        reasons=(),
    )
    RunDirectory(plan).write()
    return plan


def namespace(tmp_path: Path) -> str:
    return f"trtx-unit-{tmp_path.parent.name}-{tmp_path.name}"
