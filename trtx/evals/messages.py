"""Messages between launcher and session: one JSON object per line, one class per kind."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from pydantic import TypeAdapter

EndpointType = Literal["completions", "chat"]
StructuredOutput = Literal["free", "constrained", "both"]
REQUEST_TIMEOUT_S = 600.0  # enough for a long answer in a full batch


@dataclass(frozen=True, slots=True)
class NeedleAsked:
    """Settings of the prompts of ``needle``."""

    lengths: tuple[int, ...] | None = None  # tokens of prompt and answer; None: powers of two up to the context length
    depths: tuple[int, ...] = (0, 25, 50, 75, 100)  # % of the haystack before the needle
    samples: int = 10  # per length and depth


@dataclass(frozen=True, slots=True)
class EvalJob:
    """The request for every topology; the first line to the session."""

    tasks: tuple[str, ...]
    task_dir: str | None
    limit: int | None  # number of first samples per task; None: all
    num_fewshot: int | None  # None: as each task defines
    endpoint_type: EndpointType
    concurrency: int  # requests in flight
    tokenizer: str | None  # directory; None: not available
    context_length: int | None = None  # tokens of prompt and answer, of the shortest topology; None: unknown
    needle: NeedleAsked = NeedleAsked()
    text: str | None = None  # file that ``perplexity`` scores
    request_timeout_s: float = REQUEST_TIMEOUT_S
    structured_output: StructuredOutput | None = None  # None: as each task defines
    schemas: str | None = None  # file with the documents of ``schemas``


@dataclass(frozen=True, slots=True)
class Endpoint:
    """A topology to ask now; each further line to the session."""

    topology: str  # label
    url: str
    model: str  # the model name in requests
    directory: str  # output directory of samples and scores
    patience_s: float  # how long it may be unreachable, e.g. while trtx restarts it
    api_key: str | None = None
    certificate: Path | None = None  # PEM certificate of a TLS server that trtx started


@dataclass(frozen=True, slots=True)
class TasksLoaded:
    """All tasks and datasets are loaded."""

    samples: dict[str, int]  # number to ask, by task
    metrics: dict[str, tuple[str, ...]]  # metrics of scores, by task and by group
    shares: dict[str, tuple[str, ...]]  # those of them that lie between 0 and 1


@dataclass(frozen=True, slots=True)
class EvalProgress:
    """Progress after each sample."""

    topology: str
    task: str
    done: int  # answered or given up
    answered: int
    total: int
    kept: int  # the part of ``done`` from an earlier attempt
    metric: str | None  # the task's first metric; None: it has no running mean
    score: float | None
    low: float | None
    high: float | None


@dataclass(frozen=True, slots=True)
class TopologyScored:
    """The topology's ``eval.json`` has been written."""

    topology: str


@dataclass(frozen=True, slots=True)
class EvalFailed:
    """The last line on failure.

    ``usage``: the user can fix it; ``gone``: the server stopped answering; ``crash``: any other exception.
    """

    kind: Literal["usage", "gone", "crash"]
    text: str


Down = EvalJob | Endpoint
Up = TasksLoaded | EvalProgress | TopologyScored | EvalFailed
_KINDS: dict[str, type[Down | Up]] = {
    kind.__name__: kind for kind in (EvalJob, Endpoint, TasksLoaded, EvalProgress, TopologyScored, EvalFailed)
}


def to_line(message: Down | Up) -> str:
    fields = TypeAdapter(type(message)).dump_python(message, mode="json")
    return json.dumps({"kind_of": type(message).__name__, **fields}) + "\n"


def from_line(line: str) -> Down | Up:
    fields = json.loads(line)
    kind = _KINDS[fields.pop("kind_of")]
    message: Down | Up = TypeAdapter(kind).validate_python(fields)
    return message
