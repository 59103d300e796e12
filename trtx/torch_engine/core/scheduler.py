"""Which sequences run in the next step, on which blocks. Policy only: no tensors, no clock, no socket.

Order of a step's token budget: every running sequence with one token left decodes; then prompts in progress take
chunks, oldest first; then waiting sequences are admitted, each with all blocks of its known tokens, so that only
decoding ever asks for more. When a decode finds no block, the sequence admitted last is preempted: it gives
everything back, waits at its old place, and computes its past again.

A step may be scheduled while the one before is under way. What ends in between keeps its slot and blocks until no step
is left that uses them: nobody else, and no copy from a peer, may write where a step still does.
"""

from __future__ import annotations

from bisect import insort
from dataclasses import dataclass, field

from trtx.torch_engine.batch import Batch
from trtx.torch_engine.core.block_pool import BlockPool
from trtx.torch_engine.core.media import MediaStore, Shortage
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
    # Of prompts, in a step that has decodes too: what a stream of long prompts may add to the time between tokens.
    # None: all that the budget leaves. Without chunked prefill there is nothing to cap.
    max_prompt_tokens_beside_decodes: int | None = None


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
    ends: list[int] = field(default_factory=list)  # of each: how much of it is written once the step is done
    short: list[tuple[Sequence, Shortage]] = field(default_factory=list)  # taken out of waiting: they can't be computed

    def launch(self) -> Batch:
        """Counts the step as under way. The runner's view, aligned with ``sequences``, valid until the next launch."""
        shares = [sequence.launch(1) for sequence in self.decodes]
        shares += [sequence.launch(count) for sequence, count in self.chunks]
        self.ends = [sequence.num_computed for sequence in self.sequences]
        return Batch(shares)


class Scheduler:
    """Owns the queues and the slots, and asks the pool for blocks. ``slots free + held == max_batch_size`` always."""

    def __init__(self, pool: BlockPool, limits: SchedulerLimits) -> None:
        self.pool = pool
        self.media = MediaStore()
        self.limits = limits
        # With more slots than budget, prompts could starve behind decodes.
        self.max_batch_size = min(limits.max_batch_size, limits.max_num_tokens)
        self.waiting: list[Sequence] = []  # in the order of admission
        self.running: list[Sequence] = []  # in the order in which they were admitted
        self.reading: list[Sequence] = []
        self.leaving: list[Sequence] = []  # ended, with a step under way that has them in it
        self._free_slots = list(range(self.max_batch_size - 1, -1, -1))
        self._watermark = int(pool.num_blocks * WATERMARK)

    @property
    def num_active(self) -> int:
        return len(self.running) + len(self.reading)

    def add(self, sequence: Sequence) -> None:
        if sequence.media:
            self.hold_media(sequence)
        insort(self.waiting, sequence, key=self._rank)

    def _rank(self, sequence: Sequence) -> tuple[float, int]:
        return (-sequence.priority if self.limits.by_priority else 0.0, sequence.arrival)

    @property
    def must_preempt(self) -> bool:
        """The next ``schedule`` may preempt, or make a decode wait. No step may be under way then."""
        available, size = self.pool.num_available, self.pool.tokens_per_block
        if available >= len(self.running):
            return False
        decodes = (s for s in self.running if s.is_decode and not s.is_complete)
        return sum(s.num_computed == len(s.block_ids) * size for s in decodes) > available

    def schedule(self) -> Step:
        """Picks the next step's work and takes the blocks for it. Never raises, never waits; may pick nothing."""
        step = Step()
        decodes, tokens_per_block = step.decodes, self.pool.tokens_per_block
        prompts: list[Sequence] = []
        for sequence in self.running:  # which preemption shortens from its end
            computed, known = sequence.num_computed, sequence.num_tokens
            if known >= sequence.most_tokens:
                continue  # its last token is being sampled
            if known - computed != 1 or computed < sequence.chunked_until:
                prompts.append(sequence)
            elif computed < len(sequence.block_ids) * tokens_per_block or self._grow(sequence):
                decodes.append(sequence)
        step.num_generating = len(decodes)
        budget = self.limits.max_num_tokens - step.num_generating
        cap = self.limits.max_prompt_tokens_beside_decodes
        if cap is not None and step.num_generating and self.limits.enable_chunked_prefill:
            budget = min(budget, cap)
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
        if sequence.is_decode:
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
        assert not sequence.num_steps, "see must_preempt"
        self._let_go(sequence)
        sequence.state = State.WAITING
        sequence.is_resumed = True
        self.add(sequence)

    def _admit(self, budget: int, step: Step) -> Sequence | None:
        """Moves the first waiting sequence to RUNNING, to READING with an entry in ``step.reads``, or, where it can't
        be computed, to FINISHED with an entry in ``step.short``. None: it waits, or none does."""
        if not self.waiting or not self._free_slots:
            return None
        sequence, pool = self.waiting[0], self.pool
        known, wants_read = sequence.num_tokens, sequence.wants_read
        reusable, matched = self._cached(sequence)
        num_computed = len(matched) * pool.tokens_per_block
        if sequence.media and not wants_read and (shortage := self.media_shortage(sequence, num_computed)) is not None:
            del self.waiting[0]
            sequence.state = State.FINISHED
            sequence.embeddings = []
            step.short.append((sequence, shortage))
            return sequence
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
        sequence.num_computed = sequence.num_written = num_computed
        sequence.skip_media(num_computed)
        self.running.append(sequence)

    def hold_media(self, sequence: Sequence) -> None:
        """Keeps for a sequence what there is of its embeddings."""
        held = sequence.embeddings or [None] * len(sequence.media)
        sequence.embeddings = self.media.hold(sequence.media, held)

    def media_shortage(self, sequence: Sequence, num_computed: int) -> Shortage | None:
        """Why a sequence with media can't be computed from there on; None: it can."""
        self.hold_media(sequence)
        shortage = self.media.shortage(sequence.media, sequence.embeddings, num_computed)
        sequence.skip_media(num_computed)
        return shortage

    def register(self, sequence: Sequence) -> None:
        """Makes the blocks that ``num_written`` fills findable."""
        if not self.pool.enable_reuse:
            return
        size = self.pool.tokens_per_block
        first, full = sequence.num_registered, sequence.num_written // size
        if full > first:
            names = sequence.names(full, size)
            self.pool.register(
                sequence.block_ids[first:full],
                names[first:full],
                names[first - 1] if first else None,
                [sequence.event_tokens(index * size, (index + 1) * size) for index in range(first, full)],
            )
            sequence.num_registered = full

    def finish(self, sequence: Sequence, *, keep_blocks: int = 0) -> list[int]:
        """Ends a sequence in any state. Its first ``keep_blocks`` blocks stay referenced and are returned.

        One that a step under way has in it leaves when that step is settled; it can keep nothing.
        """
        if sequence.state is State.WAITING:
            self.waiting.remove(sequence)
        elif sequence.state is State.READING:
            self.reading.remove(sequence)
        elif sequence.state is State.RUNNING:
            self.running.remove(sequence)
        sequence.state = State.FINISHED
        sequence.embeddings = []
        if sequence.num_steps:
            assert not keep_blocks
            self.leaving.append(sequence)
            return []
        return self._let_go(sequence, keep_blocks)

    def settle(self, sequence: Sequence) -> bool:
        """A step that had it in it is done. Whether the sequence goes on: what an ended one got is nobody's."""
        sequence.num_steps -= 1
        if sequence.state is not State.FINISHED:
            return True
        if not sequence.num_steps:
            self.leaving.remove(sequence)
            self._let_go(sequence)
        return False

    def _let_go(self, sequence: Sequence, keep_blocks: int = 0) -> list[int]:
        kept, given_back = sequence.block_ids[:keep_blocks], sequence.block_ids[keep_blocks:]
        self.pool.release(given_back)
        if sequence.slot >= 0:
            self._free_slots.append(sequence.slot)
        sequence.slot = -1
        sequence.block_ids = []
        sequence.held = None
        sequence.num_computed = sequence.num_written = sequence.num_registered = 0
        return kept

    def check(self, leased: list[tuple[int, ...]] | None = None) -> None:
        """Raises AssertionError unless pool, queues and slots agree. ``leased``: block lists held by leases."""
        holding = (*self.running, *self.reading, *self.leaving)
        holders: list[list[int]] = [s.block_ids for s in holding]
        holders += [list(blocks) for blocks in leased or ()]
        self.pool.check(holders)
        slots = [s.slot for s in holding]
        if sorted(slots + self._free_slots) != list(range(self.max_batch_size)):
            raise AssertionError(f"slots: held {sorted(slots)} + free {sorted(self._free_slots)}; expected each once")
        for sequence in self.waiting:
            if sequence.block_ids or sequence.slot >= 0:
                raise AssertionError(f"waiting sequence {sequence.sequence_id} holds {sequence.block_ids}")
        for sequence in self.running:
            if sequence.num_computed >= sequence.chunked_until:
                unmet: object = "embeddings that no step needs more" if sequence.embeddings else None
            else:
                unmet = self.media.shortage(sequence.media, sequence.embeddings, sequence.num_computed)
            if unmet is not None:
                raise AssertionError(f"sequence {sequence.sequence_id} runs, and has {unmet}")
        for sequence in holding:
            room = len(sequence.block_ids) * self.pool.tokens_per_block
            if not sequence.num_written <= sequence.num_computed <= room:
                raise AssertionError(
                    f"sequence {sequence.sequence_id}: {sequence.num_written} tokens written, {sequence.num_computed} "
                    f"computed or under way, room for {room}"
                )
            is_leaving = sequence in self.leaving
            if not sequence.num_steps and (is_leaving or sequence.num_written != sequence.num_computed):
                raise AssertionError(
                    f"sequence {sequence.sequence_id} is in no step under way, {sequence.num_written} of its "
                    f"{sequence.num_computed} tokens are written, and it is {'leaving' if is_leaving else 'there'}"
                )
