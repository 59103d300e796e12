"""Whether KV really moves from each prefill worker to each decode worker: one request for each pair of them.

A handoff that fails answers its request all the same: the decode worker computes the prompt a second time, so that
nothing of a split topology is left but its costs, and no status, no log of the frontend and no answer tells. So a pair
counts as proved only where the decode worker itself says that KV came, from that very prefill worker.
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

from trtx.engine import worker_facts
from trtx.engine.handoff_facts import HandoffFacts
from trtx.launch.readiness import request
from trtx.topology import Plan

MOST_PAIRS = 64
"""That are all proved. Of more, so many that every worker is in one, and every pair of hosts."""
TOKENS = 2
"""That each request asks for: the first is prefill's, and for one more decode needs the prompt's KV."""
_HAND_OVER = ("torch", "tensorrt-llm")  # engines; the others keep no KV, so there is nothing to hand over
_AT_ONCE = 8
_STRAYS = 20  # requests for each decode worker: of a router that draws them, one in 1e8 is not among so many
# Of Dynamo 1.4.2: to which workers a request goes, by their instance ids. Seen: a KV router goes by both, any other by
# the prefill worker's alone, which has to be there, or the decode worker's is taken for it.
TO_WORKER, TO_PREFILL = "x-worker-instance-id", "x-prefill-instance-id"
# The first needs no chat template; the second alone answers with a worker's own words where one refuses a request.
_COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
_UCX_DEVICE = "UCX_NET_DEVICES"
_UCX_ERROR = re.compile(r"^\[.*UCX +ERROR +(.*)$", re.MULTILINE)
_ASKED_TIMEOUT_S = 2.0
_LOG_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Pair:
    """Names of two workers of one topology."""

    prefill: str
    decode: str


Lives = tuple[int, int]
"""Dynamo's instance ids of a pair's workers: a worker that was started again has another."""


def pairs_of(plan: Plan, most: int = MOST_PAIRS) -> tuple[Pair, ...]:
    """The pairs to prove; none where no KV is handed over. All of them up to ``most``, else each worker once at least,
    and each pair of hosts."""
    if plan.mode != "disagg" or plan.engine not in _HAND_OVER:
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
    return tuple(Pair(one.name, other.name) for one, other in everything)


def ask_worker_ids(url: str, model: str, certificate: Path | None = None) -> dict[str, int]:
    """Instance ids by name, of the workers that are registered; without those that two claim, or nobody publishes.
    ``certificate``: as :func:`request`."""
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
    """Of one plan, asked of one frontend: which pairs moved KV, by the lives of their workers.

    Threads may prove different pairs at once. ``unknown`` is set once an engine did not say what became of its KV.
    """

    def __init__(self, plan: Plan, url: str = "", here: Plan | None = None) -> None:
        """``url``: of the frontend to ask, the plan's own without one; ``here``: the share that this machine runs,
        which knows where its logs are. Asks nothing yet."""
        self.pairs = pairs_of(plan)
        self.unknown = ""
        self.moved_bytes = 0
        self._plan = plan
        self._url = url or plan.url
        self._workers = {worker.name: worker for worker in plan.workers}
        self._logs = {worker.name: worker.log_path for worker in (here or plan).workers}
        self._lock = threading.Lock()
        self._proved: dict[Pair, Lives | None] = {}  # None: lives are not known, so it holds for this once

    def missing(self, ids: Mapping[str, int]) -> tuple[Pair, ...]:
        """Pairs that are not proved with workers of these ids."""
        with self._lock:
            return tuple(pair for pair in self.pairs if self._is_missing(pair, ids))

    def _is_missing(self, pair: Pair, ids: Mapping[str, int]) -> bool:
        lives = _lives(pair, ids)
        return lives is None or self._proved.get(pair) != lives

    @property
    def told(self) -> str:
        """What is proved, as the end of a sentence; empty where there is nothing to prove, or not all of it is."""
        if self.unknown:
            return f"; handoffs are not checked: {self.unknown}"
        if not self.pairs or self._proved.keys() < set(self.pairs):
            return ""
        pairs = "its pair of workers" if len(self.pairs) == 1 else f"each of {len(self.pairs)} pairs of workers"
        return f", and KV in {pairs}"

    def worker_ids(self) -> dict[str, int]:
        """As the frontend tells them now."""
        return ask_worker_ids(self._url, self._plan.model, self._plan.certificate) if self.pairs else {}

    def prove_missing(self, ids: Mapping[str, int], timeout_s: float) -> str | None:
        """All that are missing. None, or a clause: the first pair that is not proved, with the cause.

        ``ids``: see :meth:`worker_ids`. ``timeout_s``: of each request. One for each pair at once, which proves them
        all where the router goes by what it is asked; then one after the other for what is left, as a router that
        takes its decode workers in turn comes to each of them only so.
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

    def _insist(self, pair: Pair, ids: Mapping[str, int], timeout_s: float, proved: set[Pair]) -> str | None:
        """Asks until a request came to ``pair``. Adds each pair that moved KV meanwhile to ``proved``."""
        for _ in range(_STRAYS * len({one.decode for one in self.pairs})):
            came_to, problem = self._ask(pair, ids, timeout_s)
            if problem is None:
                proved.add(came_to)
            if came_to == pair:
                return problem
        return f"the router sent no request from {self._told(pair.prefill)} to {self._told(pair.decode)}"

    def _ask(self, pair: Pair, ids: Mapping[str, int], timeout_s: float) -> tuple[Pair, str | None]:
        """One request: the pair that it came to, and what is wrong with that, None where nothing is."""
        code, answer = self._send(pair, ids, _COMPLETIONS, timeout_s)
        if code != 200:
            return pair, self._sentence(pair, self._refusal(pair, ids, timeout_s) or f"HTTP {code}: {answer}")
        facts = _facts(answer)
        if facts is None or facts.outcome == "unknown":
            with self._lock:
                self.unknown = f"{pair.decode}'s engine does not say what becomes of the KV that it is handed"
            return pair, None
        seen = Pair(facts.prefill or "", facts.decode)
        if facts.outcome == "read":
            with self._lock:
                self._proved[seen] = _lives(seen, ids)
                self.moved_bytes += facts.bytes
            return seen, None
        if facts.outcome == "whole":
            return pair, f"{self._told(facts.decode)} was given a request that no prefill worker had had"
        because = facts.because or "nothing of a new prompt was read"
        return seen, self._sentence(seen, because + self._said_by_ucx(seen.decode), self._remedy(seen))

    def _refusal(self, pair: Pair, ids: Mapping[str, int], timeout_s: float) -> str:
        """What a worker refuses the pair's requests with; empty where that can't be told."""
        code, answer = self._send(pair, ids, CHAT, timeout_s)
        try:
            return str(json.loads(answer)["message"]) if 400 <= code < 500 else ""
        except (ValueError, LookupError, TypeError):
            return ""

    def _send(self, pair: Pair, ids: Mapping[str, int], path: str, timeout_s: float) -> tuple[int, str]:
        """Status and body; status 0 and what went wrong where no answer came."""
        prompt = secrets.token_hex(6)  # whose first block no cache has; shorter than the first request of all
        body = {
            "model": self._plan.model,
            **({"prompt": prompt} if path == _COMPLETIONS else {"messages": [{"role": "user", "content": prompt}]}),
            "max_tokens": TOKENS,
            "min_tokens": TOKENS,
            "ignore_eos": True,
            "temperature": 0.0,
            "nvext": {"extra_fields": ["engine_data"]},
        }
        headers: dict[str, str] = {}
        if (lives := _lives(pair, ids)) is not None:
            headers = dict(zip((TO_PREFILL, TO_WORKER), map(str, lives), strict=True))
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

    def _sentence(self, pair: Pair, cause: str, remedy: str = "") -> str:
        return f"no KV came from {self._told(pair.prefill)} to {self._told(pair.decode)}: {_shortened(cause)}{remedy}"

    def _remedy(self, pair: Pair) -> str:
        """Of a pair that the network keeps apart, as far as can be told from here."""
        ends = [self._workers.get(pair.prefill), self._workers.get(pair.decode)]
        places = {(one.host, one.env.get(_UCX_DEVICE, "")) for one in ends if one is not None}
        if len(places) < 2:
            return ""
        hosts = " and of ".join(dict.fromkeys(one.host for one in ends if one is not None and one.host))
        where = f"the device of {hosts} in the hosts file" if hosts else _UCX_DEVICE
        return f"; correct {where}: it has to name on each side a device by which it reaches the other"

    def _told(self, name: str) -> str:
        """A worker as a person knows it: over hosts with its own, and the device that UCX takes there."""
        worker = self._workers.get(name)
        if worker is None:
            return name or "a worker that did not say its name"
        if not worker.host:
            return name
        device = worker.env.get(_UCX_DEVICE)
        return f"{name} (on {worker.host}{f', {_UCX_DEVICE}={device}' if device else ''})"

    def _said_by_ucx(self, name: str) -> str:
        """Its last complaint in the log of a worker of this machine; NIXL's error is but a code."""
        said = _last_of_ucx(self._logs[name]) if name in self._logs else ""
        return f"; UCX says: {said}" if said else ""


def _lives(pair: Pair, ids: Mapping[str, int]) -> Lives | None:
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
    said = _UCX_ERROR.findall(text)
    return said[-1] if said else ""


def _shortened(cause: str, longest: int = 400) -> str:
    line = " ".join(cause.split()).rstrip(".")
    return line if len(line) <= longest else line[:longest] + "…"
