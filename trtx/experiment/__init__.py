"""One run: serve each mode, sweep it, stop it, and leave a run directory that explains itself.

Owns the run directory, its order of events and the verdict that becomes an exit code.
Does not start processes (``launch``), make load (``bench``), draw (``report``) or print (``cli``).
Enter through :func:`run` with an :class:`ExperimentSpec`; :func:`plan_only` is its ``--dry-run``, and :func:`resume`
goes on with a run that ended early. :func:`differences_here` says what is not as the lock of a run says that it was.
Always holds: a run directory is new or resumed, and however a run ends, what was measured is written and rendered.
"""

from trtx.experiment.bench.dry_run import plan_only
from trtx.experiment.bench.estimate import cells_ahead, estimate, read_history
from trtx.experiment.bench.reproduction import Locked, differences_here, read_locked, spec_to_run
from trtx.experiment.bench.runner import FinishedRun, Listener, resume, run
from trtx.experiment.bench.spec import Attach, ExperimentSpec, load_sweep
from trtx.experiment.directory import where_it_began
from trtx.experiment.evaluation import (
    EvaluationListener,
    FinishedEvaluation,
    evaluate,
    resume_evaluation,
)
from trtx.experiment.evaluation_spec import EvaluationSpec, evaluation_of
from trtx.experiment.gate import check_elsewhere
from trtx.experiment.targets import check_fits_served

__all__ = [
    "Attach",
    "EvaluationListener",
    "EvaluationSpec",
    "ExperimentSpec",
    "FinishedEvaluation",
    "FinishedRun",
    "Listener",
    "Locked",
    "cells_ahead",
    "check_elsewhere",
    "check_fits_served",
    "differences_here",
    "estimate",
    "evaluate",
    "evaluation_of",
    "load_sweep",
    "plan_only",
    "read_history",
    "read_locked",
    "resume",
    "resume_evaluation",
    "run",
    "spec_to_run",
    "where_it_began",
]
