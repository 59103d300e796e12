"""The step loop: one iteration of the engine, and the checks that refuse a request."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import msgspec
import psutil

from trtx.torch_engine.block_copies import BlockCopies
from trtx.torch_engine.core.admission import Admission
from trtx.torch_engine.core.block_pool import BlockPool
from trtx.torch_engine.core.grammar_matcher import GrammarProblem
from trtx.torch_engine.core.grammars import Grammars
from trtx.torch_engine.core.guided import GuidedDecoding, grammar_problem
from trtx.torch_engine.core.handoffs import LEASE_POLL_S, Handoffs
from trtx.torch_engine.core.host_tier import HostTier
from trtx.torch_engine.core.kv_cache_groups import LayerGroups
from trtx.torch_engine.core.kv_events import KvEventLog
from trtx.torch_engine.core.logits_processors import Hook, LoadedProcessors, LogitsProcessors, load_processors
from trtx.torch_engine.core.open_sequences import OpenSequences
from trtx.torch_engine.core.scheduled_step import Step
from trtx.torch_engine.core.scheduler import Scheduler
from trtx.torch_engine.core.scheduler_limits import SchedulerLimits
from trtx.torch_engine.core.sequence import Sequence
from trtx.torch_engine.core.speculation.speculation import Speculation
from trtx.torch_engine.core.stats import iteration_stats, since_the_step
from trtx.torch_engine.handoff import KvTransport
from trtx.torch_engine.messages import HandoffStats, StepReport, Submit, Update
from trtx.torch_engine.step import LaunchedStep, ModelRunner

MEMORY_REPORT_S = 2.0
"""Interval of memory measurements while the engine works: one costs more than a step's bookkeeping."""


@dataclass(frozen=True, slots=True)
class _UnderWay:
    """A step in flight: launched on the runner, not committed."""

    step: Step
    launched: LaunchedStep
    must_sample: bool  # samples only once the step before it is committed
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
        batched_processor: Hook | None = None,
        speculation: Speculation | None = None,
        host_copies: BlockCopies | None = None,
        secondary_offload_min_priority: int | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        geometry = runner.geometry  # a token takes room in one block of each KV cache group
        size, num_blocks = geometry.tokens_per_block, runner.num_blocks // len(geometry.groups)
        bounds = {"max_seq_len": max_seq_len, "model": runner.max_position, "KV pool": num_blocks * size}
        self.max_seq_len, bound_by = min((value, name) for name, value in bounds.items() if value is not None)
        self._events: KvEventLog | None = None
        if event_buffer_max_size and enable_block_reuse:
            self._events = KvEventLog(
                event_buffer_max_size,
                num_blocks=num_blocks,
                window_size=self.max_seq_len,
                num_host_blocks=host_copies.num_blocks // len(geometry.groups) if host_copies is not None else 0,
            )
        self._draft_kv = speculation.draft_kv if speculation is not None else None
        pool = BlockPool(runner.num_blocks, size, enable_reuse=enable_block_reuse, events=self._events)
        self.tier = (
            HostTier(
                pool,
                host_copies,
                min_priority=secondary_offload_min_priority,
                events=self._events,
                draft_kv=self._draft_kv,
            )
            if host_copies is not None and enable_block_reuse
            else None
        )
        self.scheduler = Scheduler(pool, limits, LayerGroups(pool, geometry.windows), speculation, self.tier)
        self._speculation = speculation
        self.runner = runner
        admission = Admission(
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
        self._processors = LogitsProcessors(batched_processor)
        self._open = OpenSequences(self.scheduler, admission, self._handoffs, self._guided, self._new_sequence)
        self._with_stats = enable_iter_perf_stats
        self._stats: dict[str, Any] | None = None  # of the last committed step
        self._reported_stats: dict[str, Any] | None = None
        self._reported_handoff = HandoffStats()
        self._process = psutil.Process()
        self._measure_memory()
        self._iteration = 0
        self._is_stalled = False
        self._overlaps = not disable_overlap_scheduler
        self._under_way: _UnderWay | None = None
        self._committed_at = 0.0  # same clock as Sequence.arrived_s
        self._device_wait_s = 0.0  # total time in which the device computed for the waiting loop

    # --- step ---

    def step(self) -> StepReport | None:
        """Schedules and launches a step, then commits the previous one (without overlap: the same one).

        Returns what changed, or None if nothing did.
        """
        if self._handoffs is not None:
            self._handoffs.collect()
            self._open.end_short(self._handoffs.take_short())
        if self.tier is not None:
            for load in self.tier.collect():
                self._open.end_load(load)
        self._open.take_compiled()
        self._open.take_followers()
        done = self._iteration
        if self._under_way is not None and (self.scheduler.must_preempt or self._must_know_tokens(self._under_way)):
            self._commit(self._under_way)
            self._under_way = None
        before, self._under_way = self._under_way, self._launch()
        if self._under_way is not None and self._under_way.must_sample:
            if before is not None:
                self._commit(before)
                before, self._is_stalled = None, False
            self._sample(self._under_way)
        if not self._overlaps:
            before, self._under_way = self._under_way, None
        if before is not None:
            self._commit(before)
            self._is_stalled = False
        return self._report(has_computed=self._iteration > done)

    def _must_know_tokens(self, under_way: _UnderWay) -> bool:
        """Whether the next step can be scheduled only once the tokens of the one in flight are known."""
        if self._speculation is None:
            return False
        return bool(under_way.step.drafted) or self._speculation.wants_tokens(self.scheduler.running)

    def _launch(self) -> _UnderWay | None:
        """Schedules and launches the next step; returns None if there is nothing to compute."""
        began = time.perf_counter()
        step = self.scheduler.schedule()
        for sequence in step.admitted:
            sequence.stages.admit(began, self._device_wait_s)
        if self.tier is not None:
            self.tier.start(before_reads=bool(step.reads), prompt_tokens=step.num_context_tokens)
        for sequence in step.reads:
            self._open.begin_read(sequence)
        if step.short:
            self._open.end_short(step.short)
        self._is_stalled = not (step.sequences or step.reads or step.num_loads or step.short)
        if not step.sequences:
            return None
        batch = step.launch()
        launches_from = time.perf_counter()
        launched = self.runner.launch(batch)
        if not self.runner.is_asynchronous:  # the device is this thread
            self._device_wait_s += time.perf_counter() - launches_from
        return _UnderWay(step, launched, batch.waits_for_tokens, began)

    def _sample(self, under_way: _UnderWay) -> None:
        """Starts to sample a step whose sequences follow grammars or have logits processors."""
        slots, per_slot = self._guided.limit(under_way.step) if self._guided is not None else ((), 1)
        under_way.launched.sample(slots, self._processors.edit(under_way.step), per_slot)

    def _commit(self, under_way: _UnderWay) -> None:
        """Waits for a step in flight and applies its results to its sequences."""
        step, scheduler = under_way.step, self.scheduler
        waits_from = time.perf_counter()
        results = under_way.launched.results()
        came = time.perf_counter()
        waited_s = came - waits_from
        self._device_wait_s += waited_s
        size = scheduler.pool.tokens_per_block
        num_completed = num_emitted = 0
        for sequence, end, sampled in zip(step.sequences, step.ends, results, strict=True):
            if not scheduler.settle(sequence):
                continue
            problem = sequence.processor_problem or grammar_problem(sequence)
            update: Update | None = None
            try:
                if not problem and sampled.error is None:
                    if sequence.drafted is not None:
                        assert self._speculation is not None
                        update = self._speculation.commit(sequence, sequence.drafted, sampled)
                        end = sequence.num_written
                    else:
                        update = sequence.advance(sampled, end)
                    if end // size > sequence.num_registered:
                        scheduler.groups.settle_blocks(sequence)
            except GrammarProblem as error:
                problem = str(error)
            except Exception as error:
                num_completed += 1
                self._open.fail(sequence, error)
                continue
            if problem:
                num_completed += 1
                self._open.end(sequence, Update(sequence.sequence_id, [], error=problem))
            elif sampled.error is not None:
                num_completed += 1
                self._open.fail(sequence, sampled.error)
            elif update is not None:
                is_first = bool(update.token_ids) and sequence.stages.token(came, self._device_wait_s)
                if is_first or update.finish_reason is not None:
                    update.times = sequence.stages.times(sequence.arrived_s, came, self._device_wait_s)
                num_emitted += len(update.token_ids)
                num_completed += update.finish_reason is not None
                self._open.advance(sequence, update)
        self._open.take_followers()
        self._iteration += 1
        began, self._committed_at = max(under_way.began, self._committed_at), time.perf_counter()
        if self._speculation is not None and not step.prompts:
            self._speculation.stepped(len(step.generating), step.num_drafted_tokens, self._committed_at - began)
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
                device_wait_s=waited_s if self.runner.is_asynchronous else None,
                num_graph_misses=self.runner.graph_misses,
                grammars=self._guided.counts if self._guided is not None else None,
                speculation=self._speculation.take_counts() if self._speculation is not None else None,
                experts=self.runner.expert_balance,
            )

    def _report(self, *, has_computed: bool) -> StepReport | None:
        updates = self._open.take_updates()
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
        if self._open.has_updates or self._under_way is not None:
            return 0.0
        waits = self._handoffs.wait_s if self._handoffs is not None else None
        if self.tier is not None and (poll := self.tier.wait_s) is not None:
            waits = poll if waits is None else min(waits, poll)
        if not self.scheduler.running and not self.scheduler.waiting:
            return waits
        # Stalled: the next step needs blocks that leases or reads hold, and those end by themselves.
        return 0.0 if not self._is_stalled else LEASE_POLL_S if waits is None else waits

    # --- requests ---

    def submit(self, submit: Submit, processors: LoadedProcessors | None = None) -> None:
        """Accepts one sequence. An invalid one gets an error update and affects no other sequence.

        ``processors``: those of ``submit``, if they are loaded already.
        """
        self._open.submit(submit, processors or load_processors(submit.processors))

    def _new_sequence(self, submit: Submit, arrival: int) -> Sequence:
        return Sequence.from_submit(
            submit,
            arrival=arrival,
            arrived_s=time.perf_counter(),
            max_seq_len=self.max_seq_len,
            vocab_size=self.runner.vocab_size,
        )

    def abort(self, sequence_ids: Iterable[int]) -> None:
        """Ends sequences in any state with finish reason ``cancelled``.

        Unknown ids, whose sequences have ended, are ignored.
        """
        self._open.abort(sequence_ids)

    # --- memory that is released between steps: see Parking ---

    @property
    def unfinished_work(self) -> str:
        """Describes what must end before the memory may change; empty if the engine is idle."""
        if count := self._open.num_open:
            return f"{count} open {'request' if count == 1 else 'requests'}"
        if self._under_way is not None or self.scheduler.leaving:
            return "a step in flight"
        if self.tier is not None and self.tier.wait_s is not None:
            return "a copy of KV to or from host memory in flight"
        return "" if self._handoffs is None else self._handoffs.unfinished

    def forget_cache(self) -> None:
        """Empties the prefix cache on the device and in host memory. The next report contains the KV events for it."""
        self.scheduler.pool.forget_all()
        if self.tier is not None:
            self.tier.clear()
        if self._draft_kv is not None:
            self._draft_kv.forget()

    def replace_transport(self, transport: KvTransport | None) -> None:
        """Replaces the closed transport by ``transport``, which has registered the pool anew. No handoff may be
        unfinished.

        With None, the pool is only deregistered: no peer can reach it until the next call.
        """
        if self._handoffs is not None:
            self._handoffs.replace_transport(transport)

    # --- invariants and end ---

    def check(self) -> None:
        """Raises AssertionError unless every invariant of pool, slots and leases holds. Slow: for tests only."""
        self.scheduler.check(self._handoffs.leased if self._handoffs is not None else None)

    def close(self) -> None:
        if self._handoffs is not None:
            self._handoffs.close()
        if self.tier is not None:
            self.tier.close()
        if self._guided is not None:
            self._guided.close()
        self.runner.close()
