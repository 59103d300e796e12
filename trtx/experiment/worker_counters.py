"""Reads the counters of images, handoffs and drafts from the text of a worker's metrics."""

from __future__ import annotations

import re
from typing import Any

from trtx.bench.draft_counters import DraftCounts
from trtx.bench.handoffs import NO_PREFILL, HandoffCounts
from trtx.bench.image_counters import ImageCounts

_LOOKUPS = re.compile(rb'^trtx_embedding_cache_lookups_total\{[^}]*outcome="(\w+)"[^}]*\} (\S+)$', re.MULTILINE)
_STAGES = re.compile(rb'^trtx_media_(seconds|pictures)_total\{[^}]*stage="(\w+)"[^}]*\} (\S+)$', re.MULTILINE)
_PAIRS = re.compile(rb"^trtx_pair_(handoffs|handoff_bytes|handoff_seconds)_total\{([^}]*)\} (\S+)$", re.MULTILINE)
_WHOLE = re.compile(rb"^trtx_whole_requests_total(?:\{[^}]*\})? (\S+)$", re.MULTILINE)
_LOCAL = re.compile(rb"^trtx_local_prefills_total(?:\{[^}]*\})? (\S+)$", re.MULTILINE)
_DRAFTED = re.compile(rb'^trtx_(draft|accepted_draft)_tokens_total\{[^}]*position="(\w+)"[^}]*\} (\S+)$', re.MULTILINE)
LABEL = re.compile(r'(\w+)="([^"]*)"')


def image_counts(metrics: bytes) -> ImageCounts | None:
    """Image counters from a worker's metrics; None if the worker processes no images."""
    lookups = {outcome.decode(): round(float(count)) for outcome, count in _LOOKUPS.findall(metrics)}
    stages: dict[bytes, dict[str, float]] = {b"seconds": {}, b"pictures": {}}
    for kind, stage, value in _STAGES.findall(metrics):
        stages[kind][stage.decode()] = float(value)
    if not lookups and not stages[b"pictures"]:
        return None
    return ImageCounts(lookups, {name: round(count) for name, count in stages[b"pictures"].items()}, stages[b"seconds"])


def handoff_counts(metrics: bytes) -> dict[str, HandoffCounts] | None:
    """Handoff counters from a decode worker's metrics, by prefill worker; None if it has none."""
    whole = _WHOLE.search(metrics)
    if whole is None:
        return None
    local = _LOCAL.search(metrics)
    found: dict[str, dict[str, Any]] = {NO_PREFILL: {"whole": round(float(whole[1]))}}
    if local is not None:  # workers of earlier releases have none
        found[NO_PREFILL]["local"] = round(float(local[1]))
    for kind, labels, value in _PAIRS.findall(metrics):
        values = dict(LABEL.findall(labels.decode()))
        counts = found.setdefault(values["prefill"], {})
        if kind == b"handoffs":
            counts[values["outcome"]] = round(float(value))
        elif kind == b"handoff_bytes":
            counts["bytes"] = round(float(value))
        else:
            counts["seconds"] = float(value)
    return {prefill: HandoffCounts(**counts) for prefill, counts in found.items()}


def draft_counts(metrics: bytes) -> DraftCounts | None:
    """Speculation counters from a worker's metrics; None if it doesn't speculate, or has run no step yet."""
    drafts = _sample(metrics, b"trtx_drafts_total")
    if drafts is None:
        return None
    drafted, accepted = _by_position(metrics, b"draft"), _by_position(metrics, b"accepted_draft")
    places = range(1, 1 + len(drafted)) if "1" in drafted else ()  # TensorRT-LLM counts none by position
    decodes = _sample(metrics, b"trtx_step_decodes_total")
    return DraftCounts(
        drafts=round(drafts),
        drafted=sum(drafted.values()),
        accepted=sum(accepted.values()),
        drafted_at=tuple(drafted.get(str(place), 0) for place in places),
        accepted_at=tuple(accepted.get(str(place), 0) for place in places),
        decodes=None if decodes is None else round(decodes),
        drafting_s=_sample(metrics, b"trtx_drafting_seconds_total"),
        step_s=_sample(metrics, b"trtx_step_seconds_sum"),
    )


def _by_position(metrics: bytes, kind: bytes) -> dict[str, int]:
    found = _DRAFTED.findall(metrics)
    return {position.decode(): round(float(value)) for name, position, value in found if name == kind}


def _sample(metrics: bytes, name: bytes) -> float | None:
    """The value of a metric with a single sample; None if it is missing."""
    found = re.search(rb"^%b(?:\{[^}]*\})? (\S+)$" % name, metrics, re.MULTILINE)
    return None if found is None else float(found[1])
