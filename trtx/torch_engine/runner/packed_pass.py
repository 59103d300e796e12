"""The host's layout of a mixed batch: optional decodes, then prompt chunks, packed one after the other."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from trtx.torch_engine.runner.kernels import Spans, int32
from trtx.torch_engine.step import ScheduledSequence


@dataclass(slots=True, eq=False)
class PackedPass:
    """The first ``num_decodes`` of ``sequences`` are decodes, with one token each."""

    sequences: list[ScheduledSequence]
    num_decodes: int
    tokens: list[int] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)
    slots: list[int] = field(default_factory=list)
    ends: list[int] = field(default_factory=list)  # for each sequence: its end in the packed batch
    media: list[tuple[int, Tensor]] = field(default_factory=list)  # see PassInputs.media

    def __post_init__(self) -> None:
        for sequence in self.sequences:
            length = len(sequence.new_token_ids)
            for part in sequence.embeddings:
                rows = part.embedding.tensor[part.first : part.first + part.count]
                self.media.append((len(self.tokens) + part.offset, rows))
            self.tokens += sequence.new_token_ids
            self.positions += range(sequence.start, sequence.start + length)
            self.slots += [sequence.slot] * length
            self.ends.append(len(self.tokens))

    @property
    def firsts(self) -> list[int]:
        """For each sequence: index in the packed batch of the first token after which the model samples.

        This is the sequence's last new token that is not drafted.
        """
        return [end - 1 - sequence.num_drafts for sequence, end in zip(self.sequences, self.ends, strict=True)]

    @property
    def has_drafts(self) -> bool:
        return any(sequence.num_drafts for sequence in self.chunks)

    @property
    def needs_all(self) -> bool:
        """Whether hidden states of all tokens are requested."""
        return any(sequence.sampling.prompt_logprobs is not None for sequence in self.chunks)

    @property
    def wanted(self) -> list[int]:
        """Indices of the tokens whose hidden states are requested."""
        if self.needs_all:
            return list(range(len(self.tokens)))
        return [
            first + place
            for sequence, first in zip(self.sequences, self.firsts, strict=True)
            for place in range(1 + sequence.num_drafts)
        ]

    @property
    def chunks(self) -> list[ScheduledSequence]:
        return self.sequences[self.num_decodes :]

    @property
    def chunk_starts(self) -> list[int]:
        """Start of each chunk in the packed batch, and the end of the last one."""
        return [0, *self.ends][self.num_decodes :]

    def spans(self, device: torch.device) -> Spans:
        """Returns the chunks as variable-length sequences on ``device``."""
        chunks = self.chunks
        return Spans(
            slots=int32([sequence.slot for sequence in chunks], device),
            starts=int32(self.chunk_starts, device),
            contexts=int32([sequence.start for sequence in chunks], device),
            max_length=max(len(sequence.new_token_ids) for sequence in chunks),
            max_context=max(sequence.start for sequence in chunks),
        )
