"""Metric families of speculative decoding."""

from __future__ import annotations

from functools import partial

from trtx.engine.served_family import TEXT_ROLES, ServedFamily, recorded

FAMILIES: dict[str, ServedFamily] = {}
_family = partial(recorded, FAMILIES)

_SPECULATION = "if the engine speculates"
_POSITION = "by position in the draft; TensorRT-LLM does not report it, so its position is unknown."
DRAFTS = _family(
    "counter",
    "trtx_drafts_total",
    "requests",
    "Requests that got drafted tokens, summed over steps. The acceptance length is 1 plus the accepted tokens of each.",
    by=TEXT_ROLES,
    when=_SPECULATION,
)
DRAFT_TOKENS = _family(
    "counter",
    "trtx_draft_tokens_total",
    "tokens",
    f"Drafted tokens, {_POSITION}",
    "position",
    by=TEXT_ROLES,
    when=_SPECULATION,
)
ACCEPTED_DRAFT_TOKENS = _family(
    "counter",
    "trtx_accepted_draft_tokens_total",
    "tokens",
    f"Drafted tokens that the model sampled too, {_POSITION}",
    "position",
    by=TEXT_ROLES,
    when=_SPECULATION,
)
DRAFTING_SECONDS = _family(
    "counter",
    "trtx_drafting_seconds_total",
    "seconds",
    "Step time that drafting took on the host.",
    by=TEXT_ROLES,
    when=_SPECULATION,
)
