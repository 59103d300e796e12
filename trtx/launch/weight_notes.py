"""Says in a plan what of a checkpoint's directory is not served."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from trtx.checkpoint.weight_index import adapter_beside
from trtx.topology import Plan


def with_weight_note(plan: Plan, model: Path) -> Plan:
    """``plan`` with a warning where an adapter lies beside the weights.

    transformers applies it where PEFT is installed, and no engine here does.
    """
    if (adapter := adapter_beside(model)) is None:
        return plan
    warning = (
        f"the adapter {adapter.name} beside the model's weights is not applied, so the model is served without it; "
        "merge it into the model (merge_and_unload of PEFT) to serve both"
    )
    return replace(plan, warnings=(*plan.warnings, warning))
