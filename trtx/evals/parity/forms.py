"""The documents of a ``trtx eval parity`` run, under ``eval/``: prompts, all answers of all passes, and the comparison.

    eval/prompts.jsonl               eval/parity.json               eval/<pass>/answers.jsonl

A pass sends all prompts once. The reference has two passes (``agg``, ``agg-again``), every other route has one.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from trtx.bench.documents import RESTORE, DocumentKind, parsed, plain
from trtx.bench.files import write_text
from trtx.bench.named_models import OtherModels
from trtx.errors import UsageError
from trtx.stats.intervals import Interval

PARITY = DocumentKind("parity.json", version=2, oldest=1, since="")
PROMPTS = DocumentKind("prompts.jsonl", version=1, oldest=1, since="")
ANSWERS = DocumentKind("answers.jsonl", version=1, oldest=1, since="")
_DIRECTORY = "eval"

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Prompt:
    """One request, which is the same on every route; one line of ``prompts.jsonl``."""

    index: int  # position in the order of sending; identifies the prompt
    token_ids: tuple[int, ...]
    family: int | None  # prompts of a family share a prefix; None: no shared prefix
    asks_prompt_logprobs: bool
    cancel_after: int | None  # number of stream events before the client disconnects; 0: before any; None: it stays

    @property
    def is_compared(self) -> bool:
        return self.cancel_after is None


@dataclass(frozen=True, slots=True)
class ParityAnswer:
    """The response to one prompt; one line of ``answers.jsonl``. Log-probabilities are natural logarithms.

    ``top``: the most likely tokens by id for each token, as many as the server gives. ``prompt_logprobs``: for each
    prompt token except the first; empty if not requested. ``resent``: number of tokens appended to the prompt for the
    worker that completed the answer, as after a migration; None: unknown.
    """

    index: int
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    top: tuple[dict[str, float], ...]
    prompt_logprobs: tuple[float, ...]
    finish_reason: str | None
    prompt_tokens: int | None
    cached_tokens: int | None
    workers: dict[str, int]  # Dynamo's worker ids by role; empty: not reported
    resent: int | None
    attempts: int
    failure: str | None  # why the answer is incomplete, in the server's words; None: complete
    models: tuple[str, ...] = ()  # models named by its events


@dataclass(frozen=True, slots=True)
class Worst:
    """The largest difference of two passes in one request."""

    index: int  # of the prompt
    part: str  # "answer" or "prompt"
    position: int  # of the token within the part, from 0
    distance: float  # of log-probabilities


@dataclass(frozen=True, slots=True)
class Divergence:
    """The first position at which two answers to one prompt have different tokens."""

    index: int
    position: int
    distance: float  # of log-probabilities there, as in :mod:`distance`
    expected: int  # token ids
    found: int


@dataclass(frozen=True, slots=True)
class PassComparison:
    """All answers of one pass compared with those of the reference."""

    requests: int  # with a complete answer on both sides
    identical: int  # number with identical tokens
    divergences: tuple[Divergence, ...]  # the others by distance, largest first
    answer_positions: int  # positions with equal preceding tokens on both sides
    prompt_positions: int
    worst: tuple[Worst, ...]  # by request, largest first
    mean: Interval | None  # interval of the mean distance over requests; None: too few requests
    mean_distance: float


@dataclass(frozen=True, slots=True)
class Count:
    """One counter of a route. ``value`` None: not counted."""

    what: str
    value: int | None


@dataclass(frozen=True, slots=True)
class RouteEvidence:
    """Evidence that a route was used.

    ``is_checked``: False for a server whose internals aren't visible, so that no claim is made. ``corrupted``: number
    of handoffs whose KV an injected fault corrupted; None: not counted.
    """

    counts: tuple[Count, ...]
    missing: str | None  # why it is not proven; None: it is, or ``is_checked`` is False
    is_checked: bool = True
    corrupted: int | None = None


@dataclass(frozen=True, slots=True)
class Tolerance:
    """Permitted distance from the reference's log-probabilities: a multiple of that of two identical runs, or a floor.

    ``dtype`` is the model's compute dtype; None: unknown, and no floor. A ``floor`` of 0 means that all routes must be
    bitwise identical (``--deterministic``), so no distance is permitted.
    """

    dtype: str | None
    floor: float | None
    largest: float  # largest distance between the reference's two runs
    mean: float
    most: float  # maximum permitted distance
    most_mean: float  # maximum permitted mean


@dataclass(frozen=True, slots=True)
class ComparedRoute:
    route: str
    sent: int  # number of compared requests
    failures: tuple[str, ...]  # for requests without a complete answer: prompt index and reason
    cancelled: int  # requests whose client disconnected early
    evidence: RouteEvidence
    compared: PassComparison
    others: OtherModels | None = None  # other models that answers name


@dataclass(frozen=True, slots=True)
class Parity:
    """Content of ``parity.json``."""

    tolerance: Tolerance | None  # None: the reference doesn't have two answered passes
    reference: ComparedRoute | None  # its second pass compared with its first
    routes: tuple[ComparedRoute, ...]


def parity_directory(run_dir: Path) -> Path:
    return run_dir / _DIRECTORY


def read_parity(run_dir: Path) -> Parity | None:
    """The comparison so far; None if there is none. Raises UsageError with file, field and value."""
    return PARITY.find(parity_directory(run_dir), Parity)


def write_prompts(run_dir: Path, prompts: Iterable[Prompt]) -> None:
    _write_lines(PROMPTS, parity_directory(run_dir), prompts)


def read_prompts(run_dir: Path) -> tuple[Prompt, ...] | None:
    """The prompts; None if the run ended before it wrote them. Raises UsageError like :func:`read_answers`."""
    path = parity_directory(run_dir) / PROMPTS.file
    return _read_lines(PROMPTS, Prompt, path) if path.exists() else None


def write_answers(run_dir: Path, label: str, answers: Iterable[ParityAnswer]) -> None:
    """Writes the answers of one pass, ordered by index."""
    _write_lines(ANSWERS, parity_directory(run_dir) / label, answers)


def read_answers(run_dir: Path, label: str) -> tuple[ParityAnswer, ...]:
    """The answers of one pass. Raises UsageError that names the line and the field that can't be read."""
    return _read_lines(ANSWERS, ParityAnswer, parity_directory(run_dir) / label / ANSWERS.file)


def has_answers(run_dir: Path, label: str) -> bool:
    """Whether a pass has been written, which happens atomically at its end."""
    return (parity_directory(run_dir) / label / ANSWERS.file).exists()


def _read_lines(document: DocumentKind, form: type[T], path: Path) -> tuple[T, ...]:
    try:
        # Not splitlines(), because a server's text may contain other line separators.
        lines = path.read_text(encoding="utf-8").split("\n")[:-1]
    except OSError as error:
        raise UsageError(f"{path} can't be read ({error.strerror}); {RESTORE}") from error
    return tuple(_restored(document, form, line, f"{path}, line {number}") for number, line in enumerate(lines, 1))


def _restored(document: DocumentKind, form: type[T], line: str, source: str) -> T:
    try:
        found: Any = parsed(line)
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{source} is not JSON ({error}); {RESTORE}") from error
    return document.restored(document.checked(found, source), form, source)


def _write_lines(document: DocumentKind, directory: Path, contents: Iterable[Any]) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    lines = (json.dumps(document.versioned(plain(one)), ensure_ascii=False, allow_nan=False) for one in contents)
    write_text(directory / document.file, "".join(f"{line}\n" for line in lines))
