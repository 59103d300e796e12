"""The documents under ``eval/``: scores of a topology (``eval.json``), every sample of a task (``samples.jsonl``)."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from trtx.bench.documents import RESTORE, Document
from trtx.errors import UsageError
from trtx.evals.lines import LineWriter, read_lines
from trtx.stats.intervals import Interval

EVAL = Document("eval.json", version=1, oldest=1, since="")
SAMPLES = Document("samples.jsonl", version=1, oldest=1, since="")
_DIRECTORY = "eval"

IntervalKind = Literal["binomial", "bootstrap"]
# How samples become a score: the mean of numbers, lm-eval's names for what is made of a ratio of sums, or all else.
Aggregation = Literal["mean", "weighted_perplexity", "bits_per_byte", "other"]


@dataclass(frozen=True, slots=True)
class Score:
    """One metric of one task, over the samples that have an answer."""

    metric: str
    filter: str  # lm-eval's, that what was judged went through; "none": the answer as it came
    interval: Interval | None  # its estimate is lm-eval's score; None: no_interval says why
    value: float
    kind: IntervalKind
    higher_is_better: bool | None  # None: the task does not say
    chance: float | None = None  # of guessing, where the task says so
    aggregation: Aggregation = "mean"
    no_interval: str | None = None  # why there is none; before it was said, for want of samples

    @property
    def name(self) -> str:
        """``exact_match``, or ``exact_match,strict-match`` where the task has several filters."""
        return self.metric if self.filter == "none" else f"{self.metric},{self.filter}"


@dataclass(frozen=True, slots=True)
class Unanswered:
    """Samples that have no answer for one and the same reason."""

    reason: str
    count: int
    first: int  # its doc_id

    def __str__(self) -> str:
        more = f", and {self.count - 1} more like it" if self.count > 1 else ""
        return f"sample {self.first}: {self.reason}{more}"


@dataclass(frozen=True, slots=True)
class Retrieval:
    """What ``needle`` found at one length and depth."""

    length: int  # tokens of prompt and answer
    depth: int  # per cent of the haystack that lie before the needle
    least_tokens: int | None  # of its prompts: the nearest that whole sentences or entries make; None: none is asked
    most_tokens: int | None
    samples: int  # to ask
    answered: int
    retrieved: Interval | None  # share of those that are answered; None: none is


@dataclass(frozen=True, slots=True)
class ScoredTask:
    """A task, or a group of tasks where ``subtasks`` names some."""

    task: str
    output_type: str
    version: str | None  # None: it says none
    num_fewshot: int
    samples: int  # to ask
    answered: int
    scores: tuple[Score, ...]
    unanswered: tuple[Unanswered, ...]
    note: str | None = None  # why there is no score
    subtasks: tuple[str, ...] = ()
    retrievals: tuple[Retrieval, ...] = ()  # of needle, by length, then depth
    doubts: tuple[str, ...] = ()  # why its scores may be of something else than was asked, as sentences
    grading: str | None = None  # a hash of what answers are held against, and how; None: nobody noted it, or a group


@dataclass(frozen=True, slots=True)
class TopologyScores:
    """``eval.json``."""

    topology: str
    lm_eval: str  # its version
    endpoint_type: str
    prompt_logprobs: str | None  # the way that log-probabilities of prompts came; None: not asked for, or there is none
    limit: int | None
    tasks: tuple[ScoredTask, ...]


@dataclass(frozen=True, slots=True)
class Asked:
    """One request of a sample, and what came back."""

    request: str  # generate_until, loglikelihood or loglikelihood_rolling
    prompt: Any  # text, or the messages of a chat
    continuation: str | None  # that is scored, of loglikelihood
    parameters: dict[str, Any]  # of the generation
    text: str | None
    logprob: float | None  # natural, of all tokens of the continuation
    is_greedy: bool | None  # each of them was the likeliest
    finish_reason: str | None
    models: tuple[str, ...] = ()  # that what came back says it is of; none: it names none, or nobody looked

    @property
    def response(self) -> Any:
        """As lm-eval takes it."""
        if self.request == "generate_until":
            return self.text
        return self.logprob if self.request == "loglikelihood_rolling" else (self.logprob, self.is_greedy)


@dataclass(frozen=True, slots=True)
class Judged:
    """What one filter's answer of a sample is worth."""

    filter: str
    filtered: tuple[Any, ...]  # each answer after the filter
    metrics: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Sample:
    """One line of ``samples.jsonl``."""

    task: str
    doc_id: int  # the row of the dataset's split
    key: str  # a hash of all that its requests say
    doc: dict[str, Any]
    target: Any
    requests: tuple[Asked, ...]
    judgements: tuple[Judged, ...]


def eval_directory(run_dir: Path, topology: str) -> Path:
    return run_dir / _DIRECTORY / topology


def read_eval(run_dir: Path, topology: str) -> TopologyScores | None:
    """None where the topology was not scored to its end. Raises UsageError: file, field, value."""
    return EVAL.find(eval_directory(run_dir, topology), TopologyScores)


def read_samples(directory: Path) -> tuple[Sample, ...]:
    """Of one task, in the order of the file; none where there is no file yet. A last line cut short is left out.

    Raises UsageError naming the line, and the field, that can't be read.
    """
    return read_lines(directory, SAMPLES, Sample)


def read_whole(directory: Path, count: int) -> tuple[Sample, ...]:
    """As :func:`read_samples`, of a task that was scored over ``count``: UsageError where they are not all there."""
    found = read_samples(directory)
    if len(found) == count:
        return found
    path = directory / SAMPLES.file
    if not path.exists():
        raise UsageError(f"{path} is not there, and {count} samples of it were scored; {RESTORE}")
    cut = "" if path.read_bytes().endswith(b"\n") or not found else f", and line {len(found) + 1} is cut short"
    raise UsageError(f"{path} has {len(found)} samples in whole lines{cut}; {count} were scored; {RESTORE}")


class SampleWriter(LineWriter):
    """Appends to one task's ``samples.jsonl``."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory, SAMPLES)
