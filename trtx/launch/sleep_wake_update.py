"""Puts the workers of a served topology to sleep, wakes them, and gives them new weights, over their system ports."""

from __future__ import annotations

import http.client
import json
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from trtx.errors import LaunchError, UsageError
from trtx.launch.readiness import complete_once_routed, own_headers, request
from trtx.launch.warm_up import warm_up_prompt
from trtx.topology import Plan, ProcessSpec

_CHANGE_S = 600.0
"""How long a worker may take to change its memory, after its requests have ended: it may read a large checkpoint."""

_ANSWER_S = 60.0

Tell = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class ServedMemory:
    """The workers to control. ``tell`` gets a sentence for each worker that has done what it was asked.

    Every method raises UsageError if a worker refuses, and LaunchError if one can't be reached.
    """

    workers: tuple[ProcessSpec, ...]
    drain_s: float
    tell: Tell

    @classmethod
    def of(cls, plan: Plan, names: Sequence[str], *, drain_s: float, tell: Tell) -> ServedMemory:
        """``names``: the workers to control; empty: all but encode workers. Raises UsageError for an unknown name."""
        able = {worker.name: worker for worker in plan.workers if worker.role != "encode" and worker.system_port}
        for name in names:
            if name not in able:
                raise UsageError(f"--worker {name} is not in this topology; expected one of {', '.join(able)}")
        return cls(tuple(worker for name, worker in able.items() if not names or name in names), drain_s, tell)

    def sleep(self, tags: Sequence[str]) -> None:
        """Releases the memory of ``tags``. If a worker refuses, those that this call put to sleep are woken again.

        Prefill workers go first: decode workers must be there to read what they have handed off.
        """
        body = {"tags": list(tags), "timeout_s": self.drain_s}
        done: list[ProcessSpec] = []
        for group in self._groups(prefill_first=True):
            try:
                done += self._all(group, "release", body)
            except (UsageError, LaunchError):
                for worker in reversed(done):
                    _ask(worker, "resume", {"tags": list(tags)}, self.drain_s)
                raise

    def wake(self, tags: Sequence[str] | None) -> None:
        """Takes the memory of ``tags`` again; None: all that is released. Prefill workers go last.

        Workers that are awake are left alone, if any of the others sleeps.
        """
        asleep = self._asleep()
        for group in (asleep if asleep.workers else self)._groups(prefill_first=False):
            self._all(group, "resume", {"tags": None if tags is None else list(tags)})

    def update_weights(self, model: Path) -> None:
        """Replaces the weights. No worker serves in between, so no answer mixes old and new ones.

        Workers that sleep already stay asleep.
        """
        asleep = self._asleep().workers
        awake = tuple(worker for worker in self.workers if worker not in asleep)
        those = ServedMemory(awake, self.drain_s, lambda sentence: None)
        those.sleep(["kv_cache"])
        updated: list[str] = []
        try:
            for worker in self.workers:
                _ask(worker, "update_weights", {"model": str(model), "timeout_s": self.drain_s}, self.drain_s)
                updated.append(worker.name)
                self.tell(f"{worker.name} has the weights of {model}")
        except (UsageError, LaunchError) as error:
            if updated:
                raise type(error)(
                    f"{error}; {', '.join(updated)} got the new weights already, so the workers stay asleep: update "
                    "again"
                ) from error
            those.wake(None)
            raise
        those.wake(None)

    def await_answer(self, plan: Plan) -> None:
        """Waits until ``plan``'s frontend answers a request again, if all of its workers are awake.

        Dynamo 1.6.1's frontend routes to a worker a moment after the worker has joined. Raises LaunchError.
        """
        everyone = ServedMemory.of(plan, (), drain_s=self.drain_s, tell=self.tell)
        if everyone._asleep().workers:
            return
        problem = complete_once_routed(
            plan.url, plan.model, warm_up_prompt(0), 1, timeout_s=_ANSWER_S, certificate=plan.certificate,
            headers=own_headers(plan.namespace),
        )  # fmt: skip
        if problem is not None:
            raise LaunchError(f"the workers are awake, but {plan.url} does not answer: {problem}")

    def _asleep(self) -> ServedMemory:
        """The controls of those workers that are out of routing."""
        states = [(worker, _ask(worker, "memory_status", {}, self.drain_s)) for worker in self.workers]
        return replace(self, workers=tuple(worker for worker, state in states if not state["is_routed"]))

    def _groups(self, *, prefill_first: bool) -> list[list[ProcessSpec]]:
        prefill = [worker for worker in self.workers if worker.role == "prefill"]
        others = [worker for worker in self.workers if worker.role != "prefill"]
        return [group for group in ((prefill, others) if prefill_first else (others, prefill)) if group]

    def _all(self, workers: list[ProcessSpec], control: str, body: dict[str, Any]) -> list[ProcessSpec]:
        """Asks all at once. Raises the first error, after every worker has answered."""
        with ThreadPoolExecutor(len(workers)) as pool:
            answers = [pool.submit(_ask, worker, control, body, self.drain_s) for worker in workers]
        good: list[ProcessSpec] = []
        for worker, answer in zip(workers, answers, strict=True):
            if answer.exception() is None:
                good.append(worker)
                parked = ", ".join(answer.result()["parked_tags"])
                self.tell(f"{worker.name} sleeps: {parked} released" if parked else f"{worker.name} is awake")
        for answer in answers:
            if (error := answer.exception()) is not None:
                if control == "release":
                    for worker in good:
                        _ask(worker, "resume", {"tags": body["tags"]}, self.drain_s)
                raise error
        return good


def _ask(worker: ProcessSpec, control: str, body: dict[str, Any], drain_s: float) -> dict[str, Any]:
    url = f"http://{worker.address}:{worker.system_port}"
    try:
        code, answer = request(url, "POST", f"/engine/control/{control}", body, timeout_s=drain_s + _CHANGE_S)
    except (OSError, http.client.HTTPException) as error:
        raise LaunchError(
            f"{worker.name} does not answer at {url} ({error}); check that its trtx serve still runs"
        ) from error
    if code == 404:
        raise UsageError(
            f"{worker.name} has no {control} control, which only the torch engine has, and only with sleep_config; "
            "start the topology with trtx serve --engine torch --set 'sleep_config={}'"
        )
    try:
        document: dict[str, Any] = json.loads(answer)
        problem = "" if document["status"] == "ok" else str(document["message"])
    except (ValueError, LookupError, TypeError):
        problem = f"HTTP {code} of {control}: {answer.decode(errors='replace')[:300] or 'an empty body'}"
    if problem:
        raise UsageError(problem)
    return document
