"""Places workers on the nodes and GPUs of a job. A pure function over identical nodes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from trtx.errors import UsageError


@dataclass(frozen=True, slots=True)
class Place:
    """The place of one worker.

    ``nodes``: indices into the job's nodes. Several nodes mean an engine over several nodes, with one rank per GPU.
    """

    nodes: tuple[int, ...]
    gpus: tuple[int, ...]  # indices into the GPUs that Slurm allocates to the job on each of ``nodes``


def place_on_nodes(sizes: Sequence[int], *, gpus_per_node: int, nodes: int | None) -> tuple[int, list[Place]]:
    """Returns the number of nodes, and the place of each worker.

    ``sizes``: the GPUs of each worker; 0: it runs on the CPU. Workers that are adjacent in ``sizes`` exchange KV, so
    they share a node if possible. ``nodes``: None: as few nodes as possible; a number: exactly so many, filled as
    evenly as possible. Engines larger than a node come first and have their nodes to themselves; their sizes are
    multiples of ``gpus_per_node``. Raises UsageError if the workers don't fit.
    """
    spans = [size // gpus_per_node if size > gpus_per_node else 0 for size in sizes]
    small = [size for size, span in zip(sizes, spans, strict=True) if not span]
    whole = sum(spans)
    fewest, most = whole + _fewest(small, gpus_per_node), whole + len(small)
    count = fewest if nodes is None else nodes
    if not fewest <= count <= most:
        raise UsageError(_no_fit(sizes, gpus_per_node, count, fewest, most))
    spread = iter(_spread(small, gpus_per_node, count - whole))
    places: list[Place] = []
    first = 0
    for size, span in zip(sizes, spans, strict=True):
        if span:
            places.append(Place(tuple(range(first, first + span)), tuple(range(size // span))))
            first += span
        else:
            node, gpus = next(spread)
            places.append(Place((whole + node,), gpus))
    return count, places


_Spread = list[tuple[int, tuple[int, ...]]]


def _fewest(sizes: Sequence[int], gpus_per_node: int) -> int:
    if not sizes or not gpus_per_node:
        return min(1, len(sizes))
    return next(count for count in range(1, len(sizes) + 1) if _fill(sizes, count, gpus_per_node))


def _spread(sizes: Sequence[int], gpus_per_node: int, count: int) -> _Spread:
    """Returns node and GPUs of each worker, with the smallest possible maximum load of a node."""
    if not sizes:
        return []
    if not gpus_per_node:
        return [(index * count // len(sizes), ()) for index in range(len(sizes))]
    return next(found for bound in range(1, gpus_per_node + 1) if (found := _fill(sizes, count, bound)))


def _fill(sizes: Sequence[int], count: int, bound: int) -> _Spread | None:
    """Places each worker on the previous worker's node, else on the first node with room, and leaves no node empty.

    Returns None if ``bound`` GPUs per node are too few.
    """
    used = [0] * count
    placed: _Spread = []
    for index, size in enumerate(sizes):
        empty = [node for node in range(count) if not used[node]]
        before = placed[-1][0] if placed else 0
        choices = empty if len(empty) >= len(sizes) - index else [before, *range(count)]
        node = next((one for one in choices if used[one] + size <= bound), None)
        if node is None:
            return None
        placed.append((node, tuple(range(used[node], used[node] + size))))
        used[node] += size
    return placed


def _no_fit(sizes: Sequence[int], gpus_per_node: int, asked: int, fewest: int, most: int) -> str:
    count = "1 worker" if len(sizes) == 1 else f"{len(sizes)} workers"
    different = sorted(set(sizes))
    what = f"{count} of {' or '.join(map(str, different))} GPUs" if any(sizes) else count
    if asked < fewest:
        return f"{what}: nodes of {gpus_per_node} GPUs must be at least {fewest}, and --nodes is {asked}; raise it"
    return f"{what}: more than {most} nodes would have nothing to do, and --nodes is {asked}; lower it, or add workers"
