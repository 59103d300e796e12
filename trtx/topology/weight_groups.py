"""Groups of workers that share a GPU and one copy of the weights (``--share-weights``)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from trtx.config import Role, TopologySpec
from trtx.config.torch_together import sharing_conflict
from trtx.errors import UsageError

_ENGINES = "--weight-engines"


def check_sharing(spec: TopologySpec, engine: str, values: Mapping[Role, Mapping[str, Any]]) -> None:
    """Raises UsageError if the workers of ``spec`` can't share weights as it requests. ``values``: engine configs."""
    if spec.share_weights == 1:
        return
    asked = f"--share-weights {spec.share_weights}"
    of_text = {role: count for role, count in spec.roles.items() if role != "encode"}
    if engine != "torch":
        raise UsageError(f"{asked} has no effect with --engine {engine}; use --engine torch, or leave it out")
    if sum(of_text.values()) < 2:
        raise UsageError(f"{asked} has no effect with one worker; use --workers 2, or leave it out")
    if spec.encode_shared:
        raise UsageError(
            f"{asked} and --encode-shared would both divide a GPU's memory; use --encode, or leave one of them out"
        )
    for role in of_text:
        if (problem := sharing_conflict(values[role])) is not None:
            raise UsageError(f"{role}: {asked}: {problem}")
    dtypes = {role: values[role].get("dtype") or "auto" for role in of_text}
    if len(set(dtypes.values())) > 1:
        listed = " and ".join(f"{role} has {dtype}" for role, dtype in dtypes.items())
        raise UsageError(f"{asked} needs one dtype for all workers, but {listed}; set the same dtype for both roles")


def weight_groups(workers: Sequence[tuple[Role, str]], size: int) -> list[tuple[str, ...]]:
    """Returns the names of each group: up to ``size`` text workers, in the order of ``workers``, and two at least."""
    names = [name for role, name in workers if role != "encode"]
    groups = [tuple(names[begin : begin + size]) for begin in range(0, len(names), size)]
    return [group for group in groups if len(group) > 1]


def group_flags(group: Sequence[str]) -> list[str]:
    """Returns the flags of a worker that shares its weights with the workers ``group``; none for an empty group."""
    return ["--weight-group", group[0], _ENGINES, str(len(group))] if group else []


def weight_engines(argv: Sequence[str]) -> int:
    """Returns the number of workers that share the weights of the worker with this command line; 1: it has its own."""
    return int(argv[argv.index(_ENGINES) + 1]) if _ENGINES in argv else 1
