"""Computes the memory that remains for KV on each GPU of a worker, and the largest value of a field that fits."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from trtx.memory import reserves
from trtx.memory.gpus import MemoryDevice
from trtx.memory.limits import Limits
from trtx.memory.rank_shares import RankShare, Weights, rank_shares
from trtx.memory.shapes import ModelShape
from trtx.memory.torch_engine import cpu_pool_room, pool_room

# A host can swap, and other processes may free memory, so a CPU worker is refused only far beyond the free memory.
CPU_MARGIN = 1.5


@dataclass(frozen=True, slots=True)
class Model:
    """A checkpoint as one engine loads it.

    ``kv_width``: bytes of a KV element. ``activation_bytes``: the engine's formula for the peak of one forward.
    ``kv_padding``: padding layers in the KV blocks, in addition to the model's layers. ``encoder_bytes``: memory of the
    worker's own encoder process on the same device, without the tower's weights. ``shared_bytes``: memory of encode
    workers on the same device. ``engines``: the number of workers that divide the device and use one copy of its
    decoder's weights.
    """

    shape: ModelShape
    weights: Weights
    kv_width: float
    activation_bytes: Callable[[Limits], int]
    kv_padding: int = 0
    encoder_bytes: int = 0
    shared_bytes: int = 0
    engines: int = 1


@dataclass(frozen=True, slots=True)
class Budget:
    """The memory of one GPU of a pipeline rank, in bytes. ``pool``: the KV pool if ``max_tokens`` is not set."""

    share: RankShare
    others: int
    context: int
    activations: int
    graphs: int
    transfers: int
    left: int
    pool: int

    def holds(self, limits: Limits) -> bool:
        """Returns whether the explicit requests fit: max_tokens, and one sequence of max_seq_len, else one block."""
        needed = max(1, limits.tokens_per_block, limits.max_seq_len or 0)
        pool = self.pool
        if limits.max_tokens is not None:
            asked = int(limits.max_tokens * self.share.kv_bytes_per_token)
            if asked > pool and not self.share.has_windows:
                return False
            pool = min(pool, asked)
        return self.left >= 0 and self.share.sequence_bytes(needed) <= pool


def budgets(model: Model, limits: Limits, device: MemoryDevice) -> list[Budget]:
    """Returns one budget for each pipeline rank."""
    shares = rank_shares(model.shape, model.weights, limits, model.kv_width, model.kv_padding)
    return [_budget(model, limits, device, share) for share in shares]


def tightest(model: Model, limits: Limits, device: MemoryDevice) -> Budget:
    """Returns the budget of the rank with room for the fewest tokens, which limits all other ranks."""
    ranks = budgets(model, limits, device)
    return min(ranks, key=lambda budget: budget.pool / max(1.0, budget.share.kv_bytes_per_token))


def fits(model: Model, limits: Limits, device: MemoryDevice) -> bool:
    return all(budget.holds(limits) for budget in budgets(model, limits, device))


def largest(
    model: Model, device: MemoryDevice, changed: Callable[[int], Limits], *, below: int, step: int = 1
) -> int | None:
    """Returns the largest multiple of ``step`` below ``below`` for which the limits ``changed`` fit, or None."""
    found = _last_true(lambda count: fits(model, changed(count * step), device), (below - 1) // step)
    return found * step or None


def _last_true(works: Callable[[int], bool], high: int) -> int:
    """Returns the largest n in 1..high with ``works(n)``, or 0. ``works`` must be monotonic: true up to some n."""
    low = 0
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if works(middle) else (low, middle - 1)
    return low


def _budget(model: Model, limits: Limits, device: MemoryDevice, share: RankShare) -> Budget:
    activations = model.activation_bytes(limits)
    graphs = reserves.graph_bytes(model.shape, limits, device)
    transfers = reserves.transfer_bytes(limits, share)
    context = reserves.context_bytes(device, limits)
    hidden = reserves.hidden_bytes(device)
    free = device.total_bytes - hidden if device.free_bytes is None else device.free_bytes
    others = max(0, device.total_bytes - hidden - free)
    # The vision tower is that of the worker's own encoder process.
    own_weights = model.weights.vision if model.engines > 1 else share.weight_bytes
    left = (
        (device.total_bytes - others - (share.weight_bytes - own_weights)) // model.engines
        - context
        - model.encoder_bytes
        - model.shared_bytes
        - own_weights
        - activations
        - graphs
        - transfers
    )
    if device.is_gpu:
        pool = pool_room(left, limits.fraction)
        if limits.max_gpu_total_bytes and limits.engine != "torch":
            pool = min(pool, limits.max_gpu_total_bytes)
    else:
        weights = own_weights + (share.weight_bytes - own_weights) // model.engines  # of a host divided by workers
        pool, left = _cpu_pool(limits, share, int(free * CPU_MARGIN) - weights - activations)
    return Budget(share, others, context, activations, graphs, transfers, left, pool)


def _cpu_pool(limits: Limits, share: RankShare, room: int) -> tuple[int, int]:
    """Returns the pool and the remaining host memory. On a CPU ``max_tokens`` is the size of the pool, not a bound."""
    if limits.max_tokens is not None:
        pool = int(limits.max_tokens * share.kv_bytes_per_token)
    else:
        pool = cpu_pool_room(share.sequence_bytes(limits.tokens_per_block), limits.tokens_per_block)
    return pool, room - pool
