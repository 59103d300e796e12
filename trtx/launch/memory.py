"""Memory plans of a topology's roles, for the GPUs assigned to their workers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import psutil

from trtx.checkpoint.vision import read_vision_config
from trtx.config.media import EMBEDDING_CACHE_BYTES
from trtx.engine import MODEL_ENGINES
from trtx.engine.tensorrt_llm.arguments import world_size
from trtx.errors import UsageError
from trtx.launch.host_tiers import check_host_tier, with_host_tiers
from trtx.memory import (
    ENCODER_TOKENS,
    EncoderShare,
    MediaMemory,
    MemoryDevice,
    MemoryPlan,
    UnknownShapeError,
    encoder_share,
    plan_memory,
    size_text,
)
from trtx.topology import Machine, Plan, ProcessSpec, weight_engines


def with_memory(plan: Plan, machine: Machine) -> Plan:
    """``plan`` with its memory plans, or with a reason for their absence. Raises UsageError if a role does not fit."""
    if plan.engine not in MODEL_ENGINES:
        return plan
    plan = with_host_tiers(plan)
    if plan.engine == "tensorrt-llm" and not plan.gpu_names:
        return replace(
            plan, reasons=(*plan.reasons, "no memory plan because TensorRT-LLM needs a GPU, and this machine has none")
        )
    memory: list[MemoryPlan] = []
    for role, values in plan.engine_configs.items():
        if role == "encode":
            plan = replace(plan, reasons=(*plan.reasons, *_of_encoders(plan, machine)))
            continue
        device = _device([worker for worker in plan.workers if worker.role == role], plan, machine)
        try:
            media = _media(plan, role, device)
            engines = max(weight_engines(worker.argv) for worker in plan.workers if worker.role == role)
            found = plan_memory(
                plan.model_path, role, values, engine=plan.engine, device=device, media=media, engines=engines
            )
            if found.shared_bytes:
                plan = _with_room_for_encoders(plan, found)
                values = plan.engine_configs[role]
                found = plan_memory(plan.model_path, role, values, engine=plan.engine, device=device, media=media)
        except UnknownShapeError as unknown:
            _check_bounds(plan, str(unknown))
            return replace(plan, reasons=(*plan.reasons, f"no memory plan because {unknown}"))
        if plan.engine == "torch":
            check_host_tier(values, found)
        memory.append(found)
    return replace(plan, memory=tuple(memory))


def _media(plan: Plan, role: str, device: MemoryDevice) -> MediaMemory | None:
    """The memory that images take in a worker of role ``role``.

    None if no worker of the topology takes images, or if TensorRT-LLM's own tower encodes them, whose weights are part
    of the model's. Raises UnknownShapeError for a shared encoder whose memory is unknown.
    """
    if plan.engine != "torch":
        count = _sharer_count(plan, role)
        return MediaMemory(False, 0, count * _share(plan, device).total_bytes) if count else None
    if read_vision_config(plan.model_path) is None:
        return None
    # Decode starts an encoder only if a prefill worker is lost, and workers with encode workers only if none of them
    # answers.
    has_encoder = role != "decode" and "encode" not in plan.engine_configs
    count = _sharer_count(plan, role)
    shared_bytes = count * _share(plan, device).total_bytes if count else 0
    return MediaMemory(has_encoder, EMBEDDING_CACHE_BYTES, shared_bytes)


def _sharer_count(plan: Plan, role: str) -> int:
    """Largest number of encode workers that share a GPU with a worker of this role."""
    return max(len(plan.sharers(worker)) for worker in plan.workers if worker.role == role)


def _check_bounds(plan: Plan, because: str) -> None:
    """Raises UsageError if an unbounded KV pool shares a GPU with encode workers whose memory is unknown.

    Without a bound in its config, the KV pool takes a share of all memory that is free when the engine starts.
    """
    for role, values in plan.engine_configs.items():
        if role == "encode" or not _sharer_count(plan, role):
            continue
        kv = values.get("kv_cache_config") or {}
        if not (kv.get("max_tokens") or kv.get("max_gpu_total_bytes")):
            raise UsageError(
                f"{role} shares its GPU with encode workers and their memory use is unknown, because {because}. "
                f"Bound its KV pool with --set {role}.kv_cache_config.max_tokens=N, or use --encode in place of "
                "--encode-shared"
            )


def _with_room_for_encoders(plan: Plan, memory: MemoryPlan) -> Plan:
    """``plan`` with the KV pools of this role bounded to leave room for the encode workers on the same GPU.

    The start order does not matter then: a pool takes a share of the memory that is free when its engine starts, and an
    encoder may start later.
    """
    if memory.max_tokens is not None:  # set in the config, and it fits
        return plan
    room = _three_digits(memory.capacity_blocks * memory.tokens_per_block)
    values = plan.engine_configs[memory.role]
    kv = values.get("kv_cache_config") or {}
    because = (
        f"{memory.role}: kv_cache_config.max_tokens = {room} because encode workers that share its GPU take "
        f"{size_text(memory.shared_bytes)} and may start after its KV pool is made"
    )
    values = {**values, "kv_cache_config": {**kv, "max_tokens": room}}
    configs = {**plan.engine_configs, memory.role: values}
    return replace(plan, engine_configs=configs, reasons=(*plan.reasons, because))


def _three_digits(tokens: int) -> int:
    """``tokens`` rounded down to three digits, so that small changes of free memory do not change the config."""
    unit: int = 10 ** max(0, len(str(tokens)) - 3)
    return tokens // unit * unit


def _rows(plan: Plan) -> int:
    """Rows in an encode worker's largest batch. TensorRT-LLM gets no explicit number and has the same default."""
    stated = plan.engine_configs["encode"].get("max_num_tokens") if plan.engine == "torch" else None
    return stated or ENCODER_TOKENS


def _share(plan: Plan, device: MemoryDevice) -> EncoderShare:
    """Memory of one encode worker on ``device``. Raises UnknownShapeError for a vision tower that can't be estimated.

    TensorRT-LLM's encoder is estimated by the torch engine's arithmetic, because its own is not documented.
    """
    try:
        return encoder_share(plan.model_path, plan.engine_configs["encode"], device, max_num_tokens=_rows(plan))
    except UsageError as unknown:
        if plan.engine == "torch":
            raise
        raise UnknownShapeError(f"its vision tower is not counted ({unknown})") from unknown


def _of_encoders(plan: Plan, machine: Machine) -> Iterator[str]:
    """Reasons that state what encode workers take.

    Raises UsageError if an encode worker does not fit on its own device. For encode workers that share a GPU, the
    memory plan of the other worker covers them.
    """
    takers = [worker for worker in plan.workers if worker.role != "encode"]
    sharing = dict.fromkeys(one.name for worker in takers for one in plan.sharers(worker))
    if plan.engine != "torch":
        what = "is an estimate made with the torch engine's formulas" if sharing else "is not known"
        yield f"no memory plan for encode workers because the memory use of their engine {what}"
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
            f"an encode worker takes {parts} and about {size_text(share.batch_bytes)} for a batch of {rows} rows, but "
            f"{device.name} has {size_text(free)} free; lower encode.max_num_tokens, or give it another GPU"
        )
    yield (
        f"encode: {parts} because of the size of the vision tower, and about {size_text(share.batch_bytes)} more while "
        f"a batch of {rows} rows is encoded"
    )


def _device(workers: Sequence[ProcessSpec], plan: Plan, machine: Machine) -> MemoryDevice:
    """The GPU with the least free memory among those of ``workers``; without GPUs, one rank's share of the host."""
    indices = {index for worker in workers for index in worker.gpu_indices}
    gpus = [gpu for gpu in machine.gpus if gpu.index in indices]
    if not gpus:
        host, count = psutil.virtual_memory(), sum(world_size(plan.engine_configs[one.role]) for one in plan.workers)
        return MemoryDevice("CPU", host.total // count, host.available // count, is_gpu=False)
    gpu = min(gpus, key=lambda gpu: gpu.memory_bytes if gpu.memory_free_bytes is None else gpu.memory_free_bytes)
    return MemoryDevice(gpu.name, gpu.memory_bytes, gpu.memory_free_bytes)
