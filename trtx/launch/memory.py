"""The memory plan of every role of a topology, on the GPUs that its workers were given."""

from __future__ import annotations

from dataclasses import replace

import psutil

from trtx.memory import Device, MemoryPlan, UnknownShapeError, plan_memory
from trtx.topology import Machine, Plan


def with_memory(plan: Plan, machine: Machine) -> Plan:
    """``plan`` with its memory plans, or with a reason why there are none. Raises UsageError where a role can't fit."""
    if plan.engine not in ("torch", "tensorrt-llm"):
        return plan
    if plan.engine == "tensorrt-llm" and not plan.gpu_names:
        return replace(
            plan, reasons=(*plan.reasons, "no memory plan because TensorRT-LLM plans for GPUs, and none is here")
        )
    memory: list[MemoryPlan] = []
    for role, values in plan.engine_configs.items():
        if role == "encode":
            told = "no memory plan for encode workers because what a vision tower takes is not counted"
            plan = replace(plan, reasons=(*plan.reasons, told))
            continue
        try:
            memory.append(
                plan_memory(plan.model_path, role, values, engine=plan.engine, device=_device(plan, role, machine))
            )
        except UnknownShapeError as unknown:
            return replace(plan, reasons=(*plan.reasons, f"no memory plan because {unknown}"))
    return replace(plan, memory=tuple(memory))


def _device(plan: Plan, role: str, machine: Machine) -> Device:
    """The GPU of that role with the least free memory; without GPUs one worker's share of the host."""
    indices = {index for worker in plan.workers if worker.role == role for index in worker.gpu_indices}
    gpus = [gpu for gpu in machine.gpus if gpu.index in indices]
    if not gpus:
        host, workers = psutil.virtual_memory(), plan.worker_count
        return Device("CPU", host.total // workers, host.available // workers, is_gpu=False)
    gpu = min(gpus, key=lambda gpu: gpu.memory_bytes if gpu.memory_free_bytes is None else gpu.memory_free_bytes)
    return Device(gpu.name, gpu.memory_bytes, gpu.memory_free_bytes)
