"""Guided decoding in the step loop: sequences that wait for their grammar, and the masks of a step."""

from __future__ import annotations

import logging
from concurrent.futures import Future
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from trtx.torch_engine.core.grammar_errors import SHOWN_CHARACTERS
from trtx.torch_engine.core.grammar_matcher import GrammarProblem, TokenMatcher, write_masks
from trtx.torch_engine.core.grammars import GrammarCounts, Grammars
from trtx.torch_engine.core.scheduled_step import Step
from trtx.torch_engine.core.sequence import Sequence, State

if TYPE_CHECKING:
    from llguidance import LLMatcher

logger = logging.getLogger(__name__)


class GuidedDecoding:
    """Owns the compiled grammars of an engine, and the sequences that wait for one."""

    def __init__(self, grammars: Grammars, masks: npt.NDArray[np.int32]) -> None:
        """``masks``: see ``ModelRunner.masks``."""
        self._grammars = grammars
        self._masks = masks
        self._compiling: list[tuple[Sequence, Future[LLMatcher]]] = []

    @property
    def counts(self) -> GrammarCounts:
        return self._grammars.counts

    def compile(self, sequence: Sequence) -> None:
        """Makes a new sequence wait for its grammar, which another thread compiles while steps run."""
        assert sequence.sampling.grammar is not None
        sequence.state = State.COMPILING
        self._compiling.append((sequence, self._grammars.compile(sequence.sampling.grammar)))

    def take_compiled(self) -> list[tuple[Sequence, str | None]]:
        """Returns the sequences that wait no longer, each with the reason to refuse it, or None.

        A sequence without such a reason has its matcher, and its state is WAITING.
        """
        if not self._compiling:
            return []
        waiting, self._compiling = self._compiling, []
        done: list[tuple[Sequence, Future[LLMatcher]]] = []
        for one in waiting:  # ask each future once: it may be done a moment later
            (done if one[1].done() else self._compiling).append(one)
        return [
            (sequence, self._begin(sequence, compiled))
            for sequence, compiled in done
            if sequence.state is State.COMPILING  # else it was aborted
        ]

    def _begin(self, sequence: Sequence, compiled: Future[LLMatcher]) -> str | None:
        try:
            sequence.matcher = self._grammars.matcher(compiled.result(), sequence.sampling)
        except GrammarProblem as error:
            return str(error)
        except BaseException as error:  # a panic of the library is no Exception
            logger.error("sequence %d: its grammar was not compiled", sequence.sequence_id, exc_info=error)
            return f"the grammar could not be compiled: {type(error).__name__}: {str(error)[:SHOWN_CHARACTERS]}"
        sequence.state = State.WAITING
        return None

    def limit(self, step: Step) -> tuple[list[int], int]:
        """Writes the tokens that the grammars of a step's sequences allow.

        Returns the slots of these sequences, and the number of masks of each: one more than the longest draft has
        tokens. The device computes the step's forward meanwhile. Sequences that have ended since the launch are not
        limited.
        """
        limited = [
            (sequence.slot, sequence.matcher, sequence.drafted.matchers if sequence.drafted is not None else [])
            for sequence in step.sequences
            if sequence.matcher is not None
            and sequence.state is State.RUNNING
            and sequence.held is not None
            and sequence.held.samples
        ]
        per_slot = 1 + max((len(later) for _, _, later in limited), default=0)
        matchers = {
            index * per_slot + place: matcher
            for index, (_, first, later) in enumerate(limited)
            for place, matcher in enumerate((first, *later))
        }
        write_masks(self._grammars.executor, matchers, self._masks)
        for index, (_, matcher, _) in enumerate(limited):
            if matcher.is_exhausted:
                self._renew(matcher, index * per_slot)
        return [slot for slot, _, _ in limited], per_slot

    def _renew(self, matcher: TokenMatcher, row: int) -> None:
        """Gives a sequence a new grammar if its own is exhausted, by this sequence or by others that share it."""
        try:
            matcher.restart(self._grammars.renewed(matcher.grammar, matcher.source))
        except GrammarProblem as error:
            matcher.problem = str(error)
            return
        if not matcher.is_exhausted:
            write_masks(self._grammars.executor, {row: matcher}, self._masks)

    def close(self) -> None:
        self._grammars.close()


def grammar_problem(sequence: Sequence) -> str | None:
    """Returns why a guided sequence can't go on after a step, as a consequence of its request; None if it can."""
    matcher = sequence.matcher
    return matcher.problem or None if matcher is not None else None
