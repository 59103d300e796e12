"""The run of ``trtx eval parity``: sends the same prompts to one route or server after the other."""

from __future__ import annotations

import shlex
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path

from trtx.bench import Journal, Target
from trtx.bench.intact import run_ended, run_failed
from trtx.bench.journal import RunResumed
from trtx.bench.judge.judgement import Judgement, Verdict, outcome
from trtx.bench.named_models import other_models
from trtx.errors import TrtxError, UsageError
from trtx.evals.parity import (
    PARITY,
    Answer,
    ComparedRoute,
    Parity,
    Prompt,
    compare_route,
    has_answers,
    judge_route,
    make_prompts,
    ordinary_ids,
    parity_directory,
    read_answers,
    read_parity,
    read_prompts,
    write_prompts,
)
from trtx.evals.parity.forms import Evidence
from trtx.evals.parity.gate import judge_fault, judge_reference, no_tolerance, tolerance_of
from trtx.experiment import directory
from trtx.experiment.bench import resumption
from trtx.experiment.bench.verdict import error_of
from trtx.experiment.environment import environment
from trtx.experiment.left_out import tell_left_out
from trtx.experiment.parity.passes import Asked, Asking
from trtx.experiment.parity.servers import (
    ask_deployments,
    check_lengths_of,
    check_same,
    probe,
    read_servers,
    write_servers,
)
from trtx.experiment.parity.spec import (
    AGAIN,
    URL,
    ParitySpec,
    check_fault,
    check_lengths,
    dtype_of,
    planted_fault,
    read_parity_spec,
    widest_dtype,
)
from trtx.experiment.provenance import provenance_with
from trtx.experiment.serving import serve_noted
from trtx.experiment.targets import attached_target
from trtx.launch import Event, Interruption, catch_signals, prepare
from trtx.report import REPORT_FILE
from trtx.report.parity import KnownServer, render_parity
from trtx.runs.forms import LOCK, PLAN, VERDICT, AskedOf, Deployment, RunVerdict
from trtx.topology import Plan

_NO_ANSWERS = ("simulated", "paced")


@dataclass(frozen=True, slots=True)
class ParityListener:
    """Callbacks of a run. They are called from the run's thread; ``on_event`` also from the supervisor's."""

    on_start: Callable[[Path], None] = lambda run_dir: None
    on_route: Callable[[str, bool], None] = lambda route, is_served: None
    on_event: Callable[[str, Event], None] = lambda route, event: None
    on_progress: Callable[[str, int, int], None] = lambda label, ended, total: None
    on_kill: Callable[[str, str, int], None] = lambda route, name, open_streams: None
    on_told: Callable[[str], None] = lambda line: None  # a sentence about the request, before anything starts


@dataclass(frozen=True, slots=True)
class FinishedParity:
    """A finished run. ``error`` is None, or gives the reason and the exit code."""

    run_dir: Path
    report: Path
    error: TrtxError | None


@dataclass(slots=True, eq=False)
class _Parity:
    """State of a run in progress."""

    spec: ParitySpec
    run_dir: Path
    listener: ParityListener
    deployments: dict[str, Deployment] = field(default_factory=dict)  # by label, of attached servers
    servers: dict[str, KnownServer] = field(default_factory=dict)  # by label: attached servers with their capabilities
    plans: dict[str, Plan] = field(default_factory=dict)  # by label, of topologies that trtx serves
    prompts: tuple[Prompt, ...] = ()
    target: Target | None = None  # the compared server, if no topology is served
    interruption: Interruption = field(default_factory=Interruption)
    check_directory: Callable[[], None] = lambda: None  # raises UsageError once the directory has been removed
    passes: dict[str, Asked] = field(default_factory=dict)  # finished passes

    @property
    def journal(self) -> Journal:
        return Journal(self.run_dir)

    @property
    def missing(self) -> tuple[str, ...]:
        return tuple(one for one in self.spec.passes if one not in self.passes)

    def check(self) -> None:
        self.interruption.check()
        self.check_directory()


def check_parity(
    spec: ParitySpec, *, parent: Path, argv: Sequence[str], listener: ParityListener | None = None
) -> FinishedParity:
    """Sends all prompts to every route in turn, or to the servers of ``spec``.

    Plans, servers and prompts are checked before the first start. If the run ends early, the error is re-raised after
    the comparisons so far have been rendered.
    """
    started_at = datetime.now(UTC)
    deployments = ask_deployments(spec)
    run_dir = directory.create(parent, spec, started_at)
    state = _Parity(spec, run_dir, listener or ParityListener(), deployments)
    here = environment(argv, started_at, deployments.get(URL))
    try:
        with directory.told_if_unwritable(run_dir):
            _prepare(state)
            state.servers = probe(deployments, ordinary_ids(_vocabulary(state)))
            _write_prepared(state)
            directory.write_lock(run_dir, spec, provenance_with(_no_calls, here, state.plans, state.target))
            with directory.hold(run_dir) as state.check_directory, catch_signals(state.interruption):
                return _go_on(state)
    except (UsageError, KeyboardInterrupt):
        _remove_if_nothing_served(run_dir)
        raise


@directory.goes_on
def resume_parity(run_dir: Path, *, argv: Sequence[str], listener: ParityListener | None = None) -> FinishedParity:
    """Continues a run that ended early: repeats unfinished passes, then compares, judges and renders everything.

    Raises UsageError, leaving the run unchanged, if another trtx uses the directory, or if machine, versions, model,
    configs, servers or prompts differ from the recorded ones.
    """
    spec = read_parity_spec(run_dir)
    with directory.told_if_unwritable(run_dir), directory.hold(run_dir) as check_directory:
        recorded = _read_recorded(run_dir, spec)
        resumption.check_conditions(recorded, environment(argv, datetime.now(UTC)))
        if (fault := planted_fault()) != spec.fault:
            raise UsageError(
                f"{run_dir} can't be resumed: TRTX_FAULT was {spec.fault or 'not set'} and is {fault or 'not set'}; "
                "set it as it was"
            )
        resumption.wait_for_the_end(recorded)
        state = _Parity(spec, run_dir, listener or ParityListener(), check_directory=check_directory)
        state.passes = _kept(state)
        state.servers = read_servers(run_dir)
        unknown = set(spec.attached) - set(state.servers)
        if unknown or any(spec.passes[one] in spec.attached for one in state.missing):
            state.deployments = ask_deployments(spec)
            check_same(run_dir, state.deployments)
        else:
            state.deployments = {label: known.deployment for label, known in state.servers.items()}
        _prepare(state, anew=True)
        for label, plan in state.plans.items():
            resumption.check_plan(recorded, label, plan)
        if read_prompts(run_dir) not in (None, state.prompts):
            raise UsageError(f"{run_dir} can't be resumed: its prompts.jsonl has others than it asked; start a new run")
        if unknown:
            state.servers = probe(state.deployments, ordinary_ids(_vocabulary(state)))
        state.journal.mend()
        _write_prepared(state)
        state.journal.note(RunResumed(command=shlex.join(argv), kept=tuple(state.passes), missing=state.missing))
        (run_dir / VERDICT.file).unlink(missing_ok=True)
        with catch_signals(state.interruption):
            return _go_on(state)


def _read_recorded(run_dir: Path, spec: ParitySpec) -> resumption.Recorded[ParitySpec]:
    here = LOCK.read(run_dir, AskedOf).provenance.environment
    planned = PLAN.read(run_dir, resumption.PlanDocument) if spec.topologies else resumption.PlanDocument({}, {})
    return resumption.Recorded(run_dir, spec, planned.topologies, planned.checkpoints, here, None)


def _kept(state: _Parity) -> dict[str, Asked]:
    """Finished passes of an earlier attempt, whose answers and counts were written."""
    counted, found = _counted(state.run_dir, state.spec), {}
    for label in state.spec.passes:
        if label in counted and has_answers(state.run_dir, label):
            answers = read_answers(state.run_dir, label)
            if len(answers) != state.spec.prompts or len({one.index for one in answers}) != len(answers):
                raise UsageError(
                    f"{parity_directory(state.run_dir) / label} has {len(answers)} answers; expected one to each of "
                    f"{state.spec.prompts} requests; put the file back from a copy, or start a new run"
                )
            found[label] = Asked(answers, *counted[label])
    return found


def _counted(run_dir: Path, spec: ParitySpec) -> dict[str, tuple[int, Evidence]]:
    """By pass: number of disconnected clients, and the evidence. For the reference's first pass, only answers are
    recorded.
    """
    reference = spec.labels[0]
    found = {reference: (0, Evidence((), None))}
    if (document := read_parity(run_dir)) is not None:
        found |= {one.route: (one.cancelled, one.evidence) for one in document.routes}
        if (again := document.reference) is not None:
            found[f"{reference}{AGAIN}"] = again.cancelled, again.evidence
    return found


def _no_calls(target: Target) -> dict[str, str]:
    return {}


def _prepare(state: _Parity, *, anew: bool = False) -> None:
    """Plans the topologies and creates the prompts. ``anew``: in new directories next to those of an earlier
    attempt.
    """
    spec = state.spec
    for topology in spec.topologies:
        home = state.run_dir / topology.label
        if anew and home.exists():
            home = home / f"start-{len(list(home.glob('start-*'))) + 2:02d}"
        plan = prepare(topology.spec, run_dir=home, fault=spec.fault)
        if plan.engine in _NO_ANSWERS:
            raise UsageError(f"--engine {plan.engine} computes nothing whose answers could be compared; choose torch")
        check_lengths(spec, plan)
        if spec.fault is not None:
            check_fault(spec.fault, plan)
        state.plans[topology.label] = plan
    tell_left_out(state.plans, state.listener.on_told)
    check_lengths_of(spec, state.deployments)
    if not state.plans:
        assert spec.attach is not None
        state.target = attached_target(spec.attach, state.deployments[URL])
    state.prompts = make_prompts(ordinary_ids(_vocabulary(state)), spec.shape)


def _vocabulary(state: _Parity) -> Path:
    """Directory with the tokenizer from whose vocabulary prompts are drawn."""
    if state.target is not None:
        return state.target.tokenizer_path
    return next(iter(state.plans.values())).model_path


def _write_prepared(state: _Parity) -> None:
    if state.plans:
        prints = {label: resumption.fingerprint(plan.model_path) for label, plan in state.plans.items()}
        plans = {label: plan.to_json() for label, plan in state.plans.items()}
        PLAN.write(state.run_dir, {"topologies": plans, "checkpoints": prints})
    write_prompts(state.run_dir, state.prompts)
    if state.servers:
        write_servers(state.run_dir, state.servers)


def _go_on(state: _Parity) -> FinishedParity:
    """Runs every missing pass."""
    state.listener.on_start(state.run_dir)
    with _rendered_whatever_happens(state):
        for label in state.spec.labels:
            missing = [one for one in state.missing if state.spec.passes[one] == label]
            if missing:
                state.listener.on_route(label, label in state.plans)
                _make(state, label, missing)
    error = error_of(VERDICT.read(state.run_dir, RunVerdict))
    return FinishedParity(state.run_dir, state.run_dir / REPORT_FILE, error)


def _make(state: _Parity, label: str, passes: Sequence[str]) -> None:
    """Runs the passes of one route or server."""
    listener = state.listener
    asking = Asking(
        spec=state.spec, run_dir=state.run_dir, prompts=state.prompts,
        on_progress=listener.on_progress, on_kill=listener.on_kill,
    )  # fmt: skip
    if label not in state.plans:
        for one in passes:
            _take_in(state, one, asking.attached(state.servers[label], one, state.check))
        return
    with serve_noted(label, state.plans[label], state.journal, listener.on_event, state.interruption) as served:

        def check() -> None:
            served.check()
            state.check_directory()

        for one in passes:
            _take_in(state, one, asking.served(served, label, one, check))


def _take_in(state: _Parity, label: str, asked: Asked) -> None:
    """Adds a finished pass and writes the comparison so far."""
    state.passes[label] = asked
    PARITY.write(parity_directory(state.run_dir), _document(state))


def _document(state: _Parity) -> Parity:
    reference, *others = state.spec.labels
    first, second = state.passes.get(reference), state.passes.get(f"{reference}{AGAIN}")
    if first is None:
        return Parity(None, None, ())
    again = None
    if second is not None:
        again = _compared(state, reference, first.answers, second)
        failed = tuple(f"request {one.index}: {one.failure}" for one in first.answers if one.failure is not None)
        both = (one.models for one in (*first.answers, *second.answers))
        again = replace(
            again,
            failures=failed + again.failures,
            sent=len(first.answers) + again.sent,
            others=other_models(_model(state, reference), both),
        )
    made = [label for label in others if label in state.passes]
    compared = tuple(_compared(state, label, first.answers, state.passes[label]) for label in made)
    is_known = again is not None and again.compared.requests > 0
    allowed = no_tolerance if state.spec.promises_bits else tolerance_of
    tolerance = allowed(again.compared, _dtype(state)) if again is not None and is_known else None
    return Parity(tolerance, again, compared)


def _compared(state: _Parity, label: str, reference: tuple[Answer, ...], asked: Asked) -> ComparedRoute:
    return compare_route(
        label, reference, asked.answers,
        model=_model(state, label), cancelled=asked.cancelled, evidence=asked.evidence,
    )  # fmt: skip


def _model(state: _Parity, label: str) -> str:
    """The model name in requests to a route or server."""
    return state.plans[label].model if label in state.plans else state.servers[label].deployment.model


def _dtype(state: _Parity) -> str | None:
    """The compute dtype of the side with the lower precision; None if one is unknown."""
    reference = state.plans.get(state.spec.labels[0])
    if state.spec.attach is None:
        return None if reference is None else dtype_of(reference)
    return widest_dtype(state.spec.dtype, *([] if reference is None else [dtype_of(reference)]))


def _judge(state: _Parity) -> None:
    """Judges everything that should have been compared, and writes ``verdict.json``."""
    document = _document(state)
    judgements: list[Judgement] = []
    if document.reference is not None:
        judgements += judge_reference(document.reference, document.tolerance)
    for route in document.routes:
        judgements += judge_route(route, document.tolerance)
    if state.spec.fault is not None:
        disagg = next((one for one in document.routes if one.route == "disagg"), None)
        judgements.append(judge_fault(state.spec.fault, disagg))
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
def _rendered_whatever_happens(state: _Parity) -> Iterator[None]:
    try:
        yield
    except BaseException as error:
        with suppress(OSError, UsageError):  # the first failure is the one to report
            state.check_directory()  # if the directory is gone, there is nothing to render
            state.journal.note(run_failed(state.run_dir, error))
            render_parity(state.run_dir)
        raise
    _judge(state)
    state.journal.note(run_ended(state.run_dir))
    render_parity(state.run_dir)


def _remove_if_nothing_served(run_dir: Path) -> None:
    """Removes a run directory without results, so that invalid input leaves none behind."""
    if (run_dir / "journal.jsonl").exists() or not run_dir.is_dir():
        return
    for document in (PLAN, LOCK):
        (run_dir / document.file).unlink(missing_ok=True)
    shutil.rmtree(parity_directory(run_dir), ignore_errors=True)
    if not any(run_dir.iterdir()):
        run_dir.rmdir()
