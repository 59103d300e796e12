"""The documents under ``fidelity/``: the reference's texts, their comparisons, and a topology's metrics."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from trtx.bench.documents import DocumentKind
from trtx.bench.named_models import OtherModels
from trtx.evals.forms import Unanswered
from trtx.evals.lines import read_lines
from trtx.stats.intervals import Interval

REFERENCE = DocumentKind("reference.json", version=1, oldest=1, since="")
SEQUENCES = DocumentKind("reference.jsonl", version=1, oldest=1, since="")
FIDELITY = DocumentKind("fidelity.json", version=1, oldest=1, since="")
COMPARED = DocumentKind("sequences.jsonl", version=1, oldest=1, since="")
DIRECTORY = "fidelity"

TOP = 20  # most likely tokens per position; the maximum of OpenAI's API, Dynamo's frontend and trtx's worker
Part = Literal["text", "prompt"]


@dataclass(frozen=True, slots=True)
class ReferenceSequence:
    """A line of ``reference.jsonl``: a prompt and the reference's continuation, both scored by the reference.

    ``tokens`` are the ids of both; the first ``prompt_length`` belong to the prompt. For each position except the
    first, in order, ``top_tokens`` has the position's own token and the most likely ones, and ``top_logprobs`` their
    natural log-probabilities.
    """

    index: int
    prompt_length: int
    tokens: tuple[int, ...]
    top_tokens: tuple[tuple[int, ...], ...]
    top_logprobs: tuple[tuple[float, ...], ...]

    def rows(self, top: int) -> list[dict[int, float]]:
        """Log-probabilities by token: the ``top`` most likely ones and the own token of each position except
        the first.
        """
        found = []
        for own, tokens, logprobs in zip(self.tokens[1:], self.top_tokens, self.top_logprobs, strict=True):
            row = dict(zip(tokens, logprobs, strict=True))
            kept = sorted(row, key=row.__getitem__, reverse=True)[:top]
            found.append({token: row[token] for token in (own, *kept)})
        return found


@dataclass(frozen=True, slots=True)
class ReferenceFacts:
    """Content of ``reference.json``, which is written when ``reference.jsonl`` is complete."""

    model: str  # as given by the user
    files_sha256: str  # of samples of its files
    dtype: str  # stored dtype of its weights
    device: str  # CPU, or the GPU's name
    prompts: str  # source of the prompts
    top: int
    sequences: int
    seconds: float


@dataclass(frozen=True, slots=True)
class ComparedSequence:
    """A line of ``sequences.jsonl``: one sequence on one topology. Lists have one entry per position except the first.

    ``kl``: lower bound in nats. ``shared``: the reference's probability of the tokens that both report.
    """

    index: int
    key: str  # hash of the tokens and the prompt's length
    prompt_length: int
    kl: tuple[float, ...]
    agrees: tuple[bool, ...]
    shared: tuple[float, ...]
    reference_logprob: tuple[float, ...]  # natural log-probability of the position's own token
    served_logprob: tuple[float, ...]
    models: tuple[str, ...] = ()  # models named by the answer

    def positions(self, part: Part) -> slice:
        """Slice of the lists for the prompt, or for the reference's text."""
        return slice(self.prompt_length - 1, None) if part == "text" else slice(0, self.prompt_length - 1)


@dataclass(frozen=True, slots=True)
class MeanOverPositions:
    """A mean over all positions of a part. ``interval`` is None with too few prompts."""

    value: float
    interval: Interval | None


@dataclass(frozen=True, slots=True)
class PartFigures:
    """Metrics of the reference's text, or of the prompts before it, on one topology."""

    part: Part
    positions: int
    kl: MeanOverPositions  # lower bound, in nats per token
    agreement: MeanOverPositions  # share of positions with the same most likely token
    shared: float  # the reference's probability of the tokens that were compared individually
    reference_perplexity: float  # exp of the mean negative log-probability of the positions' own tokens
    served_perplexity: float
    perplexity_increase_pct: MeanOverPositions


@dataclass(frozen=True, slots=True)
class TopologyFidelity:
    """Content of ``fidelity.json``."""

    topology: str
    route: str | None  # how prompt log-probabilities were obtained; None: the server gives none
    top: int | None  # requested number of most likely tokens per position
    sequences: int  # number to ask
    answered: int
    parts: tuple[PartFigures, ...]  # empty without an answer
    unanswered: tuple[Unanswered, ...]
    note: str | None = None  # why nothing was compared
    others: OtherModels | None = None  # other models that answers name

    def part(self, name: Part) -> PartFigures | None:
        return next((one for one in self.parts if one.part == name), None)


def reference_directory(run_dir: Path) -> Path:
    return run_dir / DIRECTORY


def fidelity_directory(run_dir: Path, topology: str) -> Path:
    return run_dir / DIRECTORY / topology


def read_fidelity(run_dir: Path, topology: str) -> TopologyFidelity | None:
    """The fidelity of a topology; None if the comparison is incomplete. Raises UsageError with file, field and
    value.
    """
    return FIDELITY.find(fidelity_directory(run_dir, topology), TopologyFidelity)


def read_compared(directory: Path) -> tuple[ComparedSequence, ...]:
    """Comparisons in file order; empty if there is no file yet. Raises UsageError."""
    return read_lines(directory, COMPARED, ComparedSequence)
