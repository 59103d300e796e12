"""Which sequences run in the next step, on which blocks. Policy only: no tensors, no clock, no socket.

Order of a step's token budget: every running sequence with one token left decodes; then prompts in progress take
chunks, oldest first; then waiting sequences are admitted, each with all blocks of its known tokens, so that only
decoding ever asks for more. When a decode finds no block, the sequence admitted last is preempted: it gives
everything back, waits at its old place, and computes its past again.
"""

from __future__ import annotations

from bisect import insort
from dataclasses import dataclass, field

from trtx.torch_engine.batch import Batch
from trtx.torch_engine.core.block_pool import BlockPool
from trtx.torch_engine.core.sequence import Sequence, State

WATERMARK = 0.01
"""Share of the pool that admission leaves for running sequences to grow into; vLLM's figure. Without it a full pool
admits a prompt that the next decode preempts at once."""


@dataclass(frozen=True, slots=True)
class SchedulerLimits:
    """``max_batch_size`` sequences hold a slot at a time; a step computes at most ``max_num_tokens`` tokens."""

    max_batch_size: int
    max_num_tokens: int
    enable_chunked_prefill: bool = True
    by_priority: bool = False  # waiting_queue_policy: priority


@dataclass(slots=True)
class Step:
    """One step's work, each sequence at most once. ``decodes`` compute one token and sample; they go first."""

    decodes: list[Sequence] = field(default_factory=list)
    chunks: list[tuple[Sequence, int]] = field(default_factory=list)  # of a prompt, or of a past: how many tokens
    reads: list[Sequence] = field(default_factory=list)  # admitted, and their KV is to be read from a peer
    admitted: list[Sequence] = field(default_factory=list)
    num_generating: int = 0  # leading decodes; the others are prompts of which the cache had all but the last token
    num_context_tokens: int = 0
    sequences: list[Sequence] = field(default_factory=list)  # decodes, then those of chunks

    def batch(self) -> Batch:
        """The runner's view, aligned with ``sequences``. Valid until the next step."""
        shares = [sequence.share(1) for sequence in self.decodes]
        shares += [sequence.share(count) for sequence, count in self.chunks]
        return Batch(shares)


class Scheduler:
    """Owns the queues and the slots, and asks the pool for blocks. ``slots free + held == max_batch_size`` always."""

    def __init__(self, pool: BlockPool, limits: SchedulerLimits) -> None:
        self.pool = pool
        self.limits = limits
        # With more slots than budget, prompts could starve behind decodes.
        self.max_batch_size = min(limits.max_batch_size, limits.max_num_tokens)
        self.waiting: list[Sequence] = []  # in the order of admission
        self.running: list[Sequence] = []  # in the order in which they were admitted
        self.reading: list[Sequence] = []
        self._free_slots = list(range(self.max_batch_size - 1, -1, -1))
        self._watermark = int(pool.num_blocks * WATERMARK)

    @property
    def num_active(self) -> int:
        return len(self.running) + len(self.reading)

    def add(self, sequence: Sequence) -> None:
        insort(self.waiting, sequence, key=self._rank)

    def _rank(self, sequence: Sequence) -> tuple[float, int]:
        return (-sequence.priority if self.limits.by_priority else 0.0, sequence.arrival)

    def schedule(self) -> Step:
        """Picks the next step's work and takes the blocks for it. Never raises, never waits; may pick nothing."""
        step = Step()
        tokens_per_block = self.pool.tokens_per_block
        prompts: list[Sequence] = []
        for sequence in self.running:  # which preemption shortens from its end
            computed = sequence.num_computed
            if sequence.num_tokens - computed != 1 or computed == 0:
                prompts.append(sequence)
            elif computed < len(sequence.block_ids) * tokens_per_block or self._grow(sequence):
                step.decodes.append(sequence)
        step.num_generating = len(step.decodes)
        budget = self.limits.max_num_tokens - step.num_generating
        for sequence in prompts:
            if budget == 0:
                break
            budget -= self._compute(sequence, budget, step)
        while budget > 0 and (admitted := self._admit(budget, step)) is not None:
            if admitted.state is State.RUNNING:
                budget -= self._compute(admitted, budget, step)
        step.sequences = step.decodes + [sequence for sequence, _ in step.chunks]
        return step

    @staticmethod
    def _compute(sequence: Sequence, budget: int, step: Step) -> int:
        """Adds as many of the sequence's uncomputed tokens as ``budget`` allows. Returns how many."""
        count = min(sequence.num_uncomputed, budget)
        if sequence.num_uncomputed == 1 and sequence.num_computed > 0:
            step.decodes.append(sequence)
        else:
            step.chunks.append((sequence, count))
        step.num_context_tokens += count
        return count

    def _grow(self, sequence: Sequence) -> bool:
        """Gives a decode its next block, at the cost of sequences admitted later, in the end of itself."""
        while (block := self.pool.allocate(1)) is None:
            victim = self.running[-1]
            if victim is sequence and self.num_active == 1:
                # All other blocks are under leases. It keeps its own and waits for a lease to end: preempted, it would
                # need as many again.
                return False
            self._preempt_latest()
            if victim is sequence:
                return False
        sequence.block_ids += block
        return True

    def _preempt_latest(self) -> None:
        sequence = self.running.pop()
        self._let_go(sequence)
        sequence.state = State.WAITING
        sequence.is_resumed = True
        self.add(sequence)

    def _admit(self, budget: int, step: Step) -> Sequence | None:
        """Moves the first waiting sequence to RUNNING, or to READING with an entry in ``step.reads``."""
        if not self.waiting or not self._free_slots:
            return None
        sequence, pool = self.waiting[0], self.pool
        known, wants_read = sequence.num_tokens, sequence.wants_read
        reusable, matched = self._cached(sequence)
        num_computed = len(matched) * pool.tokens_per_block
        is_whole = not (wants_read or self.limits.enable_chunked_prefill)
        if is_whole and budget < known - num_computed <= self.limits.max_num_tokens:
            return None
        needed = -(-known // pool.tokens_per_block) - len(matched)
        reserve = self._watermark if self.num_active else 0
        if needed + pool.num_evictable(matched) + reserve > pool.num_available:
            return None
        pool.take(matched)
        fresh = pool.allocate(needed)
        assert fresh is not None
        pool.counters.missed += max(0, reusable - len(matched))
        del self.waiting[0]
        sequence.hold(self._free_slots.pop(), matched + fresh, num_computed)
        sequence.num_registered = sequence.num_reused = len(matched)
        step.admitted.append(sequence)
        if wants_read:
            sequence.state = State.READING
            self.reading.append(sequence)
            step.reads.append(sequence)
        else:
            sequence.state = State.RUNNING
            self.running.append(sequence)
        return sequence

    def _cached(self, sequence: Sequence) -> tuple[int, list[int]]:
        """How many leading blocks could be reused, and those that the prefix cache has."""
        # At least one token must be computed to sample from; after a read that is the prefill side's first token.
        length = len(sequence.prompt_token_ids) if sequence.wants_read else sequence.num_tokens - 1
        reusable = 0 if self._needs_every_logit(sequence) else length // self.pool.tokens_per_block
        if not self.pool.enable_reuse:
            return reusable, []
        return reusable, self.pool.match(sequence.names(reusable, self.pool.tokens_per_block)[:reusable])

    @staticmethod
    def _needs_every_logit(sequence: Sequence) -> bool:
        return sequence.sampling.prompt_logprobs is not None and not sequence.output_token_ids

    def end_read(self, sequence: Sequence, num_computed: int) -> None:
        """READING -> RUNNING with ``num_computed`` tokens in place: all on success, the reused ones if not."""
        self.reading.remove(sequence)
        sequence.state = State.RUNNING
        sequence.num_computed = num_computed
        self.running.append(sequence)

    def register(self, sequence: Sequence) -> None:
        """Makes the blocks that ``num_computed`` has filled findable."""
        if not self.pool.enable_reuse:
            return
        size = self.pool.tokens_per_block
        first, full = sequence.num_registered, sequence.num_computed // size
        if full > first:
            names = sequence.names(full, size)
            self.pool.register(
                sequence.block_ids[first:full],
                names[first:full],
                names[first - 1] if first else None,
                [sequence.tokens(index * size, (index + 1) * size) for index in range(first, full)],
            )
            sequence.num_registered = full

    def finish(self, sequence: Sequence, *, keep_blocks: int = 0) -> list[int]:
        """Ends a sequence in any state. Its first ``keep_blocks`` blocks stay referenced and are returned."""
        if sequence.state is State.WAITING:
            self.waiting.remove(sequence)
        elif sequence.state is State.READING:
            self.reading.remove(sequence)
        elif sequence.state is State.RUNNING:
            self.running.remove(sequence)
        sequence.state = State.FINISHED
        return self._let_go(sequence, keep_blocks)

    def _let_go(self, sequence: Sequence, keep_blocks: int = 0) -> list[int]:
        kept, given_back = sequence.block_ids[:keep_blocks], sequence.block_ids[keep_blocks:]
        self.pool.release(given_back)
        if sequence.slot >= 0:
            self._free_slots.append(sequence.slot)
        sequence.slot = -1
        sequence.block_ids = []
        sequence.held = None
        sequence.num_computed = sequence.num_registered = 0
        return kept

    def check(self, leased: list[tuple[int, ...]] | None = None) -> None:
        """Raises AssertionError unless pool, queues and slots agree. ``leased``: block lists held by leases."""
        holders: list[list[int]] = [s.block_ids for s in (*self.running, *self.reading)]
        holders += [list(blocks) for blocks in leased or ()]
        self.pool.check(holders)
        slots = [s.slot for s in (*self.running, *self.reading)]
        if sorted(slots + self._free_slots) != list(range(self.max_batch_size)):
            raise AssertionError(f"slots: held {sorted(slots)} + free {sorted(self._free_slots)}; expected each once")
        for sequence in self.waiting:
            if sequence.block_ids or sequence.slot >= 0:
                raise AssertionError(f"waiting sequence {sequence.sequence_id} holds {sequence.block_ids}")
