"""Completes a share of a plan over hosts for the machine that runs it: paths, GPUs, CPU threads."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

from trtx.engine import MODEL_ENGINES
from trtx.errors import UsageError
from trtx.topology import commands
from trtx.topology.machine import Gpu, Machine
from trtx.topology.plan import Plan, ProcessSpec, config_path, group_of
from trtx.topology.planner import threads_of


def settle(share: Plan, machine: Machine, *, model_path: Path, run_dir: Path, scratch_parent: Path) -> Plan:
    """Returns ``share`` with the paths, GPUs and thread counts of ``machine``. All else stays as planned.

    ``model_path``: the model on this machine; ``run_dir``: a new run directory; ``scratch_parent``: parent of the
    scratch directory. Raises UsageError if the machine lacks a GPU that the plan assigns to a worker.
    """
    scratch_dir = scratch_parent / group_of(share.namespace, share.this_host)
    workers = len(share.workers)
    threads = 1 if share.engine not in MODEL_ENGINES else threads_of(machine, max(1, workers))
    gpus = {process.name: _gpus(share, process, machine) for process in share.workers}
    return replace(
        share,
        model_path=model_path,
        run_dir=run_dir,
        scratch_dir=scratch_dir,
        processes=tuple(
            _settled(process, share, gpus.get(process.name, ()), threads, model_path, run_dir, scratch_dir)
            for process in share.processes
        ),
        gpu_names=tuple(gpu.name for process in share.workers for gpu in gpus[process.name]),
    )


def _settled(
    process: ProcessSpec,
    share: Plan,
    gpus: tuple[Gpu, ...],
    threads: int,
    model_path: Path,
    run_dir: Path,
    scratch_dir: Path,
) -> ProcessSpec:
    log_path = run_dir / process.log_path.relative_to(share.run_dir)
    status_file = None if process.status_file is None else run_dir / process.status_file.relative_to(share.run_dir)
    moved = {process.argv[0]: sys.executable, str(share.model_path): str(model_path)}
    moved[str(config_path(share.run_dir, process.role))] = str(config_path(run_dir, process.role))
    if process.status_file is not None:
        moved[str(process.status_file)] = str(status_file)
    env = {**process.env, "TMPDIR": str(scratch_dir)}
    if process.role != "frontend":
        env["CUDA_VISIBLE_DEVICES"] = ",".join(gpu.uuid for gpu in gpus)
        if not gpus:
            env |= commands.thread_environment(threads)
    return replace(
        process,
        argv=tuple(moved.get(word, word) for word in process.argv),
        env=env,
        log_path=log_path,
        status_file=status_file,
    )


def _gpus(share: Plan, process: ProcessSpec, machine: Machine) -> tuple[Gpu, ...]:
    by_index = {gpu.index: gpu for gpu in machine.gpus}
    for index in process.gpu_indices:
        if index not in by_index:
            there = f"{', '.join(map(str, sorted(by_index)))} are visible" if by_index else "none is visible"
            raise UsageError(
                f"the plan gives GPU {index} of {share.this_host} to {process.name}, but {there} here; correct gpus of "
                f"{share.this_host} in the hosts file, or CUDA_VISIBLE_DEVICES"
            )
    return tuple(by_index[index] for index in process.gpu_indices)
