"""Which sequences run in the next step, on which blocks. Policy only: no tensors, no clock, no socket.

Order of a step's token budget: every running sequence with one token left decodes; then prompts in progress take
chunks, oldest first; then waiting sequences are admitted, each with all blocks of its known tokens, so that only
decoding ever asks for more. When a decode finds no block, the sequence admitted last is preempted: it gives
everything back, waits at its old place, and computes its past again.
"""

from __future__ import annotations

from bisect import insort
from dataclasses import dataclass, field

from trtx.torch_engine.batch import Batch, ScheduledSequence
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
    """One step's work. ``batch.sequences[i]`` is ``sequences[i]``'s share of it."""

    batch: Batch
    sequences: list[Sequence] = field(default_factory=list)
    pulls: list[Sequence] = field(default_factory=list)  # admitted, and their KV is to be read from a peer
    num_decodes: int = 0
    num_context_tokens: int = 0
    admitted: list[Sequence] = field(default_factory=list)
    num_preempted: int = 0


class Scheduler:
    """Owns the queues and the slots, and asks the pool for blocks. ``slots free + held == max_batch_size`` always."""

    def __init__(self, pool: BlockPool, limits: SchedulerLimits) -> None:
        self.pool = pool
        self.limits = limits
        # With more slots than budget, prompts could starve behind decodes.
        self.max_batch_size = min(limits.max_batch_size, limits.max_num_tokens)
        self.waiting: list[Sequence] = []  # in the order of admission
        self.running: list[Sequence] = []  # in the order in which they were admitted
        self.transferring: list[Sequence] = []
        self._free_slots = list(range(self.max_batch_size - 1, -1, -1))
        self._watermark = int(pool.num_blocks * WATERMARK)

    @property
    def num_active(self) -> int:
        return len(self.running) + len(self.transferring)

    def add(self, sequence: Sequence) -> None:
        insort(self.waiting, sequence, key=self._rank)

    def _rank(self, sequence: Sequence) -> tuple[float, int]:
        return (-sequence.priority if self.limits.by_priority else 0.0, sequence.arrival)

    def schedule(self) -> Step:
        """Picks the next step's work and takes the blocks for it. Never raises, never waits; may pick nothing."""
        step = Step(Batch())
        prompts = self._schedule_decodes(step)
        chunks: list[ScheduledSequence] = []
        chunked: list[Sequence] = []
        budget = self.limits.max_num_tokens - step.num_decodes
        for sequence in prompts:
            if budget == 0:
                break
            budget -= self._schedule_chunk(sequence, budget, step, chunks, chunked)
        while budget > 0 and (admitted := self._admit(budget, step)) is not None:
            if admitted.state is State.RUNNING:
                budget -= self._schedule_chunk(admitted, budget, step, chunks, chunked)
        step.batch.sequences += chunks
        step.sequences += chunked
        return step

    def _schedule_decodes(self, step: Step) -> list[Sequence]:
        """Adds every decode to the step. Returns the running sequences with more than one token to compute."""
        shares, sequences = step.batch.sequences, step.sequences
        running = self.running
        tokens_per_block = self.pool.tokens_per_block
        prompts: list[Sequence] = []
        index = 0
        while index < len(running):  # preemption shortens the list from its end
            sequence = running[index]
            index += 1
            computed = sequence.num_computed
            if sequence.num_tokens - computed != 1 or computed == 0:
                prompts.append(sequence)
            elif computed < len(sequence.block_ids) * tokens_per_block or self._grow(sequence, step):
                shares.append(sequence.share(1))
                sequences.append(sequence)
        step.num_decodes = len(shares)
        return prompts

    def _grow(self, sequence: Sequence, step: Step) -> bool:
        """Gives a decode its next block, at the cost of sequences admitted later, in the end of itself."""
        while (block := self.pool.allocate(1)) is None:
            victim = self.running[-1]
            if victim is sequence and self.num_active == 1:
                return False  # alone: leases hold the rest, and they end; giving up its own blocks would gain nothing
            self._preempt_latest()
            step.num_preempted += 1
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

    def _schedule_chunk(
        self,
        sequence: Sequence,
        budget: int,
        step: Step,
        chunks: list[ScheduledSequence],
        chunked: list[Sequence],
    ) -> int:
        count = min(sequence.num_uncomputed, budget)
        share = sequence.share(count)
        if count == 1 and share.samples and share.start > 0:
            step.batch.sequences.append(share)  # a decode in form: the batch has those first
            step.sequences.append(sequence)
        else:
            chunks.append(share)
            chunked.append(sequence)
        step.num_context_tokens += count
        return count

    def _admit(self, budget: int, step: Step) -> Sequence | None:
        """Moves the first waiting sequence to RUNNING, or to TRANSFERRING with an entry in ``step.pulls``."""
        if not self.waiting or not self._free_slots:
            return None
        sequence = self.waiting[0]
        pool = self.pool
        tokens_per_block = pool.tokens_per_block
        known = sequence.num_tokens
        wants_pull = sequence.wants_pull
        # At least one token must be computed to sample from; after a pull that is the prefill side's first token.
        reusable = (len(sequence.prompt_token_ids) if wants_pull else known - 1) // tokens_per_block
        if self._needs_every_logit(sequence):
            reusable = 0
        matched = pool.match(sequence.names(reusable, tokens_per_block)[:reusable]) if pool.enable_reuse else []
        num_computed = len(matched) * tokens_per_block
        if (
            not wants_pull
            and not self.limits.enable_chunked_prefill
            and budget < known - num_computed <= self.limits.max_num_tokens
        ):
            return None
        needed = -(-known // tokens_per_block) - len(matched)
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
        if wants_pull:
            sequence.state = State.TRANSFERRING
            self.transferring.append(sequence)
            step.pulls.append(sequence)
        else:
            sequence.state = State.RUNNING
            self.running.append(sequence)
        return sequence

    @staticmethod
    def _needs_every_logit(sequence: Sequence) -> bool:
        return sequence.sampling.prompt_logprobs is not None and not sequence.output_token_ids

    def pulled(self, sequence: Sequence, num_computed: int) -> None:
        """TRANSFERRING -> RUNNING with ``num_computed`` tokens in place: all on success, the reused ones if not."""
        self.transferring.remove(sequence)
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
        elif sequence.state is State.TRANSFERRING:
            self.transferring.remove(sequence)
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
        holders: list[list[int]] = [s.block_ids for s in (*self.running, *self.transferring)]
        holders += [list(blocks) for blocks in leased or ()]
        self.pool.check(holders)
        slots = [s.slot for s in (*self.running, *self.transferring)]
        if sorted(slots + self._free_slots) != list(range(self.max_batch_size)):
            raise AssertionError(f"slots: held {sorted(slots)} + free {sorted(self._free_slots)}; expected each once")
        for sequence in self.waiting:
            if sequence.block_ids or sequence.slot >= 0:
                raise AssertionError(f"waiting sequence {sequence.sequence_id} holds {sequence.block_ids}")
