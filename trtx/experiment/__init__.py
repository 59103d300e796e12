"""One run: serves each mode, measures it, stops it, and leaves a complete and self-explanatory run directory.

This package owns the run directory, the order of events in a run, and the verdict that determines the exit code. It
doesn't start processes (``launch``), generate load (``bench``), draw (``report``) or print (``cli``).

Call :func:`run` with an :class:`ExperimentSpec`. :func:`plan_only` implements ``--dry-run``. :func:`resume` continues a
run that ended early. :func:`differences_here` lists how this machine differs from a run's manifest. ``lifecycle.py`` is
the frame of every run; ``bench/runner.py``, ``evaluation.py``, ``fidelity.py`` and ``parity/run.py`` measure in it.

Invariants: a run directory is either new or resumed; however a run ends, its measurements are written and rendered.
"""

from trtx.experiment.bench.dry_run import plan_only
from trtx.experiment.bench.estimate import cells_ahead, estimate, read_history
from trtx.experiment.bench.reproduction import Locked, differences_here, read_locked, spec_to_run
from trtx.experiment.bench.runner import resume, run
from trtx.experiment.bench.spec import Attach, ExperimentSpec
from trtx.experiment.bench.sweep_file import load_sweep
from trtx.experiment.directory import where_it_began
from trtx.experiment.evaluation import evaluate, resume_evaluation
from trtx.experiment.evaluation_spec import EvaluationSpec, evaluation_of
from trtx.experiment.gate import check_elsewhere
from trtx.experiment.lifecycle import FinishedRun
from trtx.experiment.listener import RunListener
from trtx.experiment.load_fit import check_fits_served

__all__ = [
    "Attach",
    "EvaluationSpec",
    "ExperimentSpec",
    "FinishedRun",
    "Locked",
    "RunListener",
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
