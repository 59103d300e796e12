"""What crosses between the launcher and the session: one JSON object a line, each a class here."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from pydantic import TypeAdapter

EndpointType = Literal["completions", "chat"]
REQUEST_TIMEOUT_S = 600.0  # a long answer in a full batch


@dataclass(frozen=True, slots=True)
class NeedleAsked:
    """Which prompts ``needle`` makes."""

    lengths: tuple[int, ...] | None = None  # tokens of prompt and answer; None: powers of two up to the context
    depths: tuple[int, ...] = (0, 25, 50, 75, 100)  # per cent of the haystack that lie before the needle
    samples: int = 10  # of each length and depth


@dataclass(frozen=True, slots=True)
class Job:
    """What is asked of every topology: first line down."""

    tasks: tuple[str, ...]
    task_dir: str | None
    limit: int | None  # samples of each task, its first ones; None: all
    num_fewshot: int | None  # None: as each task says
    endpoint_type: EndpointType
    concurrency: int  # requests in flight
    tokenizer: str | None  # its directory; None: there is none here
    context_length: int | None = None  # tokens of prompt and answer, of the shortest topology; None: not known
    needle: NeedleAsked = NeedleAsked()
    text: str | None = None  # the file that ``perplexity`` scores
    request_timeout_s: float = REQUEST_TIMEOUT_S


@dataclass(frozen=True, slots=True)
class Endpoint:
    """A topology that answers now: each further line down."""

    topology: str  # its label
    url: str
    model: str  # the name that requests carry
    directory: str  # that its samples and scores are written to
    patience_s: float  # how long it may be gone: what trtx serves is started again meanwhile
    api_key: str | None = None
    certificate: Path | None = None  # of a server that trtx started and that speaks TLS, in PEM


@dataclass(frozen=True, slots=True)
class Loaded:
    """Every task and dataset is there."""

    samples: dict[str, int]  # by task, those to ask
    metrics: dict[str, tuple[str, ...]]  # by task and by group, those that a score can have
    shares: dict[str, tuple[str, ...]]  # of these, those known to lie between 0 and 1


@dataclass(frozen=True, slots=True)
class Progress:
    """After each sample."""

    topology: str
    task: str
    done: int  # answered, or given up
    answered: int
    total: int
    kept: int  # of ``done``, those of an earlier attempt
    metric: str | None  # the task's first; None: it has no running mean
    score: float | None
    low: float | None
    high: float | None


@dataclass(frozen=True, slots=True)
class Scored:
    """The topology's ``eval.json`` is written."""

    topology: str


@dataclass(frozen=True, slots=True)
class Failed:
    """The last line. ``usage``: a person can put it right; ``gone``: the server stopped answering; ``crash``."""

    kind: Literal["usage", "gone", "crash"]
    text: str


Down = Job | Endpoint
Up = Loaded | Progress | Scored | Failed
_KINDS: dict[str, type[Down | Up]] = {kind.__name__: kind for kind in (Job, Endpoint, Loaded, Progress, Scored, Failed)}


def to_line(message: Down | Up) -> str:
    fields = TypeAdapter(type(message)).dump_python(message, mode="json")
    return json.dumps({"kind_of": type(message).__name__, **fields}) + "\n"


def from_line(line: str) -> Down | Up:
    fields = json.loads(line)
    kind = _KINDS[fields.pop("kind_of")]
    message: Down | Up = TypeAdapter(kind).validate_python(fields)
    return message
