"""One pass of ``trtx eval parity``: sends all prompts to one topology or server, and collects the evidence."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import httpx

from trtx.bench import Journal
from trtx.bench.journal import WorkerKilled
from trtx.engine import worker_facts
from trtx.evals.parity import ParityAnswer, Pass, Prompt, Server, ask_all, write_answers
from trtx.evals.parity.forms import RouteEvidence
from trtx.experiment.parity.evidence import evidence_of, evidence_of_attached, read_counts
from trtx.experiment.parity.kill import Kill, Killer
from trtx.experiment.parity.servers import ServerPresence, server_of
from trtx.experiment.parity.spec import ParitySpec
from trtx.launch import ServedTopology
from trtx.report.parity import KnownServer

_TIMEOUT_S = 5.0


@dataclass(frozen=True, slots=True)
class FinishedPass:
    """A finished pass, whose answers are on disk."""

    answers: tuple[ParityAnswer, ...]
    cancelled: int
    evidence: RouteEvidence


@dataclass(frozen=True, slots=True, kw_only=True)
class PassSettings:
    """Settings shared by all passes of a run."""

    spec: ParitySpec
    run_dir: Path
    prompts: tuple[Prompt, ...]
    on_progress: Callable[[str, int, int], None]  # label, ended, total
    on_kill: Callable[[str, str, int], None]  # label, worker, number of open streams

    def served(self, served: ServedTopology, route: str, label: str, check: Callable[[], None]) -> FinishedPass:
        """Runs a pass on a topology that trtx serves as ``route``. Raises the exceptions of ``check``."""
        plan = served.plan
        killer = self._killer(served, route) if route == "migrated" else None
        before = read_counts(plan)
        try:
            asked = self._ask(
                Server(plan.url, plan.model), label, check, (lambda now: None) if killer is None else killer.look
            )
        finally:
            if killer is not None:
                killer.let_go()
        answers = self._write(label, asked)
        evidence = evidence_of(
            route, plan, before, read_counts(plan), answers,
            kill=None if killer is None else killer.kill, has_fault=self.spec.fault is not None,
        )  # fmt: skip
        return FinishedPass(answers, asked.cancelled, evidence)

    def attached(self, known: KnownServer, label: str, check: Callable[[], None]) -> FinishedPass:
        """Runs a pass on an attached server. Raises NoVerdictError if the server is gone, and the exceptions of
        ``check``.
        """
        asked = self._ask(server_of(known), label, check, ServerPresence(known.deployment, check).look)
        answers = self._write(label, asked)
        return FinishedPass(answers, asked.cancelled, evidence_of_attached(answers))

    def _ask(self, server: Server, label: str, check: Callable[[], None], look: Callable[[Pass], None]) -> Pass:
        def watch(now: Pass) -> None:
            self.on_progress(label, now.ended, len(self.prompts))
            look(now)

        # An attached server may have cached KV from an earlier run or an aborted pass.
        salt = f"{label}-{secrets.token_hex(4)}"
        spec = self.spec
        return asyncio.run(
            ask_all(
                server, self.prompts, salt=salt, osl=spec.osl, concurrency=spec.concurrency, check=check, watch=watch
            )
        )

    def _write(self, label: str, asked: Pass) -> tuple[ParityAnswer, ...]:
        answers = tuple(asked.answers[index] for index in sorted(asked.answers))
        write_answers(self.run_dir, label, answers)
        return answers

    def _killer(self, served: ServedTopology, route: str) -> Killer:
        def pid_of(name: str) -> int | None:
            slot = next((one for one in served.slots if one.spec.name == name), None)
            return None if slot is None or slot.child is None else slot.child.pid

        def on_kill(kill: Kill) -> None:
            count = len(kill.open_streams)
            Journal(self.run_dir).note(WorkerKilled(topology=route, worker=kill.worker, open_requests=count))
            self.on_kill(route, kill.worker, count)

        wanted = max(1, min(self.spec.concurrency, self.spec.prompts) // (2 * max(1, served.plan.worker_count)))
        return Killer(_names(served.plan.url), pid_of, self.spec.osl, wanted, on_kill)


def _names(url: str) -> dict[int, str]:
    """Names of registered workers by Dynamo's ids; empty if the frontend doesn't report them."""
    try:
        answer = httpx.get(f"{url}{worker_facts.PATH}", timeout=_TIMEOUT_S, trust_env=False).raise_for_status()
    except httpx.HTTPError:
        return {}
    return {one.worker_id: one.facts.name for one in worker_facts.of_body(answer.content) or ()}
