"""Explains why a config doesn't fit, with the numbers of one GPU and the largest values that would fit."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

from trtx.errors import UsageError
from trtx.memory.budget import CPU_MARGIN, Budget, Model, fits, largest, tightest
from trtx.memory.gpus import MemoryDevice
from trtx.memory.limits import Limits
from trtx.memory.units import size_text

_MOST_GPUS = 64
_HIGHEST_FRACTION = 0.95


def refuse(role: str, model: Model, limits: Limits, device: MemoryDevice) -> UsageError:
    """Returns the error for a config for which :func:`trtx.memory.budget.fits` is false."""
    budget = tightest(model, limits, device)
    ways = list(_ways_out(model, limits, _without_margin(device)))
    hint = "what would fit: " + ", or ".join(ways) if ways else "no single setting makes it fit; use a larger GPU"
    return UsageError(
        f"{role}: {_reason(model, limits, budget, device)} ({_numbers(model, limits, budget, device)}); {hint}"
    )


def _without_margin(device: MemoryDevice) -> MemoryDevice:
    """Returns the device without the CPU margin: the plan tolerates somewhat more than a host's free memory, but the
    proposed settings must fit in it."""
    return device if device.is_gpu else replace(device, free_bytes=int(device.free_now / CPU_MARGIN))


def _reason(model: Model, limits: Limits, budget: Budget, device: MemoryDevice) -> str:
    asked = f"one sequence of max_seq_len {limits.max_seq_len}" if limits.max_seq_len else "one KV block"
    if limits.max_tokens is not None and limits.max_tokens < max(limits.tokens_per_block, limits.max_seq_len or 0):
        return f"kv_cache_config.max_tokens {limits.max_tokens} can't hold {asked}"
    if device.is_gpu and budget.left < 0:
        lacking = size_text(-budget.left)
        return f"{model.shape.architecture} doesn't fit: weights and reserves exceed the memory by {lacking}"
    if limits.max_tokens is not None:
        taken = size_text(limits.max_tokens * budget.share.kv_bytes_per_token)
        return f"kv_cache_config.max_tokens {limits.max_tokens} takes {taken}"
    needed = budget.share.sequence_bytes(max(limits.tokens_per_block, limits.max_seq_len or 0))
    return f"the KV pool can't hold {asked}, which takes {size_text(needed)}"


def _numbers(model: Model, limits: Limits, budget: Budget, device: MemoryDevice) -> str:
    shared = f" that {model.engines} workers share" if model.engines > 1 else ""
    parts = [f"weights {size_text(budget.share.weight_bytes)}{shared}", f"activations {size_text(budget.activations)}"]
    parts += [f"CUDA graphs {size_text(budget.graphs)}"] if budget.graphs else []
    parts += [f"transfer buffers {size_text(budget.transfers)}"] if budget.transfers else []
    if not device.is_gpu:
        return f"{', '.join(parts)}, KV pool {size_text(budget.pool)}; host memory free {size_text(device.free_now)}"
    parts.append(f"CUDA context{' and NCCL' * (limits.world > 1)} {size_text(budget.context)}")
    parts += [f"its encoder {size_text(model.encoder_bytes)}"] if model.encoder_bytes else []
    parts += [f"encode workers that share it {size_text(model.shared_bytes)}"] if model.shared_bytes else []
    parts += [f"other processes {size_text(budget.others)}"] if budget.others else []
    parts += [f"{model.engines} workers divide what the weights leave"] if model.engines > 1 else []
    pool = f"KV {limits.fraction:g} of {size_text(max(0, budget.left))} = {size_text(budget.pool)}"
    return f"per GPU of {size_text(device.total_bytes)}, {device.name}: {', '.join(parts)}; {pool}"


def _ways_out(model: Model, limits: Limits, device: MemoryDevice) -> Iterator[str]:
    block = limits.tokens_per_block

    def most(changed: Callable[[int], Limits], present: int, step: int = block) -> int | None:
        return largest(model, device, changed, below=present, step=step)

    if limits.max_tokens is not None:
        if value := most(lambda tokens: replace(limits, max_tokens=tokens), limits.max_tokens):
            yield f"--set kv_cache_config.max_tokens={value}"
        elif fits(model, replace(limits, max_tokens=None), device):
            yield f"--set kv_cache_config.max_tokens={-(-(limits.max_seq_len or 1) // block) * block}"
    if limits.max_seq_len is not None and (
        value := most(lambda tokens: replace(limits, max_seq_len=tokens), limits.max_seq_len)
    ):
        yield f"--set max_seq_len={value}"
    if value := most(lambda tokens: replace(limits, max_num_tokens=tokens), limits.max_num_tokens):
        yield f"--set max_num_tokens={value}"
    if value := most(lambda batch: replace(limits, max_batch_size=batch), limits.max_batch_size, step=1):
        yield f"--set max_batch_size={value}"
    if device.is_gpu and (fraction := _fraction(model, limits, device)) is not None:
        yield f"--set kv_cache_config.free_gpu_memory_fraction={fraction:g}"
    if (tp := _parallel(model, limits, device)) is not None:
        yield f"--tp {tp}"


def _fraction(model: Model, limits: Limits, device: MemoryDevice) -> float | None:
    """Returns the smallest sufficient higher fraction, in steps of 0.01 and at most 0.95, or None."""
    for hundredths in range(int(limits.fraction * 100) + 1, int(_HIGHEST_FRACTION * 100) + 1):
        if fits(model, replace(limits, fraction=hundredths / 100), device):
            return hundredths / 100
    return None


def _parallel(model: Model, limits: Limits, device: MemoryDevice) -> int | None:
    """Returns the smallest sufficient tensor_parallel_size, doubled from the present one, that divides the heads."""
    if limits.engine == "torch":
        return None
    tp = limits.tp * 2
    while tp <= _MOST_GPUS and model.shape.heads % tp == 0:
        grown = replace(limits, tp=tp, moe_ep=tp if limits.moe_ep > 1 else 1)
        if fits(model, grown, device):
            return tp
        tp *= 2
    return None
