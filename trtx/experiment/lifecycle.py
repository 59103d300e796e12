"""The life of a run: a directory, the plans, the measurement, and a report however it ends.

The runs of ``trtx bench``, ``eval``, ``eval fidelity`` and ``eval parity`` differ in what they measure and share this
frame::

    with new_run(spec, parent, argv, listener) as run:  # or resumed_run(); a new directory without results is removed
        run.plan()
        run.write_plans()
        with run.held(provenance), run.measuring(judge, render):  # writes the manifest; renders in any event
            for label in spec.labels:
                with run.serve(label) as served:  # or run.reach(), which also takes an attached server
                    ...
        return run.finished()
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Generic

from trtx.bench import Journal
from trtx.bench.intact import refuse_changed_documents, run_ended, run_failed
from trtx.bench.journal import ProcessRestart, RunResumed, TopologyReady, TopologyStopping
from trtx.errors import TrtxError, UsageError
from trtx.evals import Endpoint
from trtx.experiment import directory
from trtx.experiment.bench import resumption
from trtx.experiment.bench.axes import NamedTopology
from trtx.experiment.bench.resumption import Recorded, Spec
from trtx.experiment.bench.spec import ATTACHED, Attach
from trtx.experiment.bench.verdict import error_of
from trtx.experiment.deployment import api_key, ask_deployment
from trtx.experiment.environment import environment
from trtx.experiment.listener import RunListener
from trtx.experiment.scoring import endpoint_of
from trtx.launch import Interruption, ServedTopology, catch_signals, prepare, serve
from trtx.report import REPORT_FILE
from trtx.runs.forms import COMPARISON, PLAN, VERDICT, Deployment, Environment, Provenance, RunVerdict
from trtx.topology import Plan

_ANSWERS = ("eval/", "fidelity/")  # samples and passes that a resumed run keeps


@dataclass(frozen=True, slots=True)
class FinishedRun:
    """A finished run. ``error`` is None, or gives the reason and the exit code."""

    run_dir: Path
    report: Path
    error: TrtxError | None
    baseline: Path | None = None  # the baseline saved from it
    unsaved: UsageError | None = None  # why a requested baseline was not saved; the run's own error takes precedence


@dataclass(slots=True, eq=False, kw_only=True)
class OpenRun(Generic[Spec]):
    """A run in progress."""

    spec: Spec
    run_dir: Path
    listener: RunListener
    environment: Environment
    deployment: Deployment | None = None  # of an attached run; a resumed one has it only if something is missing
    recorded: Recorded[Spec] | None = None  # the earlier attempt of a resumed run
    fault: str | None = None  # TRTX_FAULT, for the served topologies
    plans: dict[str, Plan] = field(default_factory=dict)  # by topology
    interruption: Interruption = field(default_factory=Interruption)
    check_directory: Callable[[], None] = lambda: None  # raises UsageError once the directory has been removed
    is_announced: bool = False  # whether the user knows the directory

    @property
    def journal(self) -> Journal:
        return Journal(self.run_dir)

    def check(self) -> None:
        """Raises if the run has been interrupted or its directory is gone."""
        self.interruption.check()
        self.check_directory()

    def checking(self, still_serving: Callable[[], None]) -> Callable[[], None]:
        """Combines the check of a served topology, which includes interruptions, with that of the directory."""

        def check() -> None:
            still_serving()
            self.check_directory()

        return check

    def find_deployment(self, attach: Attach) -> Deployment:
        """Asks the deployment of a resumed run again. Raises UsageError if it has changed."""
        self.deployment = ask_deployment(attach)
        if self.recorded is not None:
            resumption.check_deployment(self.recorded, self.deployment)
        return self.deployment

    def plan(self, labels: Collection[str] | None = None, check: Callable[[Plan], None] = lambda plan: None) -> None:
        """Plans the topologies, all or those in ``labels``. Raises UsageError if one has changed, and as ``check``."""
        for topology in self.spec.topologies:
            if labels is None or topology.label in labels:
                self.plans[topology.label] = self._planned(topology)
                check(self.plans[topology.label])
        if self.recorded is not None:
            for label, plan in self.plans.items():
                resumption.check_plan(self.recorded, label, plan)

    def write_plans(self) -> None:
        """Writes ``plan.json``: the plans of this attempt, and those of an earlier one that it doesn't replace."""
        plans, prints = ({}, {}) if self.recorded is None else (self.recorded.plans, self.recorded.checkpoints)
        plans = {**plans, **self.plans}
        prints = prints | {label: resumption.fingerprint(plan.model_path) for label, plan in self.plans.items()}
        if plans:
            topologies = {label: plan.to_json() for label, plan in plans.items()}
            PLAN.write(self.run_dir, {"topologies": topologies, "checkpoints": prints})

    @contextmanager
    def held(self, provenance: Provenance) -> Iterator[None]:
        """Writes the manifest, and holds the directory until the end of the block.

        The manifest is written last: a directory that has one can be resumed, so everything else must exist.
        """
        directory.write_lock(self.run_dir, self.spec, provenance)
        with directory.hold(self.run_dir) as self.check_directory:
            yield

    def go_on(self, *, kept: Sequence[str], missing: Sequence[str], changed: Sequence[str] = ()) -> None:
        """Turns the directory of the earlier attempt into that of this one: plans, journal, no verdict."""
        self.journal.mend()
        self.write_plans()
        command = self.environment.command
        self.journal.note(RunResumed(command=command, kept=tuple(kept), missing=tuple(missing), changed=tuple(changed)))
        forget_verdict(self.run_dir)

    def announce(self) -> None:
        """Tells the user the directory, which is kept from now on, unless the input turns out to be invalid."""
        if not self.is_announced:
            self.is_announced = True
            self.listener.on_start(self.run_dir)

    @contextmanager
    def measuring(
        self, judge: Callable[[], object], render: Callable[[Path], object], give_up: Callable[[], None] = lambda: None
    ) -> Iterator[None]:
        """Measures in the block, with signals directed to ``interruption``.

        However the block ends, its results are rendered. They are judged only if no exception was raised, else
        ``give_up`` is called.
        """
        self.announce()
        with catch_signals(self.interruption):
            try:
                yield
            except BaseException as error:
                with suppress(OSError, UsageError):  # the first failure is the one to report
                    self.check_directory()  # if the directory is gone, there is nothing to render
                    with suppress(OSError, UsageError):
                        give_up()
                    self.journal.note(run_failed(self.run_dir, error))
                    render(self.run_dir)
                raise
            judge()
            self.journal.note(run_ended(self.run_dir))
            render(self.run_dir)

    @contextmanager
    def serve(self, label: str) -> Iterator[ServedTopology]:
        """Serves a topology until the end of the block. The journal gets the restarts even after an exception."""
        on_event = partial(self.listener.on_event, label)
        with serve(self._unused_plan(label), on_event=on_event, interruption=self.interruption) as served:
            loaded, warmed_up = round(served.load_seconds, 3), round(served.warm_up_seconds, 3)
            self.journal.note(TopologyReady(topology=label, load_seconds=loaded, warm_up_seconds=warmed_up))
            try:
                yield served
            finally:
                restarts = tuple(ProcessRestart(name=one.name, at=one.at, exit=one.exit) for one in served.restarts)
                self.journal.note(TopologyStopping(topology=label, restarts=restarts))

    @contextmanager
    def reach(self, label: str, home: Path) -> Iterator[tuple[Endpoint, Callable[[], None]]]:
        """Serves a topology until the end of the block, or uses the attached deployment.

        Yields the endpoint, and a function to call while waiting, which raises if the run can't continue. ``home``: the
        directory for the endpoint's answers.
        """
        self.listener.on_topology(label, is_served=label != ATTACHED)
        if label == ATTACHED:
            assert self.deployment is not None
            one = self.deployment
            yield endpoint_of(label, one.url, one.model, home, api_key(one)), self.check
            return
        with self.serve(label) as served:
            plan = served.plan
            endpoint = endpoint_of(label, plan.url, plan.model, home, certificate=plan.certificate)
            yield endpoint, self.checking(served.check)

    def finished(self) -> FinishedRun:
        """The run with its verdict."""
        error = error_of(VERDICT.read(self.run_dir, RunVerdict))
        return FinishedRun(self.run_dir, self.run_dir / REPORT_FILE, error)

    def _unused_plan(self, label: str) -> Plan:
        """The plan for a start. Each start has its own plan, because ports and output files belong to one start."""
        plan = self.plans[label]
        if not plan.run_dir.exists():
            return plan
        (topology,) = (one for one in self.spec.topologies if one.label == label)
        return self._planned(topology)

    def _planned(self, topology: NamedTopology) -> Plan:
        """Plans a start in a new directory: the topology's own, or ``start-02`` and so on within it."""
        home = self.run_dir / topology.label
        if home.exists():
            home = home / f"start-{len(list(home.glob('start-*'))) + 2:02d}"
        return prepare(topology.spec, run_dir=home, fault=self.fault)


@contextmanager
def new_run(
    spec: Spec, parent: Path, argv: Sequence[str], listener: RunListener | None, deployment: Deployment | None = None
) -> Iterator[OpenRun[Spec]]:
    """Creates a run directory in ``parent``. It is removed if the run ends before anything was measured.

    ``deployment``: the attached deployment.
    """
    started_at = datetime.now(UTC)
    here = environment(argv, started_at, deployment)
    run_dir = directory.create(parent, spec, started_at)
    run = OpenRun(
        spec=spec, run_dir=run_dir, listener=listener or RunListener(), environment=here, deployment=deployment
    )
    try:
        with directory.unwritable_refused(run_dir):
            yield run
    except BaseException as error:
        is_kept = run.journal.path.exists() or (run.is_announced and not isinstance(error, UsageError))
        if not is_kept:
            shutil.rmtree(run_dir, ignore_errors=True)
        raise


@contextmanager
def resumed_run(
    run_dir: Path, read_spec: Callable[[Path], Spec], argv: Sequence[str], listener: RunListener | None
) -> Iterator[tuple[OpenRun[Spec], Recorded[Spec]]]:
    """Opens the directory of a run that ended early, in the working directory in which the run began.

    Raises UsageError, leaving the run unchanged, if another trtx uses the directory, if machine or versions differ from
    the recorded ones, or if answers that the resumed run would keep have been changed.
    """
    run_dir = run_dir.absolute()
    with directory.where_it_began(run_dir):
        refuse_changed_documents(run_dir, under=_ANSWERS)
        spec = read_spec(run_dir)
        with directory.unwritable_refused(run_dir), directory.hold(run_dir) as check_directory:
            recorded = resumption.read_recorded(run_dir, spec)
            here = environment(argv, datetime.now(UTC))
            resumption.check_conditions(recorded, here)
            resumption.wait_for_the_end(recorded)
            run = OpenRun(
                spec=spec,
                run_dir=run_dir,
                listener=listener or RunListener(),
                environment=here,
                recorded=recorded,
                check_directory=check_directory,
            )
            yield run, recorded


def forget_verdict(run_dir: Path) -> None:
    """Deletes the verdict and the A/B comparison of a run that continues; both are written again at its end."""
    for document in (VERDICT, COMPARISON):
        (run_dir / document.file).unlink(missing_ok=True)
