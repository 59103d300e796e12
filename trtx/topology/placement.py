"""Assigns GPUs to workers on one machine: a pure function of the NVLink topology."""

from __future__ import annotations

from collections.abc import Sequence

from trtx.errors import UsageError
from trtx.topology.machine import Gpu, Machine


def visible_gpus(machine: Machine, asked: tuple[int, ...] | None) -> tuple[Gpu, ...]:
    """The GPUs selected by ``--gpus``, in its order; without it, all.

    Raises UsageError for an index that does not exist or is repeated.
    """
    if asked is None:
        return machine.gpus
    if len(set(asked)) != len(asked):
        raise UsageError(f"--gpus {_join(asked)} lists a GPU twice; list each once")
    by_index = {gpu.index: gpu for gpu in machine.gpus}
    if missing := [index for index in asked if index not in by_index]:
        if not by_index:
            raise UsageError(f"--gpus {_join(asked)}: no GPU is visible; leave --gpus out to run workers on the CPU")
        raise UsageError(
            f"--gpus {_join(asked)}: there is no GPU {_join(missing)}; choose from {_join(sorted(by_index))}, "
            "which are visible"
        )
    return tuple(by_index[index] for index in asked)


def place(gpus: Sequence[Gpu], groups: Sequence[int]) -> list[tuple[Gpu, ...]]:
    """Assigns GPUs to each group, whose size in GPUs is an entry of ``groups``. Prefers GPUs connected by NVLink.

    Adjacent groups exchange KV, so the first GPU of a group is the free one with the most links to the previous group.
    The next ones are those with the most links to the group itself. Ties go to the first GPU in ``gpus``. Requires
    ``sum(groups) <= len(gpus)``.
    """
    free = list(gpus)
    placed: list[tuple[Gpu, ...]] = []
    for size in groups:
        group: list[Gpu] = []
        before = placed[-1] if placed else ()
        for _ in range(size):
            best = max(free, key=lambda gpu: (_links(gpu, group), _links(gpu, before), -free.index(gpu)))
            free.remove(best)
            group.append(best)
        placed.append(tuple(group))
    return placed


def _links(gpu: Gpu, others: Sequence[Gpu]) -> int:
    return sum(other.index in gpu.nvlink_peers for other in others)


def _join(indices: Sequence[int]) -> str:
    return ",".join(str(index) for index in indices)
