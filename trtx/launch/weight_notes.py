"""Adds a warning to a plan whose checkpoint directory contains an adapter, because no engine applies adapters."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from trtx.checkpoint.weight_index import adapter_beside
from trtx.topology import Plan


def with_weight_note(plan: Plan, model: Path) -> Plan:
    """Returns ``plan``, with a warning if the directory ``model`` contains an adapter in addition to the weights.

    transformers applies the adapter if PEFT is installed; the engines of trtx don't.
    """
    if (adapter := adapter_beside(model)) is None:
        return plan
    warning = (
        f"the adapter {adapter.name} beside the model's weights is not applied, so the model is served without it; "
        "merge it into the model (merge_and_unload of PEFT) to serve both"
    )
    return replace(plan, warnings=(*plan.warnings, warning))
