"""``trtx eval parity``: the run itself. Routes one after the other, each sent the same prompts."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path

from trtx.bench import Journal
from trtx.bench.journal import ProcessRestart, RunEnded, RunFailed, TopologyReady, TopologyStopping, WorkerKilled
from trtx.bench.judgement import Judgement, Verdict, outcome
from trtx.errors import TrtxError, UsageError
from trtx.evals.parity import (
    PARITY,
    Answer,
    ComparedRoute,
    Parity,
    Pass,
    Prompt,
    ask_all,
    compare_route,
    judge_route,
    make_prompts,
    ordinary_ids,
    parity_directory,
    write_answers,
    write_prompts,
)
from trtx.evals.parity.forms import Evidence
from trtx.evals.parity.gate import judge_reference, tolerance_of
from trtx.experiment import directory, resumption
from trtx.experiment.environment import environment
from trtx.experiment.parity_evidence import Reading, busiest, evidence_of, read_counts
from trtx.experiment.parity_spec import AGAIN, REFERENCE, ParitySpec, Route, check_lengths, dtype_of
from trtx.experiment.provenance import provenance_with
from trtx.experiment.verdict import error_of
from trtx.launch import Event, Interruption, ServedTopology, catch_signals, prepare, serve
from trtx.report import REPORT_FILE
from trtx.report.forms import LOCK, PLAN, VERDICT, RunVerdict
from trtx.report.parity import render_parity
from trtx.topology import Plan


@dataclass(frozen=True, slots=True)
class ParityListener:
    """What a run tells while it goes on. Called from this thread, and ``on_event`` from the supervisor's too."""

    on_start: Callable[[Path], None] = lambda run_dir: None
    on_route: Callable[[str], None] = lambda route: None
    on_event: Callable[[str, Event], None] = lambda route, event: None
    on_progress: Callable[[str, int, int], None] = lambda label, ended, total: None
    on_kill: Callable[[str, str, int], None] = lambda route, name, open_requests: None


@dataclass(frozen=True, slots=True)
class FinishedParity:
    """``error`` is None, or says what was wrong and with which exit code to end."""

    run_dir: Path
    report: Path
    error: TrtxError | None


@dataclass(slots=True, eq=False)
class _Parity:
    """The run while it goes on."""

    spec: ParitySpec
    run_dir: Path
    listener: ParityListener
    plans: dict[str, Plan] = field(default_factory=dict)
    prompts: tuple[Prompt, ...] = ()
    interruption: Interruption = field(default_factory=Interruption)
    reference: tuple[Answer, ...] = ()
    again: ComparedRoute | None = None
    compared: list[ComparedRoute] = field(default_factory=list)

    @property
    def journal(self) -> Journal:
        return Journal(self.run_dir)


def check_parity(
    spec: ParitySpec, *, parent: Path, argv: Sequence[str], listener: ParityListener | None = None
) -> FinishedParity:
    """Serves every route in turn and sends it all prompts. Plans and prompts are made before the first is started. When
    it ends early, the error passes on after what was compared has been rendered."""
    started_at = datetime.now(UTC)
    run_dir = directory.create(parent, spec, started_at)
    state = _Parity(spec, run_dir, listener or ParityListener())
    try:
        with directory.told_if_unwritable(run_dir):
            _prepare(state)
            here = environment(argv, started_at)
            directory.write_lock(run_dir, spec, provenance_with(lambda target: {}, here, state.plans, None))
            write_prompts(run_dir, state.prompts)
            with directory.hold(run_dir) as check_directory, catch_signals(state.interruption):
                state.listener.on_start(run_dir)
                with _rendered_whatever_happens(state, check_directory):
                    for route in spec.routes:
                        state.listener.on_route(route)
                        _serve_and_ask(state, route, check_directory)
    except UsageError:
        _remove_if_nothing_served(run_dir)
        raise
    error = error_of(VERDICT.read(run_dir, RunVerdict))
    return FinishedParity(run_dir, run_dir / REPORT_FILE, error)


def _prepare(state: _Parity) -> None:
    spec = state.spec
    for topology in spec.topologies:
        route: Route = topology.label  # type: ignore[assignment]
        plan = prepare(topology.spec, run_dir=state.run_dir / route, fault=spec.fault)
        check_lengths(spec, plan)
        state.plans[route] = plan
    reference = state.plans[REFERENCE]
    if reference.engine in ("simulated", "paced"):
        raise UsageError(f"--engine {reference.engine} computes nothing whose answers could be compared; choose torch")
    state.prompts = make_prompts(ordinary_ids(reference.model_path), spec.shape)
    prints = {route: resumption.fingerprint(plan.model_path) for route, plan in state.plans.items()}
    plans = {route: plan.to_json() for route, plan in state.plans.items()}
    PLAN.write(state.run_dir, {"topologies": plans, "checkpoints": prints})


def _serve_and_ask(state: _Parity, route: Route, check_directory: Callable[[], None]) -> None:
    plan = state.plans[route]
    with serve(
        plan, on_event=lambda event: state.listener.on_event(route, event), interruption=state.interruption
    ) as served:
        loaded, warmed_up = round(served.load_seconds, 3), round(served.warm_up_seconds, 3)
        state.journal.note(TopologyReady(topology=route, load_seconds=loaded, warm_up_seconds=warmed_up))

        def check() -> None:
            served.check()
            check_directory()

        try:
            for label in (REFERENCE, AGAIN) if route == REFERENCE else (route,):
                _take_in(state, route, label, _ask(state, served, route, label, check))
        finally:
            restarts = tuple(ProcessRestart(name=one.name, at=one.at, exit=one.exit) for one in served.restarts)
            state.journal.note(TopologyStopping(topology=route, restarts=restarts))


@dataclass(frozen=True, slots=True)
class _Asked:
    """One pass, and what was counted around it."""

    answers: tuple[Answer, ...]
    cancelled: int
    evidence: Evidence


def _ask(state: _Parity, served: ServedTopology, route: Route, label: str, check: Callable[[], None]) -> _Asked:
    spec, plan = state.spec, served.plan
    total, killer = len(state.prompts), _Killer(state, served, route) if route == "migrated" else None

    def watch(now: Pass) -> None:
        state.listener.on_progress(label, now.ended, total)
        if killer is not None:
            killer.look(now)

    before: Reading = read_counts(plan)
    asked = ask_all(
        plan.url, plan.model, state.prompts,
        label=label, osl=spec.osl, concurrency=spec.concurrency, check=check, watch=watch,
    )  # fmt: skip
    answers = tuple(asked.answers[index] for index in sorted(asked.answers))
    write_answers(state.run_dir, label, answers)
    killed = None if killer is None else killer.killed
    evidence = evidence_of(route, plan, before, read_counts(plan), answers, killed)
    return _Asked(answers, asked.cancelled, evidence)


@dataclass(slots=True, eq=False)
class _Killer:
    """Ends one worker by ``kill -9`` once most clients are in the middle of a stream."""

    state: _Parity
    served: ServedTopology
    route: Route
    killed: str | None = None

    def look(self, now: Pass) -> None:
        spec = self.state.spec
        in_the_middle = sum(spec.osl // 4 <= len(tokens) < 3 * spec.osl // 4 for tokens in now.under_way.values())
        if self.killed is not None or in_the_middle < max(1, min(spec.concurrency, spec.prompts) // 2):
            return
        found = busiest(self.served.plan)
        slot = next((one for one in self.served.slots if found is not None and one.spec.name == found[0]), None)
        if found is None or slot is None or slot.child is None:
            return
        with contextlib.suppress(ProcessLookupError):
            os.kill(slot.child.pid, signal.SIGKILL)
        self.killed = found[0]
        self.state.journal.note(WorkerKilled(topology=self.route, worker=found[0], open_requests=found[1]))
        self.state.listener.on_kill(self.route, *found)


def _take_in(state: _Parity, route: Route, label: str, asked: _Asked) -> None:
    """Compares one pass, and writes what is compared so far."""
    if label == REFERENCE:
        state.reference = asked.answers
        return
    found = compare_route(
        REFERENCE if label == AGAIN else route, state.reference, asked.answers,
        cancelled=asked.cancelled, evidence=asked.evidence,
    )  # fmt: skip
    if label == AGAIN:
        first = tuple(f"request {one.index}: {one.failure}" for one in state.reference if one.failure is not None)
        state.again = replace(found, failures=first + found.failures, sent=len(state.reference) + found.sent)
    else:
        state.compared.append(found)
    PARITY.write(parity_directory(state.run_dir), _document(state))


def _document(state: _Parity) -> Parity:
    again = state.again
    tolerance = (
        None
        if again is None or not again.compared.requests
        else tolerance_of(again.compared, dtype_of(state.plans[REFERENCE]))
    )
    return Parity(tolerance, again, tuple(state.compared))


def _judge(state: _Parity) -> None:
    """Of every route that was to be compared. Writes ``verdict.json``."""
    document = _document(state)
    judgements: list[Judgement] = []
    if document.reference is not None:
        judgements += judge_reference(document.reference, document.tolerance)
    for route in state.spec.routes:
        found = next((one for one in document.routes if one.route == route), None)
        if found is not None:
            judgements += judge_route(found, document.tolerance)
    error = outcome(judgements)
    worst = next((verdict for verdict in Verdict if any(one.verdict is verdict for one in judgements)), None)
    VERDICT.write(
        state.run_dir,
        RunVerdict(
            verdict=worst or Verdict.NO_VERDICT,
            exit_code=0 if error is None else error.exit_code,
            sentence=None if error is None else str(error),
            baseline=None,
            judgements=tuple(judgements),
        ),
    )


@contextmanager
def _rendered_whatever_happens(state: _Parity, check_directory: Callable[[], None]) -> Iterator[None]:
    try:
        yield
    except BaseException as error:
        with suppress(OSError, UsageError):  # what failed first is what is told
            check_directory()  # nothing is left to render
            state.journal.note(RunFailed(error=str(error) or type(error).__name__))
            render_parity(state.run_dir)
        raise
    _judge(state)
    state.journal.note(RunEnded())
    render_parity(state.run_dir)


def _remove_if_nothing_served(run_dir: Path) -> None:
    """Bad input leaves no run directory: nothing was started that is worth keeping."""
    if (run_dir / "journal.jsonl").exists() or not run_dir.is_dir():
        return
    for document in (PLAN, LOCK):
        (run_dir / document.file).unlink(missing_ok=True)
    if not any(run_dir.iterdir()):
        run_dir.rmdir()
