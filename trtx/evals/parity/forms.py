"""The documents of a run of ``trtx eval parity``, under ``eval/``: prompts, every answer of every pass, what they show.

    eval/prompts.jsonl               eval/parity.json               eval/<pass>/answers.jsonl

A pass is one time that all prompts were sent: two of the reference (``agg``, ``agg-again``), one of each other route.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from trtx.bench.documents import RESTORE, Document, parsed, plain
from trtx.bench.files import write_text
from trtx.bench.named_models import OtherModels
from trtx.errors import UsageError
from trtx.stats.intervals import Interval

PARITY = Document("parity.json", version=2, oldest=1, since="")
PROMPTS = Document("prompts.jsonl", version=1, oldest=1, since="")
ANSWERS = Document("answers.jsonl", version=1, oldest=1, since="")
_DIRECTORY = "eval"

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Prompt:
    """One request, the same on every route; one line of ``prompts.jsonl``."""

    index: int  # its place in the order of sending, and its name
    token_ids: tuple[int, ...]
    family: int | None  # prompts of one number begin with the same tokens; None: it shares none
    asks_prompt_logprobs: bool
    cancel_after: int | None  # events of its stream, after which the client leaves; 0: before it looks; None: it stays

    @property
    def is_compared(self) -> bool:
        return self.cancel_after is None


@dataclass(frozen=True, slots=True)
class Answer:
    """What came back for one prompt; one line of ``answers.jsonl``. Log-probabilities are natural.

    ``top``: for each token, the likeliest ones by id, as many as the server gives. ``prompt_logprobs``: of each token
    of the prompt but the first; empty where they were not asked for. ``resent``: tokens that stood behind the prompt
    when the worker that ended the answer got it, as after a migration; None: it does not show.
    """

    index: int
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    top: tuple[dict[str, float], ...]
    prompt_logprobs: tuple[float, ...]
    finish_reason: str | None
    prompt_tokens: int | None
    cached_tokens: int | None
    workers: dict[str, int]  # by role, Dynamo's ids of who answered; none: the server does not say
    resent: int | None
    attempts: int
    failure: str | None  # why there is no whole answer, in the server's words; None: it is whole
    models: tuple[str, ...] = ()  # that its events say gave it


@dataclass(frozen=True, slots=True)
class Worst:
    """Where two passes differ most in one request."""

    index: int  # of the prompt
    part: str  # "answer" or "prompt"
    position: int  # of the token in that part, from 0
    distance: float  # of log-probabilities


@dataclass(frozen=True, slots=True)
class Divergence:
    """Where two answers to one prompt have another token for the first time."""

    index: int
    position: int
    distance: float  # of log-probabilities there, as :mod:`distance` has it
    expected: int  # token ids
    found: int


@dataclass(frozen=True, slots=True)
class Compared:
    """All answers of one pass beside those of the reference."""

    requests: int  # with a whole answer on both sides
    identical: int  # of them, token for token
    divergences: tuple[Divergence, ...]  # the others, by the distance, the largest first
    answer_positions: int  # that had the same tokens before them on both sides
    prompt_positions: int
    worst: tuple[Worst, ...]  # by request, the largest first
    mean: Interval | None  # of the distance over requests' means; None: too few requests
    mean_distance: float


@dataclass(frozen=True, slots=True)
class Count:
    """One thing that was counted on a route. ``value`` None: nobody counts it there."""

    what: str
    value: int | None


@dataclass(frozen=True, slots=True)
class Evidence:
    """Whether a route was what it is called after.

    ``is_checked``: False where nobody can see how the server works inside, and nothing is said of it. ``corrupted``:
    handoffs whose KV a planted fault made wrong; None: nobody counted.
    """

    counts: tuple[Count, ...]
    missing: str | None  # why it is not shown to have happened; None: it did, or ``is_checked`` is False
    is_checked: bool = True
    corrupted: int | None = None


@dataclass(frozen=True, slots=True)
class Tolerance:
    """How far a log-probability may be from the reference's: what two identical runs show, times a factor, or a floor.

    ``dtype`` is that which the model is computed in; None: not known, and no floor. A ``floor`` of 0: every route
    promises the same bits (``--deterministic``), and nothing is allowed.
    """

    dtype: str | None
    floor: float | None
    largest: float  # distance that the two runs of the reference show
    mean: float
    most: float  # that a distance may be
    most_mean: float  # that the mean may be


@dataclass(frozen=True, slots=True)
class ComparedRoute:
    route: str
    sent: int  # requests that are compared
    failures: tuple[str, ...]  # of those without a whole answer: the prompt's index and why
    cancelled: int  # requests whose client left before their end
    evidence: Evidence
    compared: Compared
    others: OtherModels | None = None  # that answers name in place of the one that was asked


@dataclass(frozen=True, slots=True)
class Parity:
    """``parity.json``."""

    tolerance: Tolerance | None  # None: the reference was not answered twice
    reference: ComparedRoute | None  # its second pass beside its first
    routes: tuple[ComparedRoute, ...]


def parity_directory(run_dir: Path) -> Path:
    return run_dir / _DIRECTORY


def read_parity(run_dir: Path) -> Parity | None:
    """None where nothing was compared yet. Raises UsageError: file, field, value."""
    return PARITY.find(parity_directory(run_dir), Parity)


def write_prompts(run_dir: Path, prompts: Iterable[Prompt]) -> None:
    _write_lines(PROMPTS, parity_directory(run_dir), prompts)


def read_prompts(run_dir: Path) -> tuple[Prompt, ...] | None:
    """None where a run ended before it wrote them. Raises UsageError as :func:`read_answers`."""
    path = parity_directory(run_dir) / PROMPTS.file
    return _read_lines(PROMPTS, Prompt, path) if path.exists() else None


def write_answers(run_dir: Path, label: str, answers: Iterable[Answer]) -> None:
    """Of one pass, by index."""
    _write_lines(ANSWERS, parity_directory(run_dir) / label, answers)


def read_answers(run_dir: Path, label: str) -> tuple[Answer, ...]:
    """Raises UsageError naming the line, and the field, that can't be read."""
    return _read_lines(ANSWERS, Answer, parity_directory(run_dir) / label / ANSWERS.file)


def has_answers(run_dir: Path, label: str) -> bool:
    """Whether a pass was written. It is at once, when it has ended."""
    return (parity_directory(run_dir) / label / ANSWERS.file).exists()


def _read_lines(document: Document, form: type[T], path: Path) -> tuple[T, ...]:
    try:
        lines = path.read_text(encoding="utf-8").split("\n")[:-1]  # a server's words may hold what else ends a line
    except OSError as error:
        raise UsageError(f"{path} can't be read ({error.strerror}); {RESTORE}") from error
    return tuple(_restored(document, form, line, f"{path}, line {number}") for number, line in enumerate(lines, 1))


def _restored(document: Document, form: type[T], line: str, source: str) -> T:
    try:
        found: Any = parsed(line)
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{source} is not JSON ({error}); {RESTORE}") from error
    return document.restored(document.checked(found, source), form, source)


def _write_lines(document: Document, directory: Path, contents: Iterable[Any]) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    lines = (json.dumps(document.versioned(plain(one)), ensure_ascii=False, allow_nan=False) for one in contents)
    write_text(directory / document.file, "".join(f"{line}\n" for line in lines))
