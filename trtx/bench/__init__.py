"""Benchmarks a URL with aiperf: measures one cell (sweep point) per load and writes each cell as soon as it is
complete.

This package owns the aiperf process, the cells with their trials and metrics, and the run's journal. It starts no
servers (``launch`` does), compares and renders nothing (``report`` does), and leaves load generation to aiperf.

Call :func:`sweep` with a :class:`Target` and a :class:`LoadSpec`; read the results back with :func:`read_cells`.

Invariants: aiperf's files stay exactly as aiperf wrote them. A request counts as successful only if its answer is
complete (``answers.py``). Failed requests and failed cells are recorded next to the metrics.
"""

from trtx.bench.aiperf.command import check_endpoint, check_settings, command
from trtx.bench.aiperf.flags import check_load
from trtx.bench.aiperf.process import AiperfHost
from trtx.bench.cells import Cell, Trial, cell_directory, cell_name, read_cells, trial_directory
from trtx.bench.failures import Reasons, describe
from trtx.bench.journal import Journal, read_journal
from trtx.bench.load import Load, LoadSpec, Target
from trtx.bench.metric_types import Distribution, Figures, Metric, ValueRange
from trtx.bench.readings import ForeignProcess, GpuReading, ServerReading
from trtx.bench.sent_dataset import as_sent, dataset_of
from trtx.bench.sweep import (
    PlannedTrial,
    SweepProgress,
    changed_files,
    held_trials,
    planned_trials,
    rewrite_cells,
    sweep,
)
from trtx.stats.percentiles import samples_needed

__all__ = [
    "AiperfHost",
    "Cell",
    "Distribution",
    "Figures",
    "ForeignProcess",
    "GpuReading",
    "Journal",
    "Load",
    "LoadSpec",
    "Metric",
    "PlannedTrial",
    "Reasons",
    "ServerReading",
    "SweepProgress",
    "Target",
    "Trial",
    "ValueRange",
    "as_sent",
    "cell_directory",
    "cell_name",
    "changed_files",
    "check_endpoint",
    "check_load",
    "check_settings",
    "command",
    "dataset_of",
    "describe",
    "held_trials",
    "planned_trials",
    "read_cells",
    "read_journal",
    "rewrite_cells",
    "samples_needed",
    "sweep",
    "trial_directory",
]
