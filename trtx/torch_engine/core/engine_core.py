"""The step loop: one iteration of the engine, and the checks that refuse a request."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import msgspec
import psutil

from trtx.torch_engine.core.admission import Admission
from trtx.torch_engine.core.block_pool import BlockPool
from trtx.torch_engine.core.grammars import Grammars
from trtx.torch_engine.core.guided import GuidedDecoding, grammar_problem
from trtx.torch_engine.core.handoffs import LEASE_POLL_S, Handoffs
from trtx.torch_engine.core.kv_events import KvEventLog
from trtx.torch_engine.core.layer_groups import LayerGroups
from trtx.torch_engine.core.matcher import GrammarProblem
from trtx.torch_engine.core.media import EmbeddingShortage
from trtx.torch_engine.core.scheduler import Scheduler, SchedulerLimits, Step
from trtx.torch_engine.core.sequence import Sequence, State
from trtx.torch_engine.core.stats import iteration_stats, since_the_step
from trtx.torch_engine.handoff import KvTransport
from trtx.torch_engine.messages import Handoff, HandoffStats, KvTransfer, StepReport, Submit, Update
from trtx.torch_engine.step import LaunchedStep, ModelRunner

logger = logging.getLogger(__name__)

MEMORY_REPORT_S = 2.0
"""Interval of memory measurements while the engine works: one costs more than a step's bookkeeping."""


@dataclass(frozen=True, slots=True)
class _UnderWay:
    """A step in flight: launched on the runner, not committed."""

    step: Step
    launched: LaunchedStep
    is_guided: bool  # samples only once the tokens that its grammars allow are known
    began: float  # when it was scheduled; same clock as Sequence.arrived_s


class EngineCore:
    """Drives scheduler, pool, runner and transport one step at a time, in a single thread.

    With overlap, the core schedules and launches the next step while the device still computes the current one, and
    commits the current one after that. Bookkeeping and reports then cost no device time. If a sampled token ends a
    sequence, the sequence is still in the next step, whose result for it is dropped; a sequence that ends by length is
    not. The tokens are the same as without overlap.

    A sequence of ``max_seq_len`` tokens (prompt and output) always fits into an empty pool, so every accepted request
    can run. An error in one sequence ends only that sequence. An exception from the runner can't be attributed to a
    sequence and leaves the device in an unknown state, so it ends the engine.
    """

    def __init__(
        self,
        runner: ModelRunner,
        limits: SchedulerLimits,
        *,
        max_seq_len: int | None = None,
        enable_block_reuse: bool = True,
        event_buffer_max_size: int = 0,
        enable_iter_perf_stats: bool = False,
        disable_overlap_scheduler: bool = False,
        transport: KvTransport | None = None,
        kv_transfer_timeout_s: float = 60.0,
        grammars: Grammars | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        geometry = runner.geometry  # a token takes room in one block of each KV cache group
        size, num_blocks = geometry.tokens_per_block, runner.num_blocks // len(geometry.groups)
        bounds = {"max_seq_len": max_seq_len, "model": runner.max_position, "KV pool": num_blocks * size}
        self.max_seq_len, bound_by = min((value, name) for name, value in bounds.items() if value is not None)
        self._events: KvEventLog | None = None
        if event_buffer_max_size and enable_block_reuse:
            self._events = KvEventLog(event_buffer_max_size, num_blocks=num_blocks, window_size=self.max_seq_len)
        pool = BlockPool(runner.num_blocks, size, enable_reuse=enable_block_reuse, events=self._events)
        self.scheduler = Scheduler(pool, limits, LayerGroups(pool, geometry.windows))
        self.runner = runner
        self._admission = Admission(
            runner, limits, max_seq_len=self.max_seq_len, bound_by=bound_by, has_transport=transport is not None
        )
        self._handoffs = (
            Handoffs(transport, self.scheduler, timeout_s=kv_transfer_timeout_s, clock=clock)
            if transport is not None
            else None
        )
        self._guided: GuidedDecoding | None = None
        if grammars is not None:
            assert runner.masks is not None
            self._guided = GuidedDecoding(grammars, runner.masks)
        self._with_stats = enable_iter_perf_stats
        self._sequences: dict[int, Sequence] = {}  # accepted, and not ended for the client
        self._updates: list[Update] = []
        self._stats: dict[str, Any] | None = None  # of the last committed step
        self._reported_stats: dict[str, Any] | None = None
        self._reported_handoff = HandoffStats()
        self._process = psutil.Process()
        self._measure_memory()
        self._arrivals = 0
        self._iteration = 0
        self._is_stalled = False
        self._overlaps = not disable_overlap_scheduler
        self._under_way: _UnderWay | None = None
        self._committed_at = 0.0  # same clock as Sequence.arrived_s

    # --- step ---

    def step(self) -> StepReport | None:
        """Schedules and launches a step, then commits the previous one (without overlap: the same one).

        Returns what changed, or None if nothing did.
        """
        if self._handoffs is not None:
            self._handoffs.collect()
            self._end_short(self._handoffs.take_short())
        if self._guided is not None:
            self._take_compiled(self._guided)
        done = self._iteration
        if self._under_way is not None and self.scheduler.must_preempt:
            self._commit(self._under_way)
            self._under_way = None
        before, self._under_way = self._under_way, self._launch()
        if self._under_way is not None and self._under_way.is_guided:
            if before is not None:
                self._commit(before)
                before, self._is_stalled = None, False
            assert self._guided is not None
            self._guided.sample(self._under_way.step, self._under_way.launched)
        if not self._overlaps:
            before, self._under_way = self._under_way, None
        if before is not None:
            self._commit(before)
            self._is_stalled = False
        return self._report(has_computed=self._iteration > done)

    def _launch(self) -> _UnderWay | None:
        """Schedules and launches the next step; returns None if there is nothing to compute."""
        began = time.perf_counter()
        step = self.scheduler.schedule()
        for sequence in step.reads:
            self._begin_read(sequence)
        if step.short:
            self._end_short(step.short)
        self._is_stalled = not (step.sequences or step.reads or step.short)
        if not step.sequences:
            return None
        batch = step.launch()
        return _UnderWay(step, self.runner.launch(batch), batch.is_guided, began)

    def _commit(self, under_way: _UnderWay) -> None:
        """Waits for a step in flight and applies its results to its sequences."""
        step, scheduler, updates = under_way.step, self.scheduler, self._updates
        results = under_way.launched.results()
        size = scheduler.pool.tokens_per_block
        num_completed = num_emitted = 0
        for sequence, end, sampled in zip(step.sequences, step.ends, results, strict=True):
            if not scheduler.settle(sequence):
                continue
            if (problem := grammar_problem(sequence)) is not None:
                num_completed += 1
                self._end(sequence, Update(sequence.sequence_id, [], error=problem))
                continue
            if sampled.error is not None:
                num_completed += 1
                self._fail(sequence, sampled.error)
                continue
            try:
                update = sequence.advance(sampled, end)
                if end // size > sequence.num_registered:
                    scheduler.groups.settle_blocks(sequence)
            except GrammarProblem as error:
                num_completed += 1
                self._end(sequence, Update(sequence.sequence_id, [], error=str(error)))
                continue
            except Exception as error:
                num_completed += 1
                self._fail(sequence, _unexpected(sequence.sequence_id, error))
                continue
            if update is None:
                continue
            update.transfer, sequence.transfer = sequence.transfer, None
            updates.append(update)
            num_emitted += len(update.token_ids)
            if update.finish_reason is not None:
                num_completed += 1
                self._finish(sequence, update)
        self._iteration += 1
        began, self._committed_at = max(under_way.began, self._committed_at), time.perf_counter()
        if self._with_stats:
            self._stats = iteration_stats(
                scheduler,
                step,
                iteration=self._iteration,
                began=began,
                ended=self._committed_at,
                num_completed=num_completed,
                num_emitted=num_emitted,
                cpu_memory_bytes=self._cpu_memory_bytes,
                device_memory_bytes=self._device_memory_bytes,
            )

    def _fail(self, sequence: Sequence, problem: str) -> None:
        """Ends a running sequence with an error that its request did not cause.

        Its KV blocks become unfindable, since they may be the cause.
        """
        self.scheduler.groups.forget(sequence)
        self._end(sequence, Update(sequence.sequence_id, [], error=problem, is_failure=True))

    def _end_short(self, short: list[tuple[Sequence, EmbeddingShortage]]) -> None:
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
            self._end(sequence, update)

    def _finish(self, sequence: Sequence, update: Update) -> None:
        del self._sequences[sequence.sequence_id]
        if not sequence.is_context_only:
            self.scheduler.finish(sequence)
            return
        asked = sequence.handoff
        assert asked is not None and self._handoffs is not None
        opaque_state = None
        if update.finish_reason == "length":
            opaque_state = self._handoffs.lease(sequence)
        else:  # the first token ended the sequence: nothing to decode, so no lease
            self.scheduler.finish(sequence)
        update.handoff = Handoff(
            "context_only",
            first_gen_tokens=list(sequence.output_token_ids),
            first_gen_log_probs=update.logprobs,
            ctx_request_id=sequence.sequence_id,
            disagg_request_id=asked.disagg_request_id,
            opaque_state=opaque_state,
            media=sequence.media or None,
        )

    def _report(self, *, has_computed: bool) -> StepReport | None:
        updates, self._updates = self._updates, []
        stats, self._stats = self._stats, None
        if stats is None and self._reported_stats is not None and self._under_way is None:
            stats = since_the_step(self._reported_stats, self.scheduler)
        self._reported_stats = stats or self._reported_stats
        events = self._events.take() if self._events is not None else None
        handoff_stats = None
        if self._handoffs is not None and self._handoffs.stats != self._reported_handoff:
            handoff_stats = self._reported_handoff = msgspec.structs.replace(self._handoffs.stats)
        memory = None
        if has_computed and time.monotonic() - self._memory_at > MEMORY_REPORT_S:
            self._measure_memory()
            memory = self._device_memory_bytes
        if updates or stats or events or handoff_stats is not None or memory is not None:
            return StepReport(updates, stats, events or None, handoff_stats, memory)
        return None

    def _measure_memory(self) -> None:
        self._memory_at = time.monotonic()
        self._cpu_memory_bytes: int = self._process.memory_info().rss
        self._device_memory_bytes = self.runner.device_memory_bytes()

    @property
    def wait_s(self) -> float | None:
        """Seconds that the loop may wait for messages before the next step; None: until a message arrives."""
        if self._updates or self._under_way is not None:
            return 0.0
        waits = self._handoffs.wait_s if self._handoffs is not None else None
        if not self.scheduler.running and not self.scheduler.waiting:
            return waits
        # Stalled: the next step needs blocks that leases or reads hold, and those end by themselves.
        return 0.0 if not self._is_stalled else LEASE_POLL_S if waits is None else waits

    # --- requests ---

    def submit(self, submit: Submit) -> None:
        """Accepts one sequence. An invalid one gets an error update and affects no other sequence."""
        try:
            self._accept(submit)
        except Exception as error:
            problem = _unexpected(submit.sequence_id, error)
            self._updates.append(Update(submit.sequence_id, [], error=problem, is_failure=True))

    def _accept(self, submit: Submit) -> None:
        sequence = Sequence.from_submit(
            submit,
            arrival=self._arrivals,
            arrived_s=time.perf_counter(),
            max_seq_len=self.max_seq_len,
            vocab_size=self.runner.vocab_size,
        )
        self._arrivals += 1
        if (problem := self._admission.problem(sequence)) is not None:
            self._refuse(sequence, problem)
            return
        if self._guided is not None and sequence.sampling.grammar is not None:
            self._sequences[sequence.sequence_id] = sequence
            self.scheduler.hold_media(sequence)
            self._guided.compile(sequence)
        else:
            self._admit(sequence)

    def _take_compiled(self, guided: GuidedDecoding) -> None:
        for sequence, problem in guided.take_compiled():
            del self._sequences[sequence.sequence_id]
            if problem is not None:
                self._refuse(sequence, problem)
                continue
            try:
                self._admit(sequence)
            except GrammarProblem as error:  # of the prefill side's tokens
                self._refuse(sequence, str(error))

    def _admit(self, sequence: Sequence) -> None:
        """Gives a sequence to the scheduler, unless the prefill side's tokens are all that it wants."""
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
        self._sequences[sequence.sequence_id] = sequence
        self.scheduler.add(sequence)

    def abort(self, sequence_ids: Iterable[int]) -> None:
        """Ends sequences in any state with finish reason ``cancelled``.

        Unknown ids, whose sequences have ended, are ignored.
        """
        for sequence_id in sequence_ids:
            sequence = self._sequences.get(sequence_id)
            if sequence is None:
                continue
            update = Update(sequence_id, [], finish_reason="cancelled")
            if sequence.state is State.READING:
                # The transport still writes to its blocks: collect() frees them once it reports the end of the read.
                del self._sequences[sequence_id]
                sequence.is_cancelled = True
                self._updates.append(update)
                continue
            if sequence.state in (State.WAITING, State.COMPILING):
                self._release_peer(sequence)
            self._end(sequence, update)

    def _begin_read(self, sequence: Sequence) -> None:
        assert self._handoffs is not None
        is_failure = False
        try:
            problem = self._handoffs.begin_read(sequence)
        except Exception as error:  # opaque_state comes from a peer or a client and may hold anything
            problem, is_failure = _unexpected(sequence.sequence_id, error), True
        if problem is not None:
            self._release_peer(sequence)
            self._end(sequence, Update(sequence.sequence_id, [], error=problem, is_failure=is_failure))
        elif sequence.first_gen_update is not None:
            self._updates.append(sequence.first_gen_update)
            sequence.first_gen_update = None
        self._end_short(self._handoffs.take_short())

    def _end(self, sequence: Sequence, update: Update) -> None:
        del self._sequences[sequence.sequence_id]
        if sequence.state is not State.FINISHED:
            self.scheduler.finish(sequence)
        self._updates.append(update)

    def _refuse(self, sequence: Sequence, problem: str) -> None:
        self._release_peer(sequence)
        self._updates.append(Update(sequence.sequence_id, [], error=problem))

    def _release_peer(self, sequence: Sequence) -> None:
        if self._handoffs is not None:
            self._handoffs.refuse(sequence)

    # --- invariants and end ---

    def check(self) -> None:
        """Raises AssertionError unless every invariant of pool, slots and leases holds. Slow: for tests only."""
        self.scheduler.check(self._handoffs.leased if self._handoffs is not None else None)

    def close(self) -> None:
        if self._handoffs is not None:
            self._handoffs.close()
        if self._guided is not None:
            self._guided.close()
        self.runner.close()


def _unexpected(sequence_id: int, error: Exception) -> str:
    logger.error("sequence %d ends with an internal error of the engine", sequence_id, exc_info=error)
    return f"the engine could not serve this request: {type(error).__name__}: {str(error)[:500]}; its log has the rest"
