"""The sequences that are open for their clients: how each one arrives, waits, and ends."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from collections.abc import Sequence as SequenceOf

from trtx.torch_engine.core.admission import Admission
from trtx.torch_engine.core.grammar_matcher import GrammarProblem
from trtx.torch_engine.core.guided import GuidedDecoding
from trtx.torch_engine.core.handoffs import Handoffs
from trtx.torch_engine.core.host_tier import HostLoad
from trtx.torch_engine.core.logits_processors import LoadedProcessors
from trtx.torch_engine.core.media import EmbeddingShortage
from trtx.torch_engine.core.scheduler import Scheduler
from trtx.torch_engine.core.sequence import Sequence, State
from trtx.torch_engine.messages import Handoff, KvTransfer, Submit, Update

logger = logging.getLogger(__name__)


class OpenSequences:
    """Accepts, refuses, aborts and ends sequences. An error in one sequence ends only that sequence.

    Every sequence passes through here once in each direction: from its ``Submit`` to the scheduler, perhaps after a
    wait for its grammar or for the prompt that it shares with another choice, and from its last step to its last
    ``Update``.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        admission: Admission,
        handoffs: Handoffs | None,
        guided: GuidedDecoding | None,
        new_sequence: Callable[[Submit, int], Sequence],
    ) -> None:
        """``new_sequence``: makes a sequence from a request and its arrival number."""
        self._scheduler = scheduler
        self._admission = admission
        self._handoffs = handoffs
        self._guided = guided
        self._new_sequence = new_sequence
        self._open: dict[int, Sequence] = {}  # accepted, and not ended for the client
        self._followers: list[Sequence] = []  # open, and waiting for the prompt of another choice
        self._updates: list[Update] = []
        self._arrivals = 0

    @property
    def num_open(self) -> int:
        return len(self._open)

    @property
    def has_updates(self) -> bool:
        return bool(self._updates)

    def take_updates(self) -> list[Update]:
        updates, self._updates = self._updates, []
        return updates

    # --- arrival ---

    def submit(self, submit: Submit, processors: LoadedProcessors) -> None:
        """Accepts one sequence. An invalid one gets an error update and affects no other sequence."""
        try:
            self._accept(submit, processors)
        except Exception as error:
            problem = _unexpected(submit.sequence_id, error)
            self._updates.append(Update(submit.sequence_id, [], error=problem, is_failure=True))

    def _accept(self, submit: Submit, processors: LoadedProcessors) -> None:
        sequence = self._new_sequence(submit, self._arrivals)
        sequence.processors = processors.hooks
        self._arrivals += 1
        problem = processors.problem or self._admission.problem(sequence)
        if problem is not None:
            self._refuse(sequence, problem)
            return
        if self._guided is not None and sequence.sampling.grammar is not None:
            self._open[sequence.sequence_id] = sequence
            self._scheduler.hold_media(sequence)
            self._guided.compile(sequence)
        else:
            self._enqueue(sequence)

    def take_compiled(self) -> None:
        """Continues the sequences whose grammars were compiled, and refuses those whose grammars can't be compiled."""
        if self._guided is None:
            return
        for sequence, problem in self._guided.take_compiled():
            del self._open[sequence.sequence_id]
            if problem is not None:
                self._refuse(sequence, problem)
                continue
            try:
                self._enqueue(sequence)
            except GrammarProblem as error:  # of the prefill side's tokens
                self._refuse(sequence, str(error))

    def _enqueue(self, sequence: Sequence) -> None:
        """Gives a sequence to the scheduler, unless the prefill side's tokens already complete it."""
        if sequence.emits_first_gen_tokens:
            update = sequence.accept_first_gen_tokens()
            if update.finish_reason is not None:
                if sequence.wants_read:
                    update.transfer = KvTransfer()  # the prefill side's tokens were all that it requested
                self._release_peer(sequence)
                self._updates.append(update)
                return
            if not sequence.wants_read:
                self._updates.append(update)
        self._open[sequence.sequence_id] = sequence
        if self._must_follow(sequence):
            sequence.state = State.FOLLOWING
            self._scheduler.hold_media(sequence)
            self._followers.append(sequence)
        else:
            self._scheduler.add(sequence)

    def _must_follow(self, sequence: Sequence) -> bool:
        """Whether another choice of the same request still computes blocks that this sequence can share."""
        if sequence.follows is None or (leader := self._open.get(sequence.follows)) is None:
            return False
        shared = self._scheduler.prefixes.shareable_tokens(sequence)
        return leader.num_written < shared

    def take_followers(self) -> None:
        """Gives the scheduler those sequences whose prompt is in the prefix cache by now or will never be there."""
        if not self._followers:
            return
        waiting, self._followers = self._followers, []
        for sequence in waiting:
            if sequence.state is not State.FOLLOWING:
                continue  # it was aborted
            if self._must_follow(sequence):
                self._followers.append(sequence)
            else:
                sequence.state = State.WAITING
                self._scheduler.add(sequence)

    # --- end ---

    def abort(self, sequence_ids: Iterable[int]) -> None:
        """Ends sequences in any state with finish reason ``cancelled``.

        Unknown ids, whose sequences have ended, are ignored.
        """
        for sequence_id in sequence_ids:
            sequence = self._open.get(sequence_id)
            if sequence is None:
                continue
            update = Update(sequence_id, [], finish_reason="cancelled")
            if sequence.state is State.READING:
                # The transport or the host tier still writes to its blocks, which are free at the end of the read.
                del self._open[sequence_id]
                sequence.is_cancelled = True
                self._updates.append(update)
                continue
            if sequence.state in (State.WAITING, State.COMPILING, State.FOLLOWING):
                self._release_peer(sequence)
            self.end(sequence, update)

    def advance(self, sequence: Sequence, update: Update) -> None:
        """Reports what a step changed for a sequence; ends it if the update has a finish reason."""
        update.transfer, sequence.transfer = sequence.transfer, None
        self._updates.append(update)
        if update.finish_reason is not None:
            self._finish(sequence, update)

    def _finish(self, sequence: Sequence, update: Update) -> None:
        del self._open[sequence.sequence_id]
        if not sequence.is_context_only:
            self._scheduler.finish(sequence)
            return
        asked = sequence.handoff
        assert asked is not None and self._handoffs is not None
        opaque_state = None
        if update.finish_reason == "length":
            opaque_state = self._handoffs.lease(sequence)
        else:  # the first token ended the sequence: nothing to decode, so no lease
            self._scheduler.finish(sequence)
        update.handoff = Handoff(
            "context_only",
            first_gen_tokens=list(sequence.output_token_ids),
            first_gen_log_probs=update.logprobs,
            ctx_request_id=sequence.sequence_id,
            disagg_request_id=asked.disagg_request_id,
            opaque_state=opaque_state,
            media=sequence.media or None,
        )

    def begin_read(self, sequence: Sequence) -> None:
        """Starts the read of a peer's KV, or ends the sequence if it can't start."""
        assert self._handoffs is not None
        is_failure = False
        try:
            problem = self._handoffs.begin_read(sequence)
        except Exception as error:  # opaque_state comes from a peer or a client and may hold anything
            problem, is_failure = _unexpected(sequence.sequence_id, error), True
        if problem is not None:
            self._release_peer(sequence)
            self.end(sequence, Update(sequence.sequence_id, [], error=problem, is_failure=is_failure))
        elif sequence.first_gen_update is not None:
            self._updates.append(sequence.first_gen_update)
            sequence.first_gen_update = None
        self.end_short(self._handoffs.take_short())

    def end_load(self, load: HostLoad) -> None:
        """Continues a sequence whose KV has come from host memory, or which has to compute it instead."""
        sequence = load.sequence
        if sequence.is_cancelled:
            self._scheduler.finish(sequence)
        elif load.is_abandoned:
            self._scheduler.give_up_read(sequence)
        else:
            self._scheduler.end_read(sequence, load.num_tokens)

    def end(self, sequence: Sequence, update: Update) -> None:
        """Ends a sequence with ``update`` as its last one."""
        del self._open[sequence.sequence_id]
        if sequence.state is not State.FINISHED:
            self._scheduler.finish(sequence)
        self._updates.append(update)

    def fail(self, sequence: Sequence, problem: str | Exception) -> None:
        """Ends a running sequence with an error of its logits, or of the engine.

        Its KV blocks become unfindable, since they may be the cause. A request with logits processors may have caused
        it itself, and gets the error as its own.
        """
        is_failure = isinstance(problem, Exception) or not sequence.is_processed
        text = _unexpected(sequence.sequence_id, problem) if isinstance(problem, Exception) else problem
        self._scheduler.groups.forget(sequence)
        self.end(sequence, Update(sequence.sequence_id, [], error=text, is_failure=is_failure))

    def end_short(self, short: SequenceOf[tuple[Sequence, EmbeddingShortage]]) -> None:
        """Ends sequences that lack media embeddings, with any blocks that they hold."""
        for sequence, shortage in short:
            missing = list(shortage.missing)
            update = Update(
                sequence.sequence_id,
                [],
                error=shortage.text,
                is_failure=shortage.is_failure,
                media_needed=missing or None,
            )
            self.end(sequence, update)

    def _refuse(self, sequence: Sequence, problem: str) -> None:
        self._release_peer(sequence)
        self._updates.append(Update(sequence.sequence_id, [], error=problem))

    def _release_peer(self, sequence: Sequence) -> None:
        if self._handoffs is not None:
            self._handoffs.refuse(sequence)


def _unexpected(sequence_id: int, error: Exception) -> str:
    logger.error("sequence %d ends with an internal error of the engine", sequence_id, exc_info=error)
    return f"the engine could not serve this request: {type(error).__name__}: {str(error)[:500]}; its log has the rest"
