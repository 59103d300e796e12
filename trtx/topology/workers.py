"""The workers of a topology, before they are placed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from trtx.config import Role, TopologySpec
from trtx.topology.weight_groups import weight_groups


@dataclass(frozen=True, slots=True)
class Worker:
    role: Role
    name: str
    gpu_count: int  # number of GPUs of its own
    shares_with: str = ""  # name of the worker whose first GPU it shares; empty: it shares none
    weight_group: tuple[str, ...] = ()  # names of the workers that share its weights, with its own; empty: none


def workers_of(spec: TopologySpec, sizes: Mapping[Role, int]) -> tuple[Worker, ...]:
    """All workers, alternating between the roles: adjacent workers exchange embeddings and KV.

    Encode workers that share a GPU follow those that do not, and are assigned in turn to the workers that take
    embeddings.
    """
    roles = spec.roles
    taker: Role = "agg" if spec.mode == "agg" else "prefill"

    def worker(role: Role, index: int) -> Worker:
        if role != "encode" or index < spec.encode:
            return Worker(role, f"{role}-{index}", sizes[role])
        return Worker(role, f"{role}-{index}", 0, f"{taker}-{(index - spec.encode) % roles[taker]}")

    found = [
        worker(role, index) for index in range(max(roles.values())) for role, count in roles.items() if index < count
    ]
    groups = weight_groups([(one.role, one.name) for one in found], spec.share_weights)
    group_of = {name: group for group in groups for name in group}
    return tuple(_with_group(one, group_of.get(one.name, ())) for one in found)


def _with_group(worker: Worker, group: tuple[str, ...]) -> Worker:
    if not group or worker.name == group[0]:
        return replace(worker, weight_group=group)
    return replace(worker, gpu_count=0, shares_with=group[0], weight_group=group)
