"""Checks that KV moves from each prefill worker to each decode worker, with one request per pair.

A request whose handoff fails is still answered, because the decode worker computes the prompt a second time. The
topology then has only the costs of disaggregation, and neither the status, the frontend's log nor the answer shows it.
So a pair counts as proved only if the decode worker itself reports that KV arrived from that prefill worker.
"""

from __future__ import annotations

import http.client
import itertools
import json
import re
import secrets
import threading
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from trtx.engine import MODEL_ENGINES, worker_facts
from trtx.engine.handoff_facts import HandoffFacts
from trtx.launch.readiness import own_headers, request
from trtx.topology import Plan

MOST_PAIRS = 64
"""Number of pairs up to which all are proved.

With more, a selection is proved that contains every worker and every pair of hosts.
"""
TOKENS = 2
"""Number of tokens per request: prefill makes the first, and decode needs the prompt's KV for the second."""
_AT_ONCE = 8
_STRAYS = 20  # requests per decode worker; a router that draws workers at random misses one with a probability of 1e-8
# Dynamo's headers that select a request's workers by instance id. With 1.6.1 every router mode obeys both; a decode
# worker's without a prefill worker's is a 400.
TO_WORKER, TO_PREFILL = "x-worker-instance-id", "x-prefill-instance-id"
# The first needs no chat template; only the second returns a worker's own message when the worker refuses a request.
_COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
_UCX_DEVICE = "UCX_NET_DEVICES"
_UCX_ERROR = re.compile(r"^\[.*UCX +ERROR +(.*)$", re.MULTILINE)
_ASKED_TIMEOUT_S = 2.0
_LOG_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class WorkerPair:
    """The names of two workers of one topology."""

    prefill: str
    decode: str


Lives = tuple[int, int]
"""Dynamo's instance ids of a pair's workers, which change when a worker restarts."""


def pairs_of(plan: Plan, most: int = MOST_PAIRS) -> tuple[WorkerPair, ...]:
    """The pairs to prove; empty if the topology has no KV handoffs.

    Up to ``most`` pairs, all of them; otherwise a selection with each worker and each pair of hosts at least once.
    """
    if plan.mode != "disagg" or plan.engine not in MODEL_ENGINES:
        return ()
    prefill = [worker for worker in plan.workers if worker.role == "prefill"]
    decode = [worker for worker in plan.workers if worker.role == "decode"]
    everything = list(itertools.product(prefill, decode))
    if len(everything) > most:
        count = max(len(prefill), len(decode))
        chosen = [(prefill[n % len(prefill)], decode[n % len(decode)]) for n in range(count)]
        hosts = {(one.host, other.host) for one, other in chosen}
        for one, other in everything:
            if (one.host, other.host) not in hosts:
                hosts.add((one.host, other.host))
                chosen.append((one, other))
        everything = chosen
    return tuple(WorkerPair(one.name, other.name) for one, other in everything)


def ask_worker_ids(url: str, model: str, certificate: Path | None = None) -> dict[str, int]:
    """Instance ids of the registered workers by name, without names that are unpublished or used by two workers.

    ``certificate``: as for :func:`request`.
    """
    try:
        code, body = request(url, "GET", worker_facts.PATH, timeout_s=_ASKED_TIMEOUT_S, certificate=certificate)
    except (OSError, http.client.HTTPException):
        return {}
    found: dict[str, list[int]] = {}
    for worker in (worker_facts.of_body(body) if code == 200 else None) or ():
        if worker.model == model:
            found.setdefault(worker.facts.name, []).append(worker.worker_id)
    return {name: ids[0] for name, ids in found.items() if len(ids) == 1}


class HandoffProofs:
    """Proves, through one frontend, which pairs of a plan move KV. A proof is valid for the current worker instances.

    Thread-safe for different pairs. ``unknown`` is set once an engine did not report what happened to its KV.
    """

    def __init__(self, plan: Plan, url: str = "", here: Plan | None = None) -> None:
        """Sends no request yet.

        ``url``: the frontend to use; default: the plan's first. ``here``: this machine's share of the plan, which knows
        the log paths.
        """
        self.pairs = pairs_of(plan)
        self.unknown = ""
        self._plan = plan
        self._url = url or plan.url
        self._workers = {worker.name: worker for worker in plan.workers}
        self._logs = {worker.name: worker.log_path for worker in (here or plan).workers}
        self._lock = threading.Lock()
        # None: instance ids unknown, so the proof counts for this check only
        self._proved: dict[WorkerPair, Lives | None] = {}

    def missing(self, ids: Mapping[str, int]) -> tuple[WorkerPair, ...]:
        """Pairs that are not proved for the workers with these ids."""
        with self._lock:
            return tuple(pair for pair in self.pairs if self._is_missing(pair, ids))

    def _is_missing(self, pair: WorkerPair, ids: Mapping[str, int]) -> bool:
        lives = _lives(pair, ids)
        return lives is None or self._proved.get(pair) != lives

    @property
    def summary(self) -> str:
        """The proved pairs, as the end of a sentence; "" if there is nothing to prove, or not everything is proved."""
        if self.unknown:
            return f"; handoffs are not checked: {self.unknown}"
        if not self.pairs or not self._proved.keys() >= set(self.pairs):
            return ""
        pairs = "its pair of workers" if len(self.pairs) == 1 else f"each of {len(self.pairs)} pairs of workers"
        return f", and KV in {pairs}"

    def worker_ids(self) -> dict[str, int]:
        """The current instance ids from the frontend."""
        return ask_worker_ids(self._url, self._plan.model, self._plan.certificate) if self.pairs else {}

    def prove_missing(self, ids: Mapping[str, int], timeout_s: float) -> str | None:
        """Proves all missing pairs.

        Returns None, or a clause with the first pair that could not be proved and the cause. ``ids``: see
        :meth:`worker_ids`. ``timeout_s``: per request. First it sends one request per pair concurrently, which is
        enough if the workers' ids are known. For the pairs that are left it sends requests one after another, because
        a round-robin router reaches a worker whose id is unknown only that way.
        """
        missing = self.missing(ids)
        if not missing:
            return None
        pool = ThreadPoolExecutor(max_workers=min(len(missing), _AT_ONCE))
        try:
            asked = list(pool.map(lambda pair: self._ask(pair, ids, timeout_s), missing))
        finally:
            pool.shutdown(wait=False, cancel_futures=True)
        proved = {pair for pair, problem in asked if problem is None}
        for pair in missing:
            if pair not in proved and (problem := self._insist(pair, ids, timeout_s, proved)) is not None:
                return problem
        return None

    def _insist(
        self, pair: WorkerPair, ids: Mapping[str, int], timeout_s: float, proved: set[WorkerPair]
    ) -> str | None:
        """Sends requests until one reached ``pair``. Adds each pair that moved KV in the meantime to ``proved``."""
        for _ in range(_STRAYS * len({one.decode for one in self.pairs})):
            came_to, problem = self._ask(pair, ids, timeout_s)
            if problem is None:
                proved.add(came_to)
            if came_to == pair:
                return problem
        return f"the router sent no request from {self._label(pair.prefill)} to {self._label(pair.decode)}"

    def _ask(self, pair: WorkerPair, ids: Mapping[str, int], timeout_s: float) -> tuple[WorkerPair, str | None]:
        """Sends one request. Returns the pair that served it, and the problem, or None."""
        code, answer = self._send(pair, ids, _COMPLETIONS, timeout_s)
        if code == 0:
            workers = f"{self._label(pair.prefill)} and {self._label(pair.decode)}"
            return pair, f"the frontend did not answer the request that checks the handoff between {workers}: {answer}"
        if code != 200:
            return pair, self._sentence(pair, self._refusal(pair, ids, timeout_s) or f"HTTP {code}: {answer}")
        facts = _facts(answer)
        if facts is None or facts.outcome == "unknown":
            with self._lock:
                self.unknown = f"{pair.decode}'s engine does not report what happens to the KV that it receives"
            return pair, None
        seen = WorkerPair(facts.prefill or "", facts.decode)
        if facts.outcome == "read":
            with self._lock:
                self._proved[seen] = _lives(seen, ids)
            return seen, None
        if facts.outcome == "local":  # the ids were unknown, so the request named no prefill worker
            return WorkerPair("", facts.decode), f"the router sent no request to {self._label(pair.prefill)}"
        if facts.outcome == "whole":
            return pair, f"{self._label(facts.decode)} received a request that no prefill worker had processed"
        because = facts.because or "no KV of a new prompt was read"
        return seen, self._sentence(seen, because + self._ucx_error(seen.decode), self._remedy(seen))

    def _refusal(self, pair: WorkerPair, ids: Mapping[str, int], timeout_s: float) -> str:
        """The message with which a worker refuses the pair's requests; "" if unknown."""
        code, answer = self._send(pair, ids, CHAT, timeout_s)
        try:
            return str(json.loads(answer)["message"]) if 400 <= code < 500 else ""
        except (ValueError, LookupError, TypeError):
            return ""

    def _send(self, pair: WorkerPair, ids: Mapping[str, int], path: str, timeout_s: float) -> tuple[int, str]:
        """Status and body of the response; status 0 and the error if there was none."""
        prompt = secrets.token_hex(6)  # random, so that no cache has its first block; shorter than the warm-up requests
        body = {
            "model": self._plan.model,
            **({"prompt": prompt} if path == _COMPLETIONS else {"messages": [{"role": "user", "content": prompt}]}),
            "max_tokens": TOKENS,
            "min_tokens": TOKENS,
            "ignore_eos": True,
            "temperature": 0.0,
            "nvext": {"extra_fields": ["engine_data"]},
        }
        headers = own_headers(self._plan.namespace)
        if (lives := _lives(pair, ids)) is not None:
            headers |= dict(zip((TO_PREFILL, TO_WORKER), map(str, lives), strict=True))
        try:
            code, answer = request(
                self._url,
                "POST",
                path,
                body,
                headers=headers,
                timeout_s=timeout_s,
                certificate=self._plan.certificate,
            )
            return code, answer.decode(errors="replace")
        except (OSError, http.client.HTTPException) as error:
            return 0, f"{type(error).__name__}: {error}"

    def _sentence(self, pair: WorkerPair, cause: str, remedy: str = "") -> str:
        return f"no KV came from {self._label(pair.prefill)} to {self._label(pair.decode)}: {_shortened(cause)}{remedy}"

    def _remedy(self, pair: WorkerPair) -> str:
        """A remedy for a pair whose network devices may not reach each other, or ""."""
        ends = [self._workers.get(pair.prefill), self._workers.get(pair.decode)]
        places = {(one.host, one.env.get(_UCX_DEVICE, "")) for one in ends if one is not None}
        if len(places) < 2:
            return ""
        hosts = " and of ".join(dict.fromkeys(one.host for one in ends if one is not None and one.host))
        where = f"the device of {hosts} in the hosts file" if hosts else _UCX_DEVICE
        return f"; correct {where}: it has to name a network device on each side that reaches the other"

    def _label(self, name: str) -> str:
        """A worker's name for the user; for several hosts with its host and its UCX device."""
        worker = self._workers.get(name)
        if worker is None:
            return name or "a worker without a name"
        if not worker.host:
            return name
        device = worker.env.get(_UCX_DEVICE)
        return f"{name} (on {worker.host}{f', {_UCX_DEVICE}={device}' if device else ''})"

    def _ucx_error(self, name: str) -> str:
        """The last UCX error in the worker's log if it runs on this machine; NIXL's own error is only a code."""
        error = _last_of_ucx(self._logs[name]) if name in self._logs else ""
        return f"; UCX says: {error}" if error else ""


def _lives(pair: WorkerPair, ids: Mapping[str, int]) -> Lives | None:
    prefill, decode = ids.get(pair.prefill), ids.get(pair.decode)
    return None if prefill is None or decode is None else (prefill, decode)


def _facts(answer: str) -> HandoffFacts | None:
    try:
        return HandoffFacts.of_engine_data(json.loads(answer)["nvext"]["engine_data"])
    except (ValueError, LookupError, TypeError):
        return None


def _last_of_ucx(path: Path) -> str:
    try:
        with path.open("rb") as log:
            log.seek(max(0, path.stat().st_size - _LOG_BYTES))
            text = log.read().decode(errors="replace")
    except OSError:
        return ""
    errors = _UCX_ERROR.findall(text)
    return errors[-1] if errors else ""


def _shortened(cause: str) -> str:
    line = " ".join(cause.split()).rstrip(".")
    return line if len(line) <= 400 else line[:400] + "…"
