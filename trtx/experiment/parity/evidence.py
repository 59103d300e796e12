"""Evidence that a route was actually used, from counters of workers and frontend before and after its prompts."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import httpx

from trtx.engine import worker_facts
from trtx.evals.parity import ParityAnswer
from trtx.evals.parity.forms import Count, RouteEvidence
from trtx.experiment.parity.kill import Kill
from trtx.tls import trust_of
from trtx.topology import Plan

_TIMEOUT_S = 5.0
_SAMPLE = re.compile(r"^([a-z_]+)(?:\{([^}]*)\})? ([0-9.e+-]+)$", re.MULTILINE)
_ENDED = "trtx_requests_total"
_FOUND = "tokens of prompts found in a cache"
# Counted by the frontend; Dynamo 1.6.1 labels migrations in mid-stream ongoing_request.
_MIGRATIONS = "model_migration_total"


@dataclass(frozen=True, slots=True)
class Reading:
    """Counters of workers and frontend since their start. None: unreachable, or not counted."""

    workers: Mapping[str, Mapping[str, float] | None]  # by worker name; metric families are summed over their labels
    migrations: int | None
    max_num_tokens: int | None  # tokens per step: the smallest value that a worker publishes

    def total(self, family: str) -> int | None:
        values = [None if one is None else one.get(family) for one in self.workers.values()]
        known = [value for value in values if value is not None]
        return round(sum(known)) if known and len(known) == len(values) else None


def read_counts(plan: Plan) -> Reading:
    with httpx.Client(timeout=_TIMEOUT_S, trust_env=False, verify=trust_of(plan.url, plan.certificate)) as client:
        workers = {
            one.name: None if one.system_port is None else _families(client, f"http://127.0.0.1:{one.system_port}")
            for one in plan.workers
        }
        return Reading(workers, _migrations(client, plan.url), _max_num_tokens(client, plan))


def _text(client: httpx.Client, url: str) -> str | None:
    try:
        return client.get(f"{url}/metrics").raise_for_status().text
    except httpx.HTTPError:
        return None


def _families(client: httpx.Client, url: str) -> dict[str, float] | None:
    text = _text(client, url)
    if text is None:
        return None
    found: dict[str, float] = {}
    for name, _, value in _SAMPLE.findall(text):
        if name.startswith("trtx_"):
            found[name] = found.get(name, 0.0) + float(value)
    return found


def _migrations(client: httpx.Client, url: str) -> int | None:
    """Number of migrated streams; None if the frontend doesn't answer. A missing counter hasn't counted yet."""
    text = _text(client, url)
    if text is None:
        return None
    counted = [
        float(value)
        for name, labels, value in _SAMPLE.findall(text)
        if name.endswith(_MIGRATIONS) and "ongoing_request" in labels
    ]
    return round(sum(counted))


def _max_num_tokens(client: httpx.Client, plan: Plan) -> int | None:
    try:
        answer = client.get(f"{plan.url}{worker_facts.PATH}").raise_for_status()
    except httpx.HTTPError:
        return None
    published = [one.facts.max_num_tokens for one in worker_facts.of_body(answer.content) or ()]
    known = [one for one in published if one is not None]
    return min(known) if known and len(known) == len(published) else None


def evidence_of(
    route: str,
    plan: Plan,
    before: Reading,
    after: Reading,
    answers: Iterable[ParityAnswer],
    *,
    kill: Kill | None = None,
    has_fault: bool = False,
) -> RouteEvidence:
    """The counts for ``route``, and a reason if they don't prove that the route was used.

    ``kill``: None if no worker was killed. ``has_fault``: TRTX_FAULT was set.
    """
    whole = [one for one in answers if one.failure is None]

    def since(family: str) -> int | None:
        then, now = before.total(family), after.total(family)
        return None if then is None or now is None or now < then else now - then

    reused = _reused(whole)
    counts, corrupted = [Count(_FOUND, reused)], None
    missing: str | None = None
    if route == "disagg":
        # An engine that recomputes a prompt counts that; TensorRT-LLM fails the request instead. Workers also count
        # requests that arrived without a handoff.
        reads, whole_there = since("trtx_handoff_reads_total"), since("trtx_whole_requests_total")
        recomputed = None if whole_there is None else whole_there + (since("trtx_recomputed_prefixes_total") or 0)
        counts += [Count("handoffs", reads), Count("prompts recomputed in place of one", recomputed)]
        if has_fault:
            corrupted = since("trtx_corrupted_handoffs_total")
            counts.append(Count("handoffs corrupted on purpose", corrupted))
        if reads is None or recomputed is None:
            missing = "the workers do not count their handoffs"
        elif reads < len(whole):
            missing = f"{len(whole)} requests were answered with {reads} handoffs"
        elif recomputed:
            missing = f"{recomputed} prompts were computed by a decode worker in place of a handoff"
    elif route == "kv":
        shares = _ended_since(before, after)
        counts += [Count(f"requests of {name}", value) for name, value in shares.items()]
        if not plan.routes_by_prefix:
            missing = "the router does not route by KV"
        elif None in shares.values():
            missing = "the workers do not say how many requests they ended"
        elif sum(bool(one) for one in shares.values()) < 2:
            missing = "the router sent every request to one worker"
        elif reused is None:
            missing = "the answers do not report cached tokens"
        elif not reused:
            missing = "no request found cached KV, so the router had no reason to choose a worker"
    elif route == "migrated":
        counts, missing = _of_migration(counts, before, after, whole, kill)
    elif route == "chunked":
        most = after.max_num_tokens
        cut = _cut(whole, most)
        counts += [Count("tokens of one step at most", most), Count("prompts that took more than one step", cut)]
        if most is None:
            missing = "the workers do not publish how many tokens a step takes"
        elif cut is None:
            missing = "the answers do not report cached tokens"
        elif not cut:
            missing = f"no prompt had more than {most} tokens to compute"
    elif route == "speculating":
        drafts = _from_none("trtx_drafts_total", before, after)
        accepted = _from_none("trtx_accepted_draft_tokens_total", before, after) or 0
        counts += [Count("drafts", drafts), Count("drafted tokens that were accepted", accepted)]
        if drafts is None:
            missing = "the workers do not count drafts"
        elif not accepted:
            missing = "no drafted token was accepted; ask for longer answers with --osl"
    return RouteEvidence(tuple(counts), missing, corrupted=corrupted)


def _from_none(family: str, before: Reading, after: Reading) -> int | None:
    """The increase of a counter of drafts. A worker has no sample of it until its engine reports its first ones."""
    now = after.total(family)
    return None if now is None else now - (before.total(family) or 0)


def evidence_of_attached(answers: Iterable[ParityAnswer]) -> RouteEvidence:
    """Evidence for an attached server: its internals are not visible, so nothing is checked."""
    whole = [one for one in answers if one.failure is None]
    return RouteEvidence((Count(_FOUND, _reused(whole)),), None, is_checked=False)


def _reused(whole: Sequence[ParityAnswer]) -> int | None:
    """Total of cached prompt tokens; None if an answer doesn't report them."""
    found = [one.cached_tokens for one in whole]
    known = [one for one in found if one is not None]
    return sum(known) if len(known) == len(found) and found else None


def _cut(whole: Sequence[ParityAnswer], most: int | None) -> int | None:
    """Number of prompts with more tokens to compute than fit into a step; None if a number is unknown."""
    if most is None or any(one.prompt_tokens is None or one.cached_tokens is None for one in whole):
        return None
    return sum((one.prompt_tokens or 0) - (one.cached_tokens or 0) > most for one in whole)


def _of_migration(
    counts: list[Count], before: Reading, after: Reading, whole: Sequence[ParityAnswer], kill: Kill | None
) -> tuple[list[Count], str | None]:
    """Counts and missing evidence for the migrated route.

    An answer was migrated if its worker was killed in the middle of it and it is complete without a retry. The frontend
    counts the broken streams of all clients.
    """
    broken = None if after.migrations is None or before.migrations is None else after.migrations - before.migrations
    if kill is None:
        return counts, "no worker was killed: all streams had ended before; ask for longer answers with --osl"
    moved = sum(one.index in kill.open_streams and one.attempts == 1 for one in whole)
    counts = [
        *counts,
        Count("streams that clients had open there", len(kill.open_streams)),
        Count("streams that broke, by the frontend", broken),
        Count("answers that went on elsewhere", moved),
    ]
    if not moved:
        return counts, f"{kill.worker} was killed, but none of its answers continued on another worker"
    if broken is None:
        return counts, "the frontend does not say whether a stream broke"
    if not broken:
        return counts, f"{kill.worker} was killed, but the frontend saw none of its streams break"
    return counts, None


def _ended_since(before: Reading, after: Reading) -> dict[str, int | None]:
    """Number of ended requests by worker; None for a worker that doesn't report it or has been restarted."""
    found: dict[str, int | None] = {}
    for name, now in after.workers.items():
        then = before.workers.get(name)
        known = now is not None and then is not None
        ended = round(now.get(_ENDED, 0) - then.get(_ENDED, 0)) if known else -1  # type: ignore[union-attr]
        found[name] = None if ended < 0 else ended
    return found
