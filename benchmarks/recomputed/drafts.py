"""The metrics of speculation a second time, from the ``readings.json`` of a trial or from aiperf's records."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from typing import Any

from recomputed.gpus import EDGE_NS, Values

DRAFTS = (
    "spec_decode_token_weighted_acceptance_length", "spec_decode_overall_draft_acceptance_rate",
    "decoded_tokens_per_step", "draft_overhead",
)  # fmt: skip
RECORDED = {  # by aiperf, of each request
    "drafts": "spec_decode_steps",
    "drafted": "spec_decode_draft_tokens",
    "accepted": "spec_decode_accepted_draft_tokens",
}

Counts = dict[str, Fraction]


def counted(readings: Sequence[dict[str, Any]], span: tuple[int, int]) -> Counts | None:
    """What the workers counted from the last reading before the span to the first one after it."""
    before = [one for one in readings if one["at_ns"] <= span[0]]
    after = [one for one in readings if one["at_ns"] >= span[1]]
    if not before or not after:
        return None
    first, last = before[-1], after[0]
    if max(span[0] - first["at_ns"], last["at_ns"] - span[1]) > EDGE_NS:
        return None
    then, now = (_by_worker(one.get("drafts")) for one in (first, last))
    if then is None or not now or then.keys() - now.keys():
        return None
    total: Counts = {}
    for worker, counts in now.items():
        grown = {name: value - then.get(worker, {}).get(name, 0) for name, value in counts.items()}
        if min(grown.values()) < 0:
            return None
        total = {name: total.get(name, Fraction(0)) + value for name, value in grown.items()}
    return total


def recorded(requests: Sequence[dict[str, float]]) -> Counts | None:
    """What the server reported of each request, as aiperf recorded it."""
    known = [one for one in requests if all(name in one for name in RECORDED.values())]
    if not known:
        return None
    return {key: sum((Fraction(one[name]) for one in known), Fraction(0)) for key, name in RECORDED.items()}


def draft_values(trials: Sequence[Counts | None]) -> Values:
    """The metrics over all trials; None if a trial has no counts."""
    values: Values = dict.fromkeys(DRAFTS)
    known = [one for one in trials if one]
    if not known or len(known) < len(trials):
        return values

    def total(name: str) -> Fraction | None:
        return sum((one[name] for one in known), Fraction(0)) if all(name in one for one in known) else None

    drafts, drafted, accepted, decodes, steps = map(total, ("drafts", "drafted", "accepted", "decodes", "step_s"))
    assert accepted is not None
    values[DRAFTS[0]] = float(1 + accepted / drafts) if drafts else None
    values[DRAFTS[1]] = float(100 * accepted / drafted) if drafted else None
    values[DRAFTS[2]] = float(1 + accepted / decodes) if decodes else None
    drafting = total("drafting_s")
    values[DRAFTS[3]] = float(100 * drafting / steps) if steps and drafting is not None else None
    return values


def _by_worker(said: dict[str, dict[str, dict[str, Any]]] | None) -> dict[tuple[str, str], Counts] | None:
    if said is None:
        return None
    names = ("drafts", "drafted", "accepted", "decodes", "drafting_s", "step_s")
    return {
        (role, worker): {name: Fraction(counts[name]) for name in names if counts[name] is not None}
        for role, workers in said.items()
        for worker, counts in workers.items()
    }
