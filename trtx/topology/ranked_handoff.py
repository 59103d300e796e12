"""Checks of KV handoffs from or to workers with several GPUs, with the torch engine."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from trtx.checkpoint.tensor_parallel import RankSizes
from trtx.config import Role
from trtx.errors import UsageError

_HANDS_OFF: tuple[Role, ...] = ("prefill", "decode")


def check_same_sums(values: Mapping[Role, Mapping[str, Any]]) -> None:
    """Raises UsageError if prefill and decode workers of a deterministic topology are split differently.

    They would add numbers in different orders, and a decode worker refuses such KV.
    """
    sizes = {role: _sizes(values[role]) for role in _HANDS_OFF if role in values}
    if len(set(sizes.values())) > 1:
        raise UsageError(
            f"with --deterministic, prefill workers have tensor_parallel_size {sizes['prefill']} and decode workers "
            f"{sizes['decode']}, so their sums would round differently; use the same sizes for both roles"
        )


def refuse_between_hosts(values: Mapping[Role, Mapping[str, Any]], engine: str, where: str) -> None:
    """Raises UsageError if workers of several GPUs would hand off KV to workers elsewhere.

    ``where``: a clause that says where the workers run. Their ranks read each other's memory, which needs one host.
    """
    if engine != "torch":
        return
    for role in _HANDS_OFF:
        if role in values and (size := _sizes(values[role]).ranks) > 1:
            raise UsageError(
                f"{role} asks for {size} GPUs per worker, and engine torch hands off their KV within one host only, "
                f"but {where}; use --tp 1, --mode agg, or --engine tensorrt-llm"
            )


def _sizes(values: Mapping[str, Any]) -> RankSizes:
    return RankSizes.of(
        int(values.get("tensor_parallel_size") or 1),
        values.get("moe_tensor_parallel_size"),
        values.get("moe_expert_parallel_size"),
    )
