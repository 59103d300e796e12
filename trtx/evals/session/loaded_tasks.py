"""Tasks after loading: their rows, and the requests of each row."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lm_eval.api.group import Group
from lm_eval.api.instance import Instance
from lm_eval.api.metrics import mean
from lm_eval.api.task import ConfigurableTask, Task

from trtx.evals import structured
from trtx.evals.forms import Arm
from trtx.evals.session.model import ServedModel

OWN_TASKS = Path(__file__).resolve().parents[1] / "tasks"
_OWN_NAMES = frozenset(path.stem for path in OWN_TASKS.glob("*.yaml"))
_SHARES = ("acc", "acc_norm", "exact_match")  # lm-eval's metrics that are 0 or 1 per sample


@dataclass(slots=True)
class TaskDocument:
    """One row of a task, with its requests."""

    doc_id: int
    doc: dict[str, Any]
    instances: list[Instance]
    key: str


@dataclass(slots=True)
class LoadedTask:
    """A task with its requests, or one arm of a task with JSON schemas."""

    name: str
    task: Task
    documents: list[TaskDocument]
    arm: Arm | None = None

    @property
    def asks_logprobs(self) -> bool:
        return bool(self.task.OUTPUT_TYPE != "generate_until")

    @property
    def metrics(self) -> tuple[str, ...]:
        """The names of its metrics, the compared one first."""
        return (*self.task.aggregation(), *(structured.outcomes_of(self.arm) if self.arm else ()))


@dataclass(slots=True)
class LoadedTasks:
    tasks: list[LoadedTask] = field(default_factory=list)
    groups: list[Group] = field(default_factory=list)  # outer groups first

    @property
    def metrics(self) -> dict[str, tuple[str, ...]]:
        """Metric names by task and by group."""
        of_tasks = {one.name: one.metrics for one in self.tasks}
        of_groups = {
            group.name: tuple(config.metric for config in group.aggregate_metric_list or ()) for group in self.groups
        }
        return of_tasks | of_groups

    @property
    def shares(self) -> dict[str, tuple[str, ...]]:
        """The :attr:`metrics` known to be shares of samples: those of lm-eval or of trtx's own tasks.

        Other tasks that compute results in their own code may use the same names for percentages. For a group: metrics
        that are shares in all of its tasks.
        """
        found = {one.name: _shares(one) for one in self.tasks}
        for group in self.groups:
            members = [found.get(task.task_name, ()) for task in group.get_all_tasks()]
            of_group = self.metrics[group.name]
            found[group.name] = tuple(name for name in of_group if all(name in shares for shares in members))
        return {name: shares for name, shares in found.items() if shares}


def _shares(loaded: LoadedTask) -> tuple[str, ...]:
    task = loaded.task
    if loaded.arm is not None:
        return tuple(name for name in loaded.metrics if name in structured.METRICS)
    if loaded.name in _OWN_NAMES:
        return tuple(name for name, aggregate in task.aggregation().items() if aggregate is mean)
    if type(task).process_results is not ConfigurableTask.process_results or callable(
        task.get_config("process_results")
    ):
        return ()
    return tuple(name for name in task.aggregation() if name in _SHARES)


def documents_of(instances: Iterable[Instance], model: ServedModel) -> Iterator[TaskDocument]:
    """The rows with their requests. A row's key is a hash of all that determines its answers."""
    by_doc: dict[int, list[Instance]] = {}
    for instance in instances:
        by_doc.setdefault(instance.doc_id, []).append(instance)
    for doc_id, own in by_doc.items():
        own.sort(key=lambda instance: instance.idx)
        asked = [[*model.signature(instance), instance.repeats] for instance in own]
        text = json.dumps(asked, ensure_ascii=False, sort_keys=True, default=str)
        yield TaskDocument(doc_id, own[0].doc, own, hashlib.sha256(text.encode()).hexdigest())


def version_of(task: Task) -> str | None:
    """The task's version; None if it specifies none, in which case lm-eval uses the version of its class."""
    found = task.VERSION
    return None if found is None or found == ConfigurableTask.VERSION else str(found)
