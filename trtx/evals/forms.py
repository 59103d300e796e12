"""The documents under ``eval/``: a topology's scores (``eval.json``) and every sample of a task (``samples.jsonl``)."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from trtx.bench.documents import RESTORE, DocumentKind
from trtx.errors import UsageError
from trtx.evals.lines import LineWriter, read_lines
from trtx.stats.intervals import Interval

EVAL = DocumentKind("eval.json", version=1, oldest=1, since="")
SAMPLES = DocumentKind("samples.jsonl", version=1, oldest=1, since="")
_DIRECTORY = "eval"

IntervalKind = Literal["binomial", "bootstrap"]
Arm = Literal["free", "constrained"]  # how a task with JSON schemas was asked
# How lm-eval aggregates the samples' values to a score: mean, one of its two ratios of sums, or any other way.
Aggregation = Literal["mean", "weighted_perplexity", "bits_per_byte", "other"]


@dataclass(frozen=True, slots=True)
class Score:
    """One metric of one task, over the answered samples."""

    metric: str
    filter: str  # lm-eval's filter for the answers; "none": unfiltered
    interval: Interval | None  # its estimate is lm-eval's score; None: see no_interval
    value: float
    kind: IntervalKind
    higher_is_better: bool | None  # None: the task doesn't say
    chance: float | None = None  # score of guessing, if the task states it
    aggregation: Aggregation = "mean"
    no_interval: str | None = None  # why there is no interval; older files have None, which means too few samples

    @property
    def name(self) -> str:
        """The metric's name: ``exact_match``, or ``exact_match,strict-match`` if the task has filters."""
        return self.metric if self.filter == "none" else f"{self.metric},{self.filter}"


@dataclass(frozen=True, slots=True)
class Unanswered:
    """Samples that were refused, or not answered, for the same reason."""

    reason: str
    count: int
    first: int  # its doc_id

    def __str__(self) -> str:
        more = f", and {self.count - 1} more like it" if self.count > 1 else ""
        return f"sample {self.first}: {self.reason}{more}"


@dataclass(frozen=True, slots=True)
class Retrieval:
    """Results of ``needle`` at one length and depth."""

    length: int  # tokens of prompt and answer
    depth: int  # % of the haystack before the needle
    least_tokens: int | None  # shortest prompt, which can miss ``length`` by one sentence or entry; None: no sample
    most_tokens: int | None
    samples: int  # number of requested samples
    answered: int
    retrieved: Interval | None  # share of the answered samples; None: no answer


@dataclass(frozen=True, slots=True)
class ScoredTask:
    """A task, or a group of the tasks in ``subtasks``."""

    task: str
    output_type: str
    version: str | None  # None: not specified
    num_fewshot: int
    samples: int  # number of requested samples
    answered: int
    scores: tuple[Score, ...]
    unanswered: tuple[Unanswered, ...]
    note: str | None = None  # why there is no score
    subtasks: tuple[str, ...] = ()
    retrievals: tuple[Retrieval, ...] = ()  # of needle, by length, then depth
    doubts: tuple[str, ...] = ()  # sentences: why a different model may have answered
    grading: str | None = None  # hash of targets and grading; None: not recorded, or a group
    arm: Arm | None = None  # None: its requests have no schema, or it was asked as its task defines
    refused: tuple[Unanswered, ...] = ()  # samples whose schema the server refused; they count as answered


@dataclass(frozen=True, slots=True)
class ArmDifference:
    """constrained − free for one metric of a task, over the samples that both arms answered."""

    task: str  # the free arm's name
    metric: str
    pairs: int
    difference: Interval | None
    reason: str | None  # why there is no interval


@dataclass(frozen=True, slots=True)
class TopologyScores:
    """Content of ``eval.json``."""

    topology: str
    lm_eval: str  # its version
    endpoint_type: str
    prompt_logprobs: str | None  # how prompt log-probabilities were obtained; None: not requested, or unavailable
    limit: int | None
    tasks: tuple[ScoredTask, ...]
    arm_differences: tuple[ArmDifference, ...] = ()  # of the tasks that were asked both free and constrained


@dataclass(frozen=True, slots=True)
class SampleRequest:
    """One request of a sample, and its response."""

    request: str  # generate_until, loglikelihood or loglikelihood_rolling
    prompt: Any  # text, or the messages of a chat
    continuation: str | None  # the scored text, for loglikelihood
    parameters: dict[str, Any]  # of the generation
    text: str | None
    logprob: float | None  # natural logarithm, over all tokens of the continuation
    is_greedy: bool | None  # every token was the most likely one
    finish_reason: str | None
    models: tuple[str, ...] = ()  # models named by the response; empty: none, or not recorded
    refusal: str | None = None  # why the server refused the schema of this request; None: it did not

    @property
    def response(self) -> Any:
        """The response in lm-eval's form."""
        if self.request == "generate_until":
            return "" if self.refusal is not None else self.text
        return self.logprob if self.request == "loglikelihood_rolling" else (self.logprob, self.is_greedy)


@dataclass(frozen=True, slots=True)
class Judged:
    """The metrics of one filter's result for a sample."""

    filter: str
    filtered: tuple[Any, ...]  # each answer after the filter
    metrics: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Sample:
    """One line of ``samples.jsonl``."""

    task: str
    doc_id: int  # row of the dataset's split
    key: str  # hash of the content of all its requests
    doc: dict[str, Any]
    target: Any
    requests: tuple[SampleRequest, ...]
    judgements: tuple[Judged, ...]


def eval_directory(run_dir: Path, topology: str) -> Path:
    return run_dir / _DIRECTORY / topology


def read_eval(run_dir: Path, topology: str) -> TopologyScores | None:
    """The scores of a topology; None if it was not scored completely. Raises UsageError with file, field and value."""
    return EVAL.find(eval_directory(run_dir, topology), TopologyScores)


def read_samples(directory: Path) -> tuple[Sample, ...]:
    """The samples of one task in file order; empty if there is no file yet. A partial last line is ignored.

    Raises UsageError that names the line and the field that can't be read.
    """
    return read_lines(directory, SAMPLES, Sample)


def read_whole(directory: Path, count: int) -> tuple[Sample, ...]:
    """Like :func:`read_samples`, for a task that was scored over ``count`` samples. Raises UsageError if any is
    missing.
    """
    found = read_samples(directory)
    if len(found) == count:
        return found
    path = directory / SAMPLES.file
    if not path.exists():
        raise UsageError(f"{path} is missing, but {count} of its samples were scored; {RESTORE}")
    cut = "" if path.read_bytes().endswith(b"\n") or not found else f", and line {len(found) + 1} is cut short"
    raise UsageError(f"{path} has {len(found)} samples in whole lines{cut}; {count} were scored; {RESTORE}")


class SampleWriter(LineWriter):
    """Appends to one task's ``samples.jsonl``."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory, SAMPLES)
