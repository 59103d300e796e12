"""One step's work, as the scheduler chose it."""

from __future__ import annotations

from dataclasses import dataclass, field

from trtx.torch_engine.core.media import EmbeddingShortage
from trtx.torch_engine.core.sequence import Sequence
from trtx.torch_engine.core.speculation.drafted import Drafted
from trtx.torch_engine.step import Batch


@dataclass(slots=True)
class Step:
    """One step's work; each sequence appears at most once.

    ``decodes`` compute one token and sample; they come first. ``drafted`` generate too, and verify drafted tokens.
    """

    decodes: list[Sequence] = field(default_factory=list)
    drafted: list[tuple[Sequence, Drafted]] = field(default_factory=list)
    chunks: list[tuple[Sequence, int]] = field(default_factory=list)  # (sequence, token count)
    reads: list[Sequence] = field(default_factory=list)  # admitted, and a peer has their KV
    num_loads: int = 0  # admitted, and host memory has their KV
    admitted: list[Sequence] = field(default_factory=list)
    num_generating: int = 0  # leading decodes that generate; the rest are prompts with all but the last token cached
    num_context_tokens: int = 0
    sequences: list[Sequence] = field(default_factory=list)  # decodes, then the sequences of drafts and of chunks
    ends: list[int] = field(default_factory=list)  # for each sequence: positions written after the step
    short: list[tuple[Sequence, EmbeddingShortage]] = field(
        default_factory=list
    )  # not computable: removed from waiting

    def launch(self) -> Batch:
        """Marks the step as in flight.

        Returns the runner's view, aligned with ``sequences`` and valid until the next launch.
        """
        shares = [sequence.launch(1) for sequence in self.decodes]
        shares += [sequence.launch(1, drafted) for sequence, drafted in self.drafted]
        shares += [sequence.launch(count) for sequence, count in self.chunks]
        self.ends = [sequence.num_computed for sequence in self.sequences]
        return Batch(shares)

    @property
    def generating(self) -> list[Sequence]:
        return self.decodes[: self.num_generating] + [sequence for sequence, _ in self.drafted]

    @property
    def prompts(self) -> list[Sequence]:
        return self.decodes[self.num_generating :] + [sequence for sequence, _ in self.chunks]

    @property
    def num_drafted_tokens(self) -> int:
        return sum(len(drafted.tokens) for _, drafted in self.drafted)
