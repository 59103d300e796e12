"""The documents under ``fidelity/``: the reference's texts, each of them compared, and a topology's figures."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from trtx.bench.documents import Document
from trtx.bench.named_models import OtherModels
from trtx.evals.forms import Unanswered
from trtx.evals.lines import read_lines
from trtx.stats.intervals import Interval

REFERENCE = Document("reference.json", version=1, oldest=1, since="")
SEQUENCES = Document("reference.jsonl", version=1, oldest=1, since="")
FIDELITY = Document("fidelity.json", version=1, oldest=1, since="")
COMPARED = Document("sequences.jsonl", version=1, oldest=1, since="")
DIRECTORY = "fidelity"

TOP = 20  # likeliest tokens of a position: the most that OpenAI's API, Dynamo's frontend and trtx's worker take
Part = Literal["text", "prompt"]


@dataclass(frozen=True, slots=True)
class Sequence:
    """A line of ``reference.jsonl``: a prompt and what the reference goes on with, all of it scored by the reference.

    ``tokens``: ids of both; the first ``prompt_length`` are the prompt's. Of each position but the first, in order:
    ``top_tokens`` are its own token and the likeliest ones, ``top_logprobs`` their natural log-probabilities.
    """

    index: int
    prompt_length: int
    tokens: tuple[int, ...]
    top_tokens: tuple[tuple[int, ...], ...]
    top_logprobs: tuple[tuple[float, ...], ...]

    def rows(self, top: int) -> list[dict[int, float]]:
        """By token: the ``top`` likeliest of each position but the first, and its own."""
        found = []
        for own, tokens, logprobs in zip(self.tokens[1:], self.top_tokens, self.top_logprobs, strict=True):
            row = dict(zip(tokens, logprobs, strict=True))
            kept = sorted(row, key=row.__getitem__, reverse=True)[:top]
            found.append({token: row[token] for token in (own, *kept)})
        return found


@dataclass(frozen=True, slots=True)
class ReferenceFacts:
    """``reference.json``: written once ``reference.jsonl`` is whole."""

    model: str  # as it was named
    files_sha256: str  # of its files, sampled
    dtype: str  # of its weights, as they are stored
    device: str  # CPU, or the GPU's name
    prompts: str  # where they come from
    top: int
    sequences: int
    seconds: float


@dataclass(frozen=True, slots=True)
class ComparedSequence:
    """A line of ``sequences.jsonl``: one sequence on one topology. Lists are of each position but the first.

    ``kl``: nats, at most the true one. ``shared``: the reference's probability of the tokens that both show.
    """

    index: int
    key: str  # a hash of the tokens, and of what was asked
    prompt_length: int
    kl: tuple[float, ...]
    agrees: tuple[bool, ...]
    shared: tuple[float, ...]
    reference_logprob: tuple[float, ...]  # natural, of the position's own token
    served_logprob: tuple[float, ...]
    models: tuple[str, ...] = ()  # that the answer says gave it

    def positions(self, part: Part) -> slice:
        """Of the lists: the prompt's, or those of the reference's text."""
        return slice(self.prompt_length - 1, None) if part == "text" else slice(0, self.prompt_length - 1)


@dataclass(frozen=True, slots=True)
class Figure:
    """A mean over all positions of a part. ``interval``: None of too few prompts for one."""

    value: float
    interval: Interval | None


@dataclass(frozen=True, slots=True)
class PartFigures:
    """The text of the reference, or the prompts before it, on one topology."""

    part: Part
    positions: int
    kl: Figure  # nats a token, at most the true one
    agreement: Figure  # share of positions whose likeliest token is the same
    shared: float  # the reference's probability of the tokens that were compared one by one
    reference_perplexity: float  # exp of the mean negative log-probability of the positions' own tokens
    served_perplexity: float
    perplexity_increase_pct: Figure


@dataclass(frozen=True, slots=True)
class TopologyFidelity:
    """``fidelity.json``."""

    topology: str
    route: str | None  # the way that log-probabilities of prompts came; None: the server gives none
    top: int | None  # likeliest tokens of a position that the server was asked for
    sequences: int  # to ask
    answered: int
    parts: tuple[PartFigures, ...]  # none without an answer
    unanswered: tuple[Unanswered, ...]
    note: str | None = None  # why nothing was compared
    others: OtherModels | None = None  # that answers name in place of the one that was asked

    def part(self, name: Part) -> PartFigures | None:
        return next((one for one in self.parts if one.part == name), None)


def reference_directory(run_dir: Path) -> Path:
    return run_dir / DIRECTORY


def fidelity_directory(run_dir: Path, topology: str) -> Path:
    return run_dir / DIRECTORY / topology


def read_fidelity(run_dir: Path, topology: str) -> TopologyFidelity | None:
    """None where the topology was not compared to its end. Raises UsageError: file, field, value."""
    return FIDELITY.find(fidelity_directory(run_dir, topology), TopologyFidelity)


def read_compared(directory: Path) -> tuple[ComparedSequence, ...]:
    """In the order of the file; none where there is no file yet. Raises UsageError."""
    return read_lines(directory, COMPARED, ComparedSequence)
