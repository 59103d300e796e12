"""The memory plan of every role of a topology, on the GPUs that its workers were given."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import psutil

from trtx.checkpoint.vision import read_vision_config
from trtx.config.media import EMBEDDING_CACHE_BYTES
from trtx.errors import UsageError
from trtx.memory import (
    ENCODER_TOKENS,
    Device,
    EncoderShare,
    Media,
    MemoryPlan,
    UnknownShapeError,
    encoder_share,
    plan_memory,
    size_text,
)
from trtx.topology import Machine, Plan, ProcessSpec


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
            plan = replace(plan, reasons=(*plan.reasons, *_of_encoders(plan, values, machine)))
            continue
        device = _device([worker for worker in plan.workers if worker.role == role], plan, machine)
        try:
            media = _media(plan, role, device)
            found = plan_memory(plan.model_path, role, values, engine=plan.engine, device=device, media=media)
            if found.shared_bytes:
                plan = _with_room_for_encoders(plan, found)
                values = plan.engine_configs[role]
                found = plan_memory(plan.model_path, role, values, engine=plan.engine, device=device, media=media)
        except UnknownShapeError as unknown:
            _check_bounds(plan, str(unknown))
            return replace(plan, reasons=(*plan.reasons, f"no memory plan because {unknown}"))
        memory.append(found)
    return replace(plan, memory=tuple(memory))


def _media(plan: Plan, role: str, device: Device) -> Media | None:
    """What a worker of that role takes images with; None where none of this topology does, or TensorRT-LLM's own tower
    sees, whose weights are among the model's. Raises UnknownShapeError for a shared encoder that nobody counts."""
    if plan.engine != "torch":
        count = _sharer_count(plan, role)
        return Media(False, 0, count * _share(plan, device).total_bytes) if count else None
    if read_vision_config(plan.model_path) is None:
        return None
    # Decode needs an encoder where a prefill worker is gone, and a worker beside encode workers where none answers.
    has_encoder = role != "decode" and "encode" not in plan.engine_configs
    count = _sharer_count(plan, role)
    shared_bytes = count * _share(plan, device).total_bytes if count else 0
    return Media(has_encoder, EMBEDDING_CACHE_BYTES, shared_bytes)


def _sharer_count(plan: Plan, role: str) -> int:
    """Encode workers on a GPU of the worker of that role that has most."""
    return max(len(plan.sharers(worker)) for worker in plan.workers if worker.role == role)


def _check_bounds(plan: Plan, because: str) -> None:
    """Raises UsageError where encode workers share a GPU, nobody counts what they take, and the KV pool there, which
    takes a share of all that is free, is not bounded by its config."""
    for role, values in plan.engine_configs.items():
        if role == "encode" or not _sharer_count(plan, role):
            continue
        kv = values.get("kv_cache_config") or {}
        if not (kv.get("max_tokens") or kv.get("max_gpu_total_bytes")):
            raise UsageError(
                f"{role} shares its GPU with encode workers and what they take of it is not known, because {because}; "
                f"bound its KV pool with --set {role}.kv_cache_config.max_tokens=N, or use --encode in place of "
                "--encode-shared"
            )


def _with_room_for_encoders(plan: Plan, memory: MemoryPlan) -> Plan:
    """``plan`` whose workers of that role leave what encode workers on their GPUs take, whichever starts first: a pool
    is a share of what is free when its engine starts, and an encoder may not be there yet."""
    if memory.max_tokens is not None:  # said, and it fits
        return plan
    room = _three_digits(memory.capacity_blocks * memory.tokens_per_block)
    values = plan.engine_configs[memory.role]
    kv = values.get("kv_cache_config") or {}
    because = (
        f"{memory.role}: kv_cache_config.max_tokens = {room} because encode workers that share its GPU take "
        f"{size_text(memory.shared_bytes)} of it, and may start after its KV pool is made"
    )
    values = {**values, "kv_cache_config": {**kv, "max_tokens": room}}
    configs = {**plan.engine_configs, memory.role: values}
    return replace(plan, engine_configs=configs, reasons=(*plan.reasons, because))


def _three_digits(tokens: int) -> int:
    """Rounded down: a few MiB that another process takes or gives back between two plans make no other config."""
    unit: int = 10 ** max(0, len(str(tokens)) - 3)
    return tokens // unit * unit


def _rows(plan: Plan) -> int:
    """Of the largest batch of an encode worker. TensorRT-LLM's is told no number, and has the same default."""
    stated = plan.engine_configs["encode"].get("max_num_tokens") if plan.engine == "torch" else None
    return stated or ENCODER_TOKENS


def _share(plan: Plan, device: Device) -> EncoderShare:
    """Of one encode worker there: of TensorRT-LLM's by the torch engine's arithmetic, as that of its own is nowhere
    written. Raises UnknownShapeError for a tower that is not counted."""
    try:
        return encoder_share(plan.model_path, plan.engine_configs["encode"], device, max_num_tokens=_rows(plan))
    except UsageError as unknown:
        if plan.engine == "torch":
            raise
        raise UnknownShapeError(f"its vision tower is not counted ({unknown})") from unknown


def _of_encoders(plan: Plan, values: Mapping[str, Any], machine: Machine) -> Iterator[str]:
    """Reasons with what encode workers take. Raises UsageError where that is more than the device of one has; of those
    that share one, the plan of the worker that they share it with does."""
    takers = [worker for worker in plan.workers if worker.role != "encode"]
    sharing = dict.fromkeys(one.name for worker in takers for one in plan.sharers(worker))
    if plan.engine != "torch":
        what = "is an estimate by the torch engine's arithmetic" if sharing else "is not known"
        yield f"no memory plan for encode workers because what their engine takes {what}"
        return
    encoders = [worker for worker in plan.workers if worker.role == "encode"]
    own = [worker for worker in encoders if worker.name not in sharing]
    device, rows = _device(own or encoders, plan, machine), _rows(plan)
    share = _share(plan, device)
    free = device.total_bytes if device.free_bytes is None else device.free_bytes
    parts = f"{size_text(share.weight_bytes)} of weights"
    if share.context_bytes:
        parts += f", {size_text(share.context_bytes)} of CUDA context"
    if share.arena_bytes:
        parts += f", {size_text(share.arena_bytes)} for embeddings"
    if own and device.is_gpu and share.total_bytes > free:
        raise UsageError(
            f"an encode worker takes {parts} and about {size_text(share.batch_bytes)} for a batch of {rows} rows, and "
            f"{device.name} has {size_text(free)} free; lower encode.max_num_tokens, or give it another GPU"
        )
    yield (
        f"encode: {parts} because the vision tower has so many, and about {size_text(share.batch_bytes)} more while a "
        f"batch of {rows} rows is encoded"
    )


def _device(workers: Sequence[ProcessSpec], plan: Plan, machine: Machine) -> Device:
    """The GPU of those workers with the least free memory; without GPUs one worker's share of the host."""
    indices = {index for worker in workers for index in worker.gpu_indices}
    gpus = [gpu for gpu in machine.gpus if gpu.index in indices]
    if not gpus:
        host, count = psutil.virtual_memory(), plan.worker_count
        return Device("CPU", host.total // count, host.available // count, is_gpu=False)
    gpu = min(gpus, key=lambda gpu: gpu.memory_bytes if gpu.memory_free_bytes is None else gpu.memory_free_bytes)
    return Device(gpu.name, gpu.memory_bytes, gpu.memory_free_bytes)
