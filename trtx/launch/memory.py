"""The memory plan of every role of a topology, on the GPUs that its workers were given."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import psutil

from trtx.checkpoint.vision import read_vision_config
from trtx.config.media import EMBEDDING_CACHE_BYTES
from trtx.errors import UsageError
from trtx.memory import (
    ENCODER_TOKENS,
    Device,
    Media,
    MemoryPlan,
    UnknownShapeError,
    encoder_share,
    plan_memory,
    size_text,
)
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
            plan = replace(plan, reasons=(*plan.reasons, *_of_encoder(plan, values, _device(plan, role, machine))))
            continue
        try:
            memory.append(
                plan_memory(
                    plan.model_path,
                    role,
                    values,
                    engine=plan.engine,
                    device=_device(plan, role, machine),
                    media=_media(plan, role),
                )
            )
        except UnknownShapeError as unknown:
            return replace(plan, reasons=(*plan.reasons, f"no memory plan because {unknown}"))
    return replace(plan, memory=tuple(memory))


def _media(plan: Plan, role: str) -> Media | None:
    """What a worker of that role takes images with; None where none of this topology does."""
    if plan.engine != "torch" or read_vision_config(plan.model_path) is None:
        return None
    # Decode needs an encoder where a prefill worker is gone, and a worker beside encode workers where none answers.
    return Media(role != "decode" and "encode" not in plan.engine_configs, EMBEDDING_CACHE_BYTES)


def _of_encoder(plan: Plan, values: Mapping[str, Any], device: Device) -> Iterator[str]:
    """A reason with what an encode worker takes. Raises UsageError where that is more than its device has."""
    if plan.engine != "torch":
        yield "no memory plan for encode workers because what their engine takes is not known"
        return
    rows = values.get("max_num_tokens") or ENCODER_TOKENS
    share = encoder_share(plan.model_path, values, device, max_num_tokens=rows)
    free = device.total_bytes if device.free_bytes is None else device.free_bytes
    parts = f"{size_text(share.weight_bytes)} of weights"
    if share.context_bytes:
        parts += f", {size_text(share.context_bytes)} of CUDA context"
    if device.is_gpu and share.total_bytes > free:
        raise UsageError(
            f"an encode worker takes {parts} and about {size_text(share.batch_bytes)} for a batch of {rows} rows, and "
            f"{device.name} has {size_text(free)} free; lower encode.max_num_tokens, or give it another GPU"
        )
    yield (
        f"encode: {parts} because the vision tower has so many, and about {size_text(share.batch_bytes)} more while a "
        f"batch of {rows} rows is encoded"
    )


def _device(plan: Plan, role: str, machine: Machine) -> Device:
    """The GPU of that role with the least free memory; without GPUs one worker's share of the host."""
    indices = {index for worker in plan.workers if worker.role == role for index in worker.gpu_indices}
    gpus = [gpu for gpu in machine.gpus if gpu.index in indices]
    if not gpus:
        host, workers = psutil.virtual_memory(), plan.worker_count
        return Device("CPU", host.total // workers, host.available // workers, is_gpu=False)
    gpu = min(gpus, key=lambda gpu: gpu.memory_bytes if gpu.memory_free_bytes is None else gpu.memory_free_bytes)
    return Device(gpu.name, gpu.memory_bytes, gpu.memory_free_bytes)
