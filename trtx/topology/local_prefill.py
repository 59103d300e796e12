"""Checks of ``--conditional-disagg``, with which the router leaves some prompts to decode workers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from trtx.config import Role, TopologySpec
from trtx.config.conditional_disagg import reads_cache
from trtx.config.wording import quoted
from trtx.engine import MODEL_ENGINES
from trtx.errors import UsageError


def check_conditional_disagg(spec: TopologySpec, engine: str, values: Mapping[Role, Mapping[str, Any]]) -> None:
    """Raises UsageError for a policy that could never take effect. ``values``: the engine config of each role.

    Accepts every policy in mode agg, because a sweep can have both modes.
    """
    policy = spec.conditional_disagg
    if policy is None or spec.mode == "agg":
        return
    option = f"--conditional-disagg {quoted(policy)}"
    if engine not in MODEL_ENGINES:
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
