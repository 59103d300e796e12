"""The run of ``trtx eval parity``: sends the same prompts to one route or server after the other."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

from trtx.bench import Target
from trtx.bench.judge.judgement import CheckResult
from trtx.bench.named_models import other_models
from trtx.engine import MODEL_ENGINES
from trtx.errors import UsageError
from trtx.evals.parity import (
    PARITY,
    ComparedRoute,
    Parity,
    ParityAnswer,
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
from trtx.evals.parity.forms import RouteEvidence
from trtx.evals.parity.gate import judge_fault, judge_reference, no_tolerance, tolerance_of
from trtx.experiment.bench.verdict import run_verdict
from trtx.experiment.left_out import tell_left_out
from trtx.experiment.lifecycle import FinishedRun, OpenRun, new_run, resumed_run
from trtx.experiment.listener import RunListener
from trtx.experiment.parity.passes import FinishedPass, PassSettings
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
    SPECULATING,
    URL,
    ParitySpec,
    check_fault,
    check_lengths,
    check_speculation,
    dtype_of,
    planted_fault,
    read_parity_spec,
    widest_dtype,
)
from trtx.experiment.provenance import provenance_with
from trtx.experiment.targets import attached_target
from trtx.report.parity import KnownServer, render_parity
from trtx.runs.forms import VERDICT, Deployment
from trtx.topology import Plan


@dataclass(slots=True, eq=False)
class _Parity:
    """State of a run in progress."""

    run: OpenRun[ParitySpec]
    deployments: dict[str, Deployment] = field(default_factory=dict)  # by label, of attached servers
    servers: dict[str, KnownServer] = field(default_factory=dict)  # by label: attached servers with their capabilities
    prompts: tuple[Prompt, ...] = ()
    target: Target | None = None  # the compared server, if no topology is served
    passes: dict[str, FinishedPass] = field(default_factory=dict)  # finished passes

    @property
    def missing(self) -> tuple[str, ...]:
        return tuple(one for one in self.run.spec.passes if one not in self.passes)


def check_parity(
    spec: ParitySpec, *, parent: Path, argv: Sequence[str], listener: RunListener | None = None
) -> FinishedRun:
    """Sends all prompts to every route in turn, or to the servers of ``spec``.

    Plans, servers and prompts are checked before the first start. If the run ends early, the error is re-raised after
    the comparisons so far have been rendered.
    """
    deployments = ask_deployments(spec)
    with new_run(spec, parent, argv, listener, deployments.get(URL)) as run:
        state = _Parity(run, deployments)
        _prepare(state)
        state.servers = probe(deployments, ordinary_ids(_vocabulary(state)))
        run.write_plans()
        _write_prepared(state)
        with run.held(provenance_with(run.environment, run.plans, state.target)):
            return _go_on(state)


def resume_parity(run_dir: Path, *, argv: Sequence[str], listener: RunListener | None = None) -> FinishedRun:
    """Continues a run that ended early: repeats unfinished passes, then compares, judges and renders everything.

    Raises UsageError, leaving the run unchanged, as :func:`resumed_run`, and if model, configs, servers or prompts
    differ from the recorded ones.
    """
    with resumed_run(run_dir, read_parity_spec, argv, listener) as (run, _):
        spec, run_dir = run.spec, run.run_dir
        if (fault := planted_fault()) != spec.fault:
            raise UsageError(
                f"{run_dir} can't be resumed: TRTX_FAULT was {spec.fault or 'not set'} and is {fault or 'not set'}; "
                "set it as it was"
            )
        state = _Parity(run)
        state.passes = _kept(state)
        state.servers = read_servers(run_dir)
        unknown = set(spec.attached) - set(state.servers)
        if unknown or any(spec.passes[one] in spec.attached for one in state.missing):
            state.deployments = ask_deployments(spec)
            check_same(run_dir, state.deployments)
        else:
            state.deployments = {label: known.deployment for label, known in state.servers.items()}
        _prepare(state)
        if read_prompts(run_dir) not in (None, state.prompts):
            raise UsageError(f"{run_dir} can't be resumed: its prompts.jsonl has changed; start a new run")
        if unknown:
            state.servers = probe(state.deployments, ordinary_ids(_vocabulary(state)))
        run.go_on(kept=tuple(state.passes), missing=state.missing)
        _write_prepared(state)
        return _go_on(state)


def _kept(state: _Parity) -> dict[str, FinishedPass]:
    """Finished passes of an earlier attempt, whose answers and counts were written."""
    run_dir, spec = state.run.run_dir, state.run.spec
    counted, found = _counted(run_dir, spec), {}
    for label in spec.passes:
        if label in counted and has_answers(run_dir, label):
            answers = read_answers(run_dir, label)
            if len(answers) != spec.prompts or len({one.index for one in answers}) != len(answers):
                raise UsageError(
                    f"{parity_directory(run_dir) / label} has {len(answers)} answers; expected one for each of the "
                    f"{spec.prompts} requests; restore the file from a copy, or start a new run"
                )
            found[label] = FinishedPass(answers, *counted[label])
    return found


def _counted(run_dir: Path, spec: ParitySpec) -> dict[str, tuple[int, RouteEvidence]]:
    """By pass: number of disconnected clients, and the evidence. For the reference's first pass, only answers are
    recorded.
    """
    reference = spec.labels[0]
    found = {reference: (0, RouteEvidence((), None))}
    if (document := read_parity(run_dir)) is not None:
        found |= {one.route: (one.cancelled, one.evidence) for one in document.routes}
        if (again := document.reference) is not None:
            found[f"{reference}{AGAIN}"] = again.cancelled, again.evidence
    return found


def _prepare(state: _Parity) -> None:
    """Plans the topologies and creates the prompts."""
    run, spec = state.run, state.run.spec
    run.fault = spec.fault
    run.plan(check=partial(_check, spec))
    if SPECULATING in run.plans:
        check_speculation(run.plans[SPECULATING])
    tell_left_out(run.plans, run.listener.on_note)
    check_lengths_of(spec, state.deployments)
    if not run.plans:
        assert spec.attach is not None
        state.target = attached_target(spec.attach, state.deployments[URL])
    state.prompts = make_prompts(ordinary_ids(_vocabulary(state)), spec.shape)


def _check(spec: ParitySpec, plan: Plan) -> None:
    if plan.engine not in MODEL_ENGINES:
        raise UsageError(f"--engine {plan.engine} computes no real answers, so there is nothing to compare; use torch")
    check_lengths(spec, plan)
    if spec.fault is not None:
        check_fault(spec.fault, plan)


def _vocabulary(state: _Parity) -> Path:
    """Directory with the tokenizer from whose vocabulary prompts are drawn."""
    if state.target is not None:
        return state.target.tokenizer_path
    return next(iter(state.run.plans.values())).model_path


def _write_prepared(state: _Parity) -> None:
    write_prompts(state.run.run_dir, state.prompts)
    if state.servers:
        write_servers(state.run.run_dir, state.servers)


def _go_on(state: _Parity) -> FinishedRun:
    """Serves each topology that has missing passes, runs them, and judges and renders the run."""
    run = state.run
    with run.measuring(partial(_judge, state), render_parity):
        for label in run.spec.labels:
            missing = [one for one in state.missing if run.spec.passes[one] == label]
            if missing:
                run.listener.on_topology(label, is_served=label in run.plans)
                _make(state, label, missing)
    return run.finished()


def _make(state: _Parity, label: str, passes: Sequence[str]) -> None:
    """Runs the passes of one route or server."""
    run = state.run
    asking = PassSettings(
        spec=run.spec, run_dir=run.run_dir, prompts=state.prompts,
        on_progress=run.listener.on_asked, on_kill=run.listener.on_kill,
    )  # fmt: skip
    if label not in run.plans:
        for one in passes:
            _take_in(state, one, asking.attached(state.servers[label], one, run.check))
        return
    with run.serve(label) as served:
        for one in passes:
            _take_in(state, one, asking.served(served, label, one, run.checking(served.check)))


def _take_in(state: _Parity, label: str, asked: FinishedPass) -> None:
    """Adds a finished pass and writes the comparison so far."""
    state.passes[label] = asked
    PARITY.write(parity_directory(state.run.run_dir), _document(state))


def _document(state: _Parity) -> Parity:
    reference, *others = state.run.spec.labels
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
    allowed = no_tolerance if state.run.spec.promises_bits else tolerance_of
    tolerance = allowed(again.compared, _dtype(state)) if again is not None and is_known else None
    return Parity(tolerance, again, compared)


def _compared(state: _Parity, label: str, reference: tuple[ParityAnswer, ...], asked: FinishedPass) -> ComparedRoute:
    return compare_route(
        label, reference, asked.answers,
        model=_model(state, label), cancelled=asked.cancelled, evidence=asked.evidence,
    )  # fmt: skip


def _model(state: _Parity, label: str) -> str:
    """The model name in requests to a route or server."""
    return state.run.plans[label].model if label in state.run.plans else state.servers[label].deployment.model


def _dtype(state: _Parity) -> str | None:
    """The compute dtype of the side with the lower precision; None if one is unknown."""
    reference = state.run.plans.get(state.run.spec.labels[0])
    if state.run.spec.attach is None:
        return None if reference is None else dtype_of(reference)
    return widest_dtype(state.run.spec.dtype, *([] if reference is None else [dtype_of(reference)]))


def _judge(state: _Parity) -> None:
    """Judges everything that should have been compared, and writes ``verdict.json``."""
    document = _document(state)
    judgements: list[CheckResult] = []
    if document.reference is not None:
        judgements += judge_reference(document.reference, document.tolerance)
    for route in document.routes:
        judgements += judge_route(route, document.tolerance)
    if state.run.spec.fault is not None:
        disagg = next((one for one in document.routes if one.route == "disagg"), None)
        judgements.append(judge_fault(state.run.spec.fault, disagg))
    VERDICT.write(state.run.run_dir, run_verdict((), judgements, None))
