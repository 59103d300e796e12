"""Says why a config can't fit, with the numbers of one GPU and the largest values that would."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

from trtx.errors import UsageError
from trtx.memory.budget import CPU_MARGIN, Budget, Model, fits, largest, tightest
from trtx.memory.gpus import GIB, Device
from trtx.memory.limits import Limits

_MOST_GPUS = 64
_HIGHEST_FRACTION = 0.95


def refuse(role: str, model: Model, limits: Limits, device: Device) -> UsageError:
    """The error for a config with which :func:`trtx.memory.budget.fits` is false."""
    budget = tightest(model, limits, device)
    asked = f"max_seq_len {limits.max_seq_len}" if limits.max_seq_len else "one KV block"
    reason = _reason(model, limits, budget, asked)
    ways = list(_ways_out(model, limits, device))
    hint = "what would fit: " + ", or ".join(ways) if ways else "no single setting makes it fit; use a larger GPU"
    return UsageError(f"{role}: {reason} ({_numbers(limits, budget, device)}); {hint}")


def _reason(model: Model, limits: Limits, budget: Budget, asked: str) -> str:
    name = model.shape.architecture
    if budget.left < 0:
        return f"{name} doesn't fit, its weights and reserves alone exceed the memory"
    if limits.max_tokens is not None and (limits.max_seq_len or 0) > limits.max_tokens:
        return f"kv_cache_config.max_tokens {limits.max_tokens} can't hold one sequence of {asked}"
    if limits.max_tokens is not None:
        token = budget.share.kv_bytes_per_token
        return f"kv_cache_config.max_tokens {limits.max_tokens} takes {_gib(limits.max_tokens * token)}"
    needed = budget.share.sequence_bytes(max(limits.tokens_per_block, limits.max_seq_len or 0))
    return f"the KV pool can't hold {asked}, which takes {_gib(needed)}"


def _numbers(limits: Limits, budget: Budget, device: Device) -> str:
    parts = [f"weights {_gib(budget.share.weight_bytes)}", f"activations {_gib(budget.activations)}"]
    parts += [f"CUDA graphs {_gib(budget.graphs)}"] if budget.graphs else []
    parts += [f"transfer buffers {_gib(budget.transfers)}"] if budget.transfers else []
    if not device.is_gpu:
        free = device.total_bytes if device.free_bytes is None else device.free_bytes
        return f"{', '.join(parts)}, KV pool {_gib(budget.pool)}; {device.name} has {_gib(free)} free, x {CPU_MARGIN}"
    parts.append(f"CUDA context{' and NCCL' * (limits.world > 1)} {_gib(budget.context)}")
    parts += [f"other processes {_gib(budget.others)}"] if budget.others else []
    pool = f"KV {limits.fraction:g} of {_gib(max(0, budget.left))} = {_gib(budget.pool)}"
    return f"per GPU of {_gib(device.total_bytes)}, {device.name}: {', '.join(parts)}; {pool}"


def _ways_out(model: Model, limits: Limits, device: Device) -> Iterator[str]:
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


def _fraction(model: Model, limits: Limits, device: Device) -> float | None:
    """The smallest higher share, in hundredths, that is enough; at most 0.95."""
    for hundredths in range(int(limits.fraction * 100) + 1, int(_HIGHEST_FRACTION * 100) + 1):
        if fits(model, replace(limits, fraction=hundredths / 100), device):
            return hundredths / 100
    return None


def _parallel(model: Model, limits: Limits, device: Device) -> int | None:
    """The smallest tensor_parallel_size, doubled from the present one, that divides the heads and is enough."""
    if limits.engine == "torch":
        return None
    tp = limits.tp * 2
    while tp <= _MOST_GPUS and model.shape.heads % tp == 0:
        grown = replace(limits, tp=tp, moe_ep=tp if limits.moe_ep > 1 else 1)
        if fits(model, grown, device):
            return tp
        tp *= 2
    return None


def _gib(count: float) -> str:
    return f"{count / GIB:.2f} GiB"
