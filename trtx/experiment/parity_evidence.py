"""Whether a route was what it is called after: counted by those who did it, before and after its prompts were sent."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import httpx

from trtx.engine import worker_facts
from trtx.evals.parity import Answer
from trtx.evals.parity.forms import Count, Evidence
from trtx.experiment.parity_spec import Route
from trtx.topology import Plan

_TIMEOUT_S = 5.0
_SAMPLE = re.compile(r"^([a-z_]+)(?:\{([^}]*)\})? ([0-9.e+-]+)$", re.MULTILINE)
_MIGRATIONS = "model_migration_total"  # of the frontend; Dynamo 1.4.2 calls those in mid-stream ongoing_request


@dataclass(frozen=True, slots=True)
class Reading:
    """What workers and frontend have counted since they began. None: it could not be asked, or does not count."""

    workers: Mapping[str, Mapping[str, float] | None]  # by name, families summed over their labels
    migrations: int | None
    max_num_tokens: int | None  # of one step, the least that a worker publishes

    def total(self, family: str) -> int | None:
        values = [None if one is None else one.get(family) for one in self.workers.values()]
        known = [value for value in values if value is not None]
        return round(sum(known)) if known and len(known) == len(values) else None


def read_counts(plan: Plan) -> Reading:
    # Plain HTTP to this machine: reading the system's certificates would cost 30 ms of CPU.
    with httpx.Client(timeout=_TIMEOUT_S, trust_env=False, verify=False) as client:
        workers = {
            one.name: None if one.system_port is None else _families(client, f"http://127.0.0.1:{one.system_port}")
            for one in plan.workers
        }
        return Reading(workers, _migrations(client, plan.url), _max_num_tokens(client, plan))


def busiest(plan: Plan) -> tuple[str, int] | None:
    """The worker with most requests open, and how many; None where none says that it has one."""
    counts = {
        name: round(found.get("trtx_open_requests", 0))
        for name, found in read_counts(plan).workers.items()
        if found is not None
    }
    name = max(counts, key=lambda one: counts[one], default=None)
    return None if name is None or not counts[name] else (name, counts[name])


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
    """None where the frontend does not answer. A counter that is not there has not counted yet."""
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
    route: Route,
    plan: Plan,
    before: Reading,
    after: Reading,
    answers: Iterable[Answer],
    killed: str | None,
) -> Evidence:
    """What was counted on ``route``, and what is missing of what makes it one. ``killed``: the worker that was."""
    whole = [one for one in answers if one.failure is None]

    def since(family: str) -> int | None:
        then, now = before.total(family), after.total(family)
        return None if then is None or now is None else now - then

    reused = sum(one.cached_tokens or 0 for one in whole)
    counts = [Count("tokens of prompts found in a cache", reused)]
    missing: str | None = None
    if route == "disagg":
        reads, recomputed = since("trtx_handoff_reads_total"), since("trtx_recomputed_prefixes_total")
        counts += [Count("handoffs", reads), Count("prompts recomputed in place of one", recomputed)]
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
            missing = "the router does not look at KV"
        elif None in shares.values() or sum(bool(one) for one in shares.values()) < 2:
            missing = "the router sent every request to one worker"
        elif not reused:
            missing = "no request found KV, so the router had nothing to choose by"
    elif route == "migrated":
        moved = None if after.migrations is None or before.migrations is None else after.migrations - before.migrations
        seen = sum(bool(one.resent) for one in whole)
        counts += [Count("streams that went on elsewhere", moved), Count("of them seen in their answers", seen)]
        if killed is None:
            missing = "no worker was killed: all streams had ended before; ask for longer answers with --osl"
        elif not moved:
            missing = f"{killed} was killed, and no stream of it went on elsewhere"
    elif route == "chunked":
        most = after.max_num_tokens
        cut = None if most is None else sum((one.prompt_tokens or 0) - (one.cached_tokens or 0) > most for one in whole)
        counts += [Count("tokens of one step at most", most), Count("prompts that took more than one step", cut)]
        if cut is None:
            missing = "the workers do not publish how many tokens a step takes"
        elif not cut:
            missing = f"no prompt had more than {most} tokens to compute"
    return Evidence(tuple(counts), missing)


def _ended_since(before: Reading, after: Reading) -> dict[str, int | None]:
    found: dict[str, int | None] = {}
    for name, now in after.workers.items():
        then = before.workers.get(name)
        known = now is not None and then is not None
        found[name] = (
            round(now.get("trtx_requests_total", 0) - then.get("trtx_requests_total", 0)) if known else None  # type: ignore[union-attr]
        )
    return found
