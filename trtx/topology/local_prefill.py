"""What decode workers need to prefill prompts themselves by a policy of the router (``--conditional-disagg``)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from trtx.config import Role, TopologySpec
from trtx.config.conditional_disagg import reads_cache
from trtx.config.wording import quoted
from trtx.errors import UsageError

_HAND_OVER = ("torch", "tensorrt-llm")


def check_conditional_disagg(spec: TopologySpec, engine: str, values: Mapping[Role, Mapping[str, Any]]) -> None:
    """Raises UsageError for a policy that could never take effect. ``values``: the engine configs.

    In mode agg, which a sweep may have beside disagg, there is nothing to decide.
    """
    policy = spec.conditional_disagg
    if policy is None or spec.mode == "agg":
        return
    option = f"--conditional-disagg {quoted(policy)}"
    if engine not in _HAND_OVER:
        raise UsageError(
            f"{option} has no effect with --engine {engine}, which computes no prompts; use --engine torch, or leave "
            "it out"
        )
    if spec.router_mode != "kv":
        raise UsageError(
            f"{option} has no effect with --router-mode {spec.router_mode}, because only the KV router knows what "
            "decode workers cache and how busy prefill workers are; add --router-mode kv, or leave it out"
        )
    if reads_cache(policy) and (values["decode"].get("kv_cache_config") or {}).get("enable_block_reuse") is False:
        raise UsageError(
            f"{option} compares what decode workers cache, and their kv_cache_config.enable_block_reuse is false; "
            "leave one of them out"
        )
