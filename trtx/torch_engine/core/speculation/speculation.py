"""Speculation in the step loop: drafts for the scheduler, and statistics of their acceptance."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field

from trtx.torch_engine.core.sequence import Sequence
from trtx.torch_engine.core.speculation.accepting import accept_drafted
from trtx.torch_engine.core.speculation.drafted import Drafted
from trtx.torch_engine.core.speculation.drafters import Draft
from trtx.torch_engine.core.speculation.lengths import DraftLengths
from trtx.torch_engine.core.speculation.sources import DraftSource
from trtx.torch_engine.messages import Update
from trtx.torch_engine.step import Sampled

_PROBED = 2  # the token in flight, and one after it


@dataclass(slots=True)
class SpeculationCounts:
    """``drafted`` and ``accepted`` count tokens by their position in a draft. ``drafts``: sequences with a draft."""

    drafts: int = 0
    drafted: list[int] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)
    drafting_s: float = 0.0

    def add(self, drafted: int, accepted: int) -> None:
        missing = drafted - len(self.drafted)
        self.drafted += [0] * missing
        self.accepted += [0] * missing
        self.drafts += 1
        for place in range(drafted):
            self.drafted[place] += 1
            self.accepted[place] += place < accepted

    @property
    def acceptance_length(self) -> float | None:
        """Mean number of tokens that a sequence with a draft gained in a step; None without drafts."""
        return (sum(self.accepted) + self.drafts) / self.drafts if self.drafts else None


class Speculation:
    """Chooses the sequences that get drafts. Called by the step loop's thread, between steps.

    A draft continues known tokens. So a sequence gets one only if no step in flight computes it, and a step with drafts
    is committed before the next one is scheduled.
    """

    def __init__(self, source: DraftSource, lengths: DraftLengths, *, is_asynchronous: bool) -> None:
        """``is_asynchronous``: whether the runner computes while the host goes on. If not, waiting for the step in
        flight costs nothing.
        """
        self._source = source
        self.draft_kv = source.kv
        self._lengths = lengths
        self._is_asynchronous = is_asynchronous
        self.counts = SpeculationCounts()
        """Of the steps since the last :meth:`take_counts`."""

    def take_counts(self) -> SpeculationCounts:
        counts, self.counts = self.counts, SpeculationCounts()
        return counts

    def wants_tokens(self, running: Iterable[Sequence]) -> bool:
        """Whether to commit the step in flight before the next one is scheduled, because drafts would probably pay.

        The token in flight is not known yet, so this decides by drafts that continue the tokens before it, without
        their first token. On an asynchronous runner, committing early costs the overlap of one step.
        """
        decodes = [one for one in running if one.num_uncomputed == 1 and not one.is_complete]
        limit = self._lengths.limit(len(decodes))
        able = [one for one in decodes if limit and _may_draft(one)]
        if not able or not self._is_asynchronous:
            return bool(able)
        if not self._lengths.may_pay(len(decodes)):
            return False
        began = time.perf_counter()
        probes = self._source.outlook(able, [_PROBED] * len(able))
        later = [Draft(probe.tokens[1:], probe.strength) for probe in probes]
        wants = any(self._lengths.choose(len(decodes), later))
        self.counts.drafting_s += time.perf_counter() - began
        return wants

    def draft(
        self, decodes: SequenceOf[Sequence], most_tokens: int, room_for: Callable[[Sequence, int], int]
    ) -> list[tuple[Sequence, Drafted]]:
        """Returns the sequences among ``decodes`` that get drafts, with at most ``most_tokens`` drafted tokens in all.

        ``room_for`` allocates blocks for a number of drafted tokens, and returns the number that fits.
        """
        limit = self._lengths.limit(len(decodes))
        if not limit or not self._lengths.may_pay(len(decodes)):
            return []
        began = time.perf_counter()
        outlook = self._source.outlook(decodes, [min(limit, _most_tokens(one)) for one in decodes])
        lengths = self._lengths.choose(len(decodes), outlook)
        chosen: list[tuple[Sequence, Draft, int]] = []
        for sequence, draft, length in zip(decodes, outlook, lengths, strict=True):
            if (length := min(length, most_tokens)) and (length := room_for(sequence, length)):
                chosen.append((sequence, draft, length))
                most_tokens -= length
        drafts: list[tuple[Sequence, Drafted]] = []
        cut: list[Draft] = []
        for (sequence, draft, _), tokens in zip(chosen, self._source.draft(chosen) if chosen else (), strict=True):
            drafted, has_tokens = Drafted(draft, tokens), bool(tokens)
            drafted.cut(_first_end(drafted.tokens, sequence))
            if sequence.matcher is not None:
                drafted.follow(sequence.matcher)
            if drafted.tokens:
                drafts.append((sequence, drafted))
            elif has_tokens:
                cut.append(draft)
        if cut and not drafts:
            self._lengths.wasted(cut)
        self.counts.drafting_s += time.perf_counter() - began
        return drafts

    def commit(self, sequence: Sequence, drafted: Drafted, sampled: Sampled) -> Update:
        """Applies a step with ``drafted`` to its sequence, and counts what was accepted."""
        update, num_accepted = accept_drafted(sequence, sampled)
        self.counts.add(len(drafted.tokens), num_accepted)
        self._source.verified(sequence, len(drafted.tokens), num_accepted)
        self._lengths.verified(drafted.draft, len(drafted.tokens), num_accepted)
        return update

    def stepped(self, batch: int, drafted: int, seconds: float) -> None:
        """See :meth:`DraftLengths.stepped`."""
        self._lengths.stepped(batch, drafted, seconds)


def _may_draft(sequence: Sequence) -> bool:
    """Whether drafts suit a sequence: not with logits processors, which see one row of logits in each step."""
    return not sequence.is_processed and sequence.most_tokens - sequence.num_tokens > 1


def _most_tokens(sequence: Sequence) -> int:
    """The longest draft that a sequence can use now.

    A step also samples the token after the last drafted one, and that must not exceed ``max_tokens``. A step bans the
    same ids in all of its rows, and the end ids are banned only before ``min_tokens``, so a draft ends there. A guided
    sequence decodes token by token until ``min_tokens``: if its grammar completes the text before that, the sequence
    must end with an error after exactly the tokens before.
    """
    if not _may_draft(sequence) or sequence.num_steps:
        return 0
    most = sequence.most_tokens - sequence.num_tokens - 1
    before_min = sequence.min_tokens - len(sequence.output_token_ids)
    if before_min > 0:
        most = 0 if sequence.matcher is not None else min(most, before_min - 1)
    return most


def _first_end(tokens: list[int], sequence: Sequence) -> int:
    """Index of the first token that would end the sequence. Tokens after it are not needed."""
    ends = (at for at, token in enumerate(tokens) if token in sequence.end_ids or token in sequence.stop_ids)
    return next(ends, len(tokens))
