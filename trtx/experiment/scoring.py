"""Scores served topologies with one lm-eval session per run, which asks one topology after the other."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from trtx.config.wording import shown
from trtx.errors import UsageError
from trtx.evals import Endpoint, EvalJob, Session, read_eval
from trtx.evals.gate import check_max_drop, check_min_scores
from trtx.evals.messages import NeedleAsked, TasksLoaded
from trtx.experiment.bench.spec import ATTACHED
from trtx.experiment.scoring_spec import ScoringSpec
from trtx.topology import Plan

SESSION_LOG = Path("eval") / "session.log"
_SERVED_PATIENCE_S, _ATTACHED_PATIENCE_S = 30.0, 5.0  # trtx restarts the workers that it serves, so these get more time
_OF_A_TOKENIZER = ("tokenizer.json", "*.model", "vocab.*", "merges.txt", "chat_template.jinja")


@contextmanager
def open_session(spec: ScoringSpec, tokenizer: Path | None, context_length: int | None, log: Path) -> Iterator[Session]:
    """Runs lm-eval in its process. It starts to load the tasks and their datasets immediately.

    ``context_length``: maximum tokens of prompt and answer on every topology; None: unknown.
    """
    job = EvalJob(
        tasks=spec.tasks,
        task_dir=None if spec.task_dir is None else str(Path(spec.task_dir).absolute()),
        limit=spec.limit,
        num_fewshot=spec.num_fewshot,
        endpoint_type=spec.endpoint_type,
        concurrency=spec.concurrency,
        tokenizer=None if tokenizer is None else str(tokenizer),
        context_length=context_length,
        needle=NeedleAsked(spec.needle_lengths, spec.needle_depths, spec.needle_samples),
        text=None if spec.text is None else str(Path(spec.text).absolute()),
        schemas=None if spec.schemas is None else str(Path(spec.schemas).absolute()),
        structured_output=spec.structured_output,
        request_timeout_s=spec.request_timeout,
    )
    with Session(job, log) as session:
        yield session


def wait_loaded(spec: ScoringSpec, session: Session, check: Callable[[], None]) -> TasksLoaded:
    """Waits until all tasks are loaded. Raises UsageError for an invalid task, dataset or minimum score."""
    try:
        loaded = session.wait_loaded(check)
        check_min_scores(spec.least_scores, loaded.metrics, loaded.shares)
        if "max_drop" in spec.model_fields_set:
            check_max_drop(spec.max_drop, _compared_shares(loaded))
    except UsageError as error:
        raise UsageError(spec.worded(str(error))) from error
    return loaded


def _compared_shares(loaded: TasksLoaded) -> list[str]:
    """The compared scores (the first metric of each task) that lie between 0 and 1."""
    first = {task: metrics[0] for task, metrics in loaded.metrics.items() if metrics}
    return [f"{metric} of {task}" for task, metric in first.items() if metric in loaded.shares.get(task, ())]


def endpoint_of(
    label: str, url: str, model: str, home: Path, api_key: str | None = None, certificate: Path | None = None
) -> Endpoint:
    """The endpoint of a served topology or of the attached deployment. ``home``: the directory of its answers."""
    patience_s = _ATTACHED_PATIENCE_S if label == ATTACHED else _SERVED_PATIENCE_S
    return Endpoint(label, url, model, str(home), patience_s, api_key, certificate)


def is_scored(run_dir: Path, label: str) -> bool:
    """Whether every sample of a topology has an answer."""
    scores = read_eval(run_dir, label)
    return scores is not None and all(task.answered == task.samples for task in scores.tasks)


def common_tokenizer(plans: Mapping[str, Plan]) -> Path:
    """The tokenizer of all topologies, which get the same prompts. Raises UsageError if they have different ones."""
    (first, path), *others = ((label, plan.model_path) for label, plan in plans.items())
    for label, other in others:
        if other != path and _contents(other) != _contents(path):
            raise UsageError(
                f"{first} and {label} serve models with different tokenizers ({shown(str(path))} and "
                f"{shown(str(other))}), but eval sends the same prompts to all topologies; make one run of each, or "
                "leave out eval"
            )
    return path


def _contents(directory: Path) -> dict[str, bytes]:
    paths = (path for pattern in _OF_A_TOKENIZER for path in directory.glob(pattern))
    return {path.name: path.read_bytes() for path in paths}
