"""Measures a URL with aiperf: one cell for each concurrency, written as it ends.

Owns the aiperf process, the cells with their trials and figures, and the run's journal.
Does not serve (``launch``), compare or render (``report``), and never makes load of its own.
Enter through :func:`sweep` with a :class:`Target` and a :class:`LoadSpec`; read results back with :func:`read_cells`.
Always holds: aiperf's files stay as it wrote them; a request succeeds only with a whole answer (``answers.py``), and
a failed one or a failed cell is recorded beside the figures.
"""

from trtx.bench.aiperf.command import check_endpoint, check_settings, command
from trtx.bench.aiperf.flags import check_load
from trtx.bench.aiperf.process import AiperfHost
from trtx.bench.cells import Cell, Trial, cell_directory, cell_name, read_cells, trial_directory
from trtx.bench.failures import Reasons, describe
from trtx.bench.figures import Distribution, Figure, Figures, Range
from trtx.bench.journal import Journal, read_journal
from trtx.bench.load import Load, LoadSpec, Target
from trtx.bench.readings import ForeignProcess, GpuReading, ServerReading
from trtx.bench.sent_dataset import as_sent, dataset_of
from trtx.bench.sweep import PlannedTrial, Progress, changed_files, held_trials, planned_trials, rewrite_cells, sweep
from trtx.stats.percentiles import samples_needed

__all__ = [
    "AiperfHost",
    "Cell",
    "Distribution",
    "Figure",
    "Figures",
    "ForeignProcess",
    "GpuReading",
    "Journal",
    "Load",
    "LoadSpec",
    "PlannedTrial",
    "Progress",
    "Range",
    "Reasons",
    "ServerReading",
    "Target",
    "Trial",
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
