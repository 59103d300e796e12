"""Adds a note to a plan on what renders the prompts, if Dynamo's prompts may differ from transformers'."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from trtx.prompts.same import difference
from trtx.topology import Plan


def with_prompt_note(plan: Plan, model: Path) -> Plan:
    """``plan`` with a sentence about its prompts: a reason on one machine, a warning where Dynamo renders them."""
    if (because := difference(model)) is None:
        return plan
    if not plan.hosts and plan.engine != "simulated":
        return replace(plan, reasons=(*plan.reasons, f"the frontend makes prompts with transformers because {because}"))
    return replace(plan, warnings=(*plan.warnings, prompts_differ(because)))


def prompts_differ(because: str) -> str:
    """The warning for a topology whose prompts Dynamo renders."""
    return (
        f"prompts may differ from those that transformers makes, because {because} and Dynamo makes the prompts over "
        "hosts and in pods; send prompts as token ids to /v1/completions where that matters (docs/request-fields.md)"
    )
