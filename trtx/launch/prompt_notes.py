"""Adds a note to a plan if Dynamo may render the model's chat template differently from transformers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from trtx.errors import UsageError
from trtx.prompts.same import NO_TEMPLATE, difference
from trtx.topology import Plan


def with_prompt_note(plan: Plan, model: Path) -> Plan:
    """Returns ``plan``, with a note if Dynamo and transformers may render prompts differently.

    On one machine, the note is a reason: the frontend renders prompts with transformers. Over hosts, it is a warning.
    Raises UsageError like :func:`remote_prompt_notes`.
    """
    if plan.hosts:
        return replace(plan, warnings=(*plan.warnings, *remote_prompt_notes(model)))
    if (because := difference(model, plan.chat_template)) is None:
        return plan
    return replace(plan, reasons=(*plan.reasons, f"the frontend makes prompts with transformers because {because}"))


def remote_prompt_notes(model: Path, replacing: str | None = None) -> Iterator[str]:
    """Yields a warning if Dynamo may render prompts differently from transformers, else nothing.

    ``replacing``: the chat template that replaces the model's.

    For topologies over hosts, in pods or on Slurm, because Dynamo renders their prompts. Raises UsageError for a model
    without a chat template, which Dynamo does not serve there.
    """
    because = difference(model, replacing)
    if because == NO_TEMPLATE:
        raise UsageError(
            f"the model in {model} has no chat template, and over hosts, in pods and on Slurm Dynamo serves no such "
            "model; add a chat_template.jinja, or serve it on one machine"
        )
    if because is not None:
        yield (
            f"prompts may differ from those that transformers makes, because {because} and Dynamo makes the prompts "
            "over hosts, in pods and on Slurm; send prompts as token ids to /v1/completions where that matters "
            "(docs/request-fields.md)"
        )
