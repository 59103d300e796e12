"""Features of an engine config that the torch engine can't combine."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def conflict(values: Mapping[str, Any]) -> str | None:
    """Returns a clause that names two features of ``values`` and what to do about them; None if all go together."""
    kv = values.get("kv_cache_config")
    tier = "kv_cache_config.host_cache_size" if isinstance(kv, Mapping) and kv.get("host_cache_size") else None
    if tier and isinstance(kv, Mapping) and kv.get("enable_block_reuse") is False:
        return f"{tier} keeps blocks for reuse, and kv_cache_config.enable_block_reuse is false; leave one of them out"
    return None


def sharing_conflict(values: Mapping[str, Any]) -> str | None:
    """Returns a clause that names a feature with which weights can't be shared, and what to do about it; or None."""
    gpus = int(values.get("tensor_parallel_size") or 1)
    if gpus > 1:
        return f"tensor_parallel_size is {gpus}, and weights are shared on one GPU only; use --tp 1"
    if values.get("sleep_config") is not None:
        return "sleep_config would release weights that other workers use; leave one of the two out"
    if (model := _draft_model(values.get("speculative_config"))) is not None:
        return f"the weights of the draft model of {model} can't be shared; use NGram or SA"
    return None


def _draft_model(speculation: object) -> str | None:
    """Returns the decoding type of a speculative_config with a draft model."""
    if not isinstance(speculation, Mapping):
        return None
    if not (speculation.get("speculative_model") or speculation.get("speculative_model_dir")):
        return None
    return str(speculation.get("decoding_type"))
