"""Puts the workers of a served topology to sleep, wakes them, and gives them new weights, over their system ports."""

from __future__ import annotations

import http.client
import json
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from trtx.errors import LaunchError, UsageError
from trtx.launch.readiness import complete, once_routed, own_headers, request
from trtx.launch.warm_up import warm_up_prompt
from trtx.topology import Plan, ProcessSpec

_CHANGE_S = 600.0
"""How long a worker may take to change its memory, after its requests have ended: it may read a large checkpoint."""

_ANSWER_S = 60.0

Tell = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class ServedMemory:
    """Controls the memory of workers. ``tell`` gets a sentence for each worker that has completed a command.

    Every method raises UsageError if a worker refuses, and LaunchError if one can't be reached.
    """

    workers: tuple[ProcessSpec, ...]
    namespace: str
    drain_s: float
    tell: Tell

    @classmethod
    def of(cls, plan: Plan, names: Sequence[str], *, drain_s: float, tell: Tell) -> ServedMemory:
        """``names``: the workers to control; empty: all but encode workers. Raises UsageError for an unknown name."""
        able = {worker.name: worker for worker in plan.workers if worker.role != "encode" and worker.system_port}
        for name in names:
            if name not in able:
                raise UsageError(f"--worker {name} is not in this topology; expected one of {', '.join(able)}")
        chosen = tuple(worker for name, worker in able.items() if not names or name in names)
        return cls(chosen, plan.namespace, drain_s, tell)

    def sleep(self, tags: Sequence[str]) -> None:
        """Releases the memory of ``tags``. After an error or Ctrl-C, wakes the workers that were awake before.

        Prefill workers go first: decode workers must be there to read what they have handed off.
        """
        body = {"tags": list(tags), "timeout_s": self.drain_s}
        asleep = self._asleep().workers
        awake = replace(self, workers=tuple(worker for worker in self.workers if worker not in asleep))
        try:
            for group in self._groups(prefill_first=True):
                self._all(group, "release", body)
        except BaseException:
            awake._wake_again(tags)
            raise

    def wake(self, tags: Sequence[str] | None) -> None:
        """Restores the memory of ``tags``, or all released memory for None. Prefill workers wake last.

        If some workers sleep, only those get the command. If none sleeps, all get it, and their refusal is raised.
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
        those = replace(self, workers=awake, tell=lambda sentence: None)
        those.sleep(["kv_cache"])
        updated: list[str] = []
        try:
            for worker in self.workers:
                _ask(worker, "update_weights", {"model": str(model), "timeout_s": self.drain_s}, self.drain_s)
                updated.append(worker.name)
                and_sleeps = ", and still sleeps" if worker in asleep else ""
                self.tell(f"{worker.name} has the weights of {model}{and_sleeps}")
        except (UsageError, LaunchError) as error:
            if updated:
                raise type(error)(
                    f"{error}; {', '.join(updated)} got the new weights already, so the workers stay asleep: update "
                    "again"
                ) from error
            those.wake(None)
            raise
        except KeyboardInterrupt:
            self.tell("interrupted: some workers may have the new weights, so the workers stay asleep; update again")
            raise
        those.wake(None)

    def await_answer(self, plan: Plan) -> None:
        """Waits until ``plan``'s frontend answers a request again, if all of its workers are awake.

        Dynamo 1.6.1's frontend routes to a worker a moment after the worker has joined. Raises LaunchError.
        """
        everyone = ServedMemory.of(plan, (), drain_s=self.drain_s, tell=self.tell)
        if everyone._asleep().workers:
            return
        ask = partial(
            complete, plan.url, plan.model, warm_up_prompt(0), 1, timeout_s=_ANSWER_S, certificate=plan.certificate,
            headers=own_headers(plan.namespace),
        )  # fmt: skip
        problem = once_routed(ask)
        if problem is not None:
            raise LaunchError(f"the workers are awake, but {plan.url} does not answer: {problem}")

    def _asleep(self) -> ServedMemory:
        """The controls of those workers that are out of routing.

        Every verb calls this first. Raises UsageError if a port of this run belongs to another run now.
        """
        states = [(worker, _ask(worker, "memory_status", {}, self.drain_s)) for worker in self.workers]
        for worker, state in states:
            if (found := state.get("namespace")) != self.namespace:
                raise UsageError(
                    f"{worker.name} of this run has ended: {worker.address}:{worker.system_port} belongs to a worker "
                    f"of another run now, in namespace {found or 'unknown'}; give the directory of that run"
                )
        return replace(self, workers=tuple(worker for worker, state in states if not state["is_routed"]))

    def _wake_again(self, tags: Sequence[str]) -> None:
        """Wakes the workers that sleep, last ones first. Reports a worker that can't be woken; raises nothing."""
        for worker in reversed([worker for group in self._groups(prefill_first=True) for worker in group]):
            try:
                if not _ask(worker, "memory_status", {}, self.drain_s)["is_routed"]:
                    _ask(worker, "resume", {"tags": list(tags)}, self.drain_s)
                    self.tell(f"{worker.name} is awake again")
            except (UsageError, LaunchError) as error:
                self.tell(f"{worker.name} may still sleep: {error}")

    def _groups(self, *, prefill_first: bool) -> list[list[ProcessSpec]]:
        prefill = [worker for worker in self.workers if worker.role == "prefill"]
        others = [worker for worker in self.workers if worker.role != "prefill"]
        return [group for group in ((prefill, others) if prefill_first else (others, prefill)) if group]

    def _all(self, workers: list[ProcessSpec], control: str, body: dict[str, Any]) -> None:
        """Asks all at once. Raises the first error, after every worker has answered."""
        with ThreadPoolExecutor(len(workers)) as pool:
            answers = [pool.submit(_ask, worker, control, body, self.drain_s) for worker in workers]
        for worker, answer in zip(workers, answers, strict=True):
            if answer.exception() is None:
                parked = ", ".join(answer.result()["parked_tags"])
                state = "still sleeps" if control == "resume" else "sleeps"
                self.tell(f"{worker.name} {state}: {parked} released" if parked else f"{worker.name} is awake")
        for answer in answers:
            answer.result()


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
            f"{worker.name} can't sleep or get new weights now: it is still starting, or runs without sleep_config. "
            "Try again once it is registered, or start the topology with trtx serve --engine torch --set "
            "'sleep_config={}'"
        )
    try:
        document: dict[str, Any] = json.loads(answer)
        problem = "" if document["status"] == "ok" else str(document["message"])
    except (ValueError, LookupError, TypeError):
        problem = f"HTTP {code} of {control}: {answer.decode(errors='replace')[:300] or 'an empty body'}"
    if problem:
        raise UsageError(problem)
    return document
