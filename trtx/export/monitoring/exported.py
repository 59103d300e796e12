"""The files of ``trtx export prometheus`` and ``trtx export grafana``."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from trtx.errors import UsageError
from trtx.export.files import ExportedFile
from trtx.export.monitoring.dashboard import dashboard
from trtx.export.monitoring.rules import rule_file
from trtx.export.monitoring.scrape import KubernetesPods, configuration, read_plan


@dataclass(frozen=True, slots=True)
class PrometheusFiles:
    """The scrape file and the rules. ``notes``: sentences for the user."""

    files: tuple[ExportedFile, ...]
    notes: tuple[str, ...] = ()


def prometheus_files(runs: Sequence[Path], pods: KubernetesPods | None, interval_s: int) -> PrometheusFiles:
    """Returns the files for these runs of ``trtx serve``, or for ``pods``.

    Raises UsageError for a path that is not a run, for a topology named twice, and if there is neither a run nor pods.
    """
    if pods is not None:
        return PrometheusFiles((configuration([pods], interval_s), rule_file(has_gpus=True)))
    if not runs:
        raise UsageError("RUN is missing; give the run directory of a trtx serve that runs, or --kubernetes NAME")
    plans = [read_plan(path) for path in runs]
    if twice := [name for name, number in Counter(plan.namespace for plan in plans).items() if number > 1]:
        raise UsageError(f"two of the runs are topology {twice[0]}; give each topology once")
    has_gpus = any(plan.gpu_count for plan in plans)
    note = "no topology of these runs has a GPU, so the rules have no alerts about GPUs"
    return PrometheusFiles(
        (configuration(plans, interval_s), rule_file(has_gpus=has_gpus)), () if has_gpus else (note,)
    )


def grafana_file(runs: Sequence[Path]) -> ExportedFile:
    """Returns the dashboard. If no run of ``runs`` has a GPU, a text replaces the row of GPU panels.

    Raises UsageError for a path that is not a run.
    """
    plans = [read_plan(path) for path in runs]
    return dashboard(has_gpus=not plans or any(plan.gpu_count for plan in plans))
