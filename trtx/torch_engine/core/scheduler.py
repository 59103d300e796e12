"""Chooses which sequences run in the next step, and on which blocks. Policy only: no tensors, no clock, no socket.

A step's token budget goes first to decodes: every running sequence with one token left to compute. Then prompts in
progress take chunks, in the order of their admission. Then waiting sequences are admitted, each with all blocks for its
known tokens, so that only decoding ever needs more blocks. A long prompt at the head leaves up to half of this to short
ones behind it (:mod:`.short_prompts`). If a decode finds no free block, the sequence admitted last is preempted: it
releases everything, waits at its old place in the queue, and recomputes its past.

A step may be scheduled while the previous one is in flight. A sequence that ends in between keeps its slot and blocks
until no step in flight uses them, because no other sequence and no read from a peer may write where a step still does.
"""

from __future__ import annotations

from bisect import insort

from trtx.config.torch_passes import MOST_SAMPLED_AFTER_DRAFTS
from trtx.torch_engine.core.block_pool import BlockPool
from trtx.torch_engine.core.cached_prefixes import CachedPrefixes
from trtx.torch_engine.core.host_tier import HostTier
from trtx.torch_engine.core.kv_cache_groups import LayerGroups
from trtx.torch_engine.core.media import EmbeddingShortage, MediaStore
from trtx.torch_engine.core.prefill_budget import PromptPace
from trtx.torch_engine.core.scheduled_step import Step
from trtx.torch_engine.core.scheduler_limits import SchedulerLimits
from trtx.torch_engine.core.sequence import Sequence, State
from trtx.torch_engine.core.sequence_invariants import check_holding, check_media, check_waiting
from trtx.torch_engine.core.short_prompts import LOOKED_AT, left_to_short, most_of_short
from trtx.torch_engine.core.speculation.speculation import Speculation

WATERMARK = 0.01
"""Share of the pool that admission keeps free, so that running sequences can grow; vLLM uses the same value.

Without it, a full pool admits a prompt that the next decode preempts at once.
"""


class Scheduler:
    """Owns queues and slots, and allocates blocks from the pool.

    ``slots free + held == max_batch_size`` at all times.
    """

    def __init__(
        self,
        pool: BlockPool,
        limits: SchedulerLimits,
        groups: LayerGroups | None = None,
        speculation: Speculation | None = None,
        tier: HostTier | None = None,
    ) -> None:
        """``groups`` None: a single KV cache group that attends to all positions."""
        self.pool = pool
        self._speculation = speculation
        self.groups = groups or LayerGroups(pool)
        self.prefixes = CachedPrefixes(pool, self.groups, tier)
        self.media = MediaStore()
        self.limits = limits
        # With more slots than token budget, decodes could starve the prompts.
        self.max_batch_size = min(limits.max_batch_size, limits.max_num_tokens)
        self.waiting: list[Sequence] = []  # in admission order
        self.running: list[Sequence] = []  # in the order of their admission
        self.reading: list[Sequence] = []
        self.leaving: list[Sequence] = []  # ended, but part of a step in flight
        self.num_preemptions = 0  # since the start
        self._free_slots = list(range(self.max_batch_size - 1, -1, -1))
        self._pace = PromptPace(limits.paced_steps) if limits.paced_steps is not None else None
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
        """True if the next ``schedule`` may preempt, or make a decode wait.

        In this case, no step may be in flight when ``schedule`` is called.
        """
        available = self.pool.num_available // self.groups.count
        if available >= len(self.running):
            return False
        decodes = (s for s in self.running if s.is_decode and not s.is_complete)
        return sum(s.num_computed == s.room for s in decodes) > available

    def schedule(self) -> Step:
        """Selects the next step's work and allocates its blocks. Never raises or waits; the step may be empty."""
        step = Step()
        decodes = step.decodes
        prompts: list[Sequence] = []
        for sequence in self.running:  # preemption shortens the list from its end
            computed, known = sequence.num_computed, sequence.num_tokens
            if known >= sequence.most_tokens:
                continue  # its last token is being sampled
            if known - computed != 1 or computed < sequence.chunked_until:
                prompts.append(sequence)
            elif computed < sequence.room or self._grow(sequence):
                decodes.append(sequence)
        budget = self.limits.max_num_tokens - len(decodes)
        if self._speculation is not None and decodes and budget > 0:
            budget -= self._draft(self._speculation, step, budget, has_prompts=bool(prompts or self.waiting))
        step.num_generating = len(step.decodes)
        share = self._prompt_share(len(step.generating), prompts, budget)
        if self.limits.enable_chunked_prefill:
            budget = share
        if prompts and (rest := left_to_short(prompts[0], min(budget, share))):
            count = self._compute_short(prompts, rest, step)
            budget, share = budget - count, share - count
        for sequence in prompts:
            if budget == 0:
                break
            count = self._compute(sequence, budget, step)
            budget, share = budget - count, share - count
        while budget > 0 and share > 0 and (admitted := self._admit(budget, step, 0)) is not None:
            if admitted.state is State.RUNNING:
                count = self._compute(admitted, budget, step)
                budget, share = budget - count, share - count
        step.sequences = [
            *step.decodes, *(sequence for sequence, _ in step.drafted), *(sequence for sequence, _ in step.chunks)
        ]  # fmt: skip
        return step

    def _draft(self, speculation: Speculation, step: Step, budget: int, *, has_prompts: bool) -> int:
        """Moves decodes that get drafts to ``step.drafted``. Returns the number of drafted tokens.

        They take at most half of the budget if prompts want it too. A draft gets free blocks only, and preempts none.
        """
        most = min(budget // 2 if has_prompts else budget, max(self.limits.max_batch_size, MOST_SAMPLED_AFTER_DRAFTS))
        step.drafted = speculation.draft(step.decodes, most, self._room_for)
        if step.drafted:
            moved = {sequence.sequence_id for sequence, _ in step.drafted}
            step.decodes[:] = [sequence for sequence in step.decodes if sequence.sequence_id not in moved]
        return step.num_drafted_tokens

    def _room_for(self, sequence: Sequence, num_drafts: int) -> int:
        """Allocates free blocks for drafted tokens. Returns for how many of them there is room."""
        end = sequence.num_computed + 1 + num_drafts
        while sequence.room < end:
            if self.pool.num_available < self.groups.count + self._watermark or not self._grow(sequence):
                break
        if self.prefixes.tier is not None:
            self.prefixes.tier.before_drafts()
        return min(end, sequence.room) - sequence.num_computed - 1

    def _prompt_share(self, num_decodes: int, prompts: list[Sequence], budget: int) -> int:
        """Returns how much of ``budget`` goes to prompt tokens in a step with ``num_decodes`` decodes.

        ``prompts``: sequences whose prompts are in progress.
        """
        limits, share = self.limits, budget
        waiting = self.waiting[: len(self._free_slots)]
        if self._pace is not None and num_decodes + len(prompts) + len(waiting) > 1:  # a single sequence needs no cap
            there = sum(sequence.num_uncomputed for sequence in (*prompts, *waiting))
            share = min(share, self._pace.share(num_decodes, there))
        if not num_decodes:
            return share
        if (cap := limits.max_prompt_tokens_beside_decodes) is not None:
            share = min(share, cap)
        return share

    def _compute_short(self, prompts: list[Sequence], budget: int, step: Step) -> int:
        """Computes short prompts before the long ``prompts[0]``: those in progress, then waiting ones, in this order.

        Returns the number of tokens, at most ``budget``.
        """
        left, most = budget, most_of_short(prompts[0])
        for sequence in prompts[1:]:
            if left and sequence.num_uncomputed <= most:
                left -= self._compute(sequence, left, step)
        while left > 0 and (index := self._first_short(most)) is not None:
            if (admitted := self._admit(left, step, index)) is None:
                break
            if admitted.state is State.RUNNING:
                left -= self._compute(admitted, left, step)
        return budget - left

    def _first_short(self, most: int) -> int | None:
        """Index of the first waiting sequence with at most ``most`` tokens to compute; None if none may be admitted.

        A sequence may pass the first one only if both have the same priority, and a slot and blocks remain for the
        first.
        """
        for index, sequence in enumerate(self.waiting[:LOOKED_AT]):
            known = sequence.num_tokens
            if index:
                first = self.waiting[0]
                needed = sum(-(-each // self.pool.tokens_per_block) for each in (first.num_tokens, known))
                room = self.pool.num_available - self._watermark
                if self._rank(first)[0] != self._rank(sequence)[0] or len(self._free_slots) < 2:
                    return None
                if needed * self.groups.count > room:
                    return None
            if sequence.wants_read or known - self.prefixes.find(sequence).length * self.pool.tokens_per_block <= most:
                return index
        return None

    @staticmethod
    def _compute(sequence: Sequence, budget: int, step: Step) -> int:
        """Adds as many of the sequence's uncomputed tokens as ``budget`` allows. Returns their number."""
        count = min(sequence.num_uncomputed, budget)
        if sequence.is_decode:
            step.decodes.append(sequence)
        else:
            step.chunks.append((sequence, count))
        step.num_context_tokens += count
        return count

    def _grow(self, sequence: Sequence) -> bool:
        """Allocates a decode's next block in each KV cache group; preempts later sequences, finally itself, if needed.

        Returns False if the sequence can't run in this step.
        """
        while (fresh := self.pool.allocate(self.groups.count)) is None:
            victim = self.running[-1]
            if victim is sequence and self.num_active == 1:
                # Leases hold all other blocks. The sequence keeps its own blocks and waits for a lease to end: after a
                # preemption it would need as many blocks again.
                return False
            self._preempt_latest()
            if victim is sequence:
                return False
        for blocks, block_id in zip(sequence.block_ids, fresh, strict=True):
            blocks.append(block_id)
        sequence.room += self.pool.tokens_per_block
        return True

    def _preempt_latest(self) -> None:
        sequence = self.running.pop()
        assert not sequence.num_steps, "see must_preempt"
        self._let_go(sequence)
        self.num_preemptions += 1
        sequence.state = State.WAITING
        sequence.is_resumed = True
        self.add(sequence)

    def _admit(self, budget: int, step: Step, index: int) -> Sequence | None:
        """Admits the waiting sequence at ``index``: to RUNNING, or to READING with an entry in ``step.reads``.

        A sequence that lacks media embeddings goes to FINISHED with an entry in ``step.short``. Returns the sequence,
        or None if it has to wait or the queue is empty.
        """
        if not self.waiting or not self._free_slots:
            return None
        sequence, pool = self.waiting[index], self.pool
        known, wants_read = sequence.num_tokens, sequence.wants_read
        prefix = self.prefixes.find(sequence)
        num_computed = prefix.length * pool.tokens_per_block
        if sequence.media and not wants_read and (shortage := self.media_shortage(sequence, num_computed)) is not None:
            del self.waiting[index]
            sequence.state = State.FINISHED
            sequence.embeddings = []
            step.short.append((sequence, shortage))
            return sequence
        is_whole = not (wants_read or self.limits.enable_chunked_prefill)
        if is_whole and budget < known - num_computed <= self.limits.max_num_tokens:
            return None
        total = -(-known // pool.tokens_per_block)
        blocks = self.prefixes.take(sequence, prefix, total=total, reserve=self._watermark if self.num_active else 0)
        if blocks is None:
            return None
        del self.waiting[index]
        sequence.hold(
            self._free_slots.pop(), blocks, [prefix.length - len(needed) for needed in prefix.blocks],
            total * pool.tokens_per_block, num_computed,
        )  # fmt: skip
        sequence.num_registered = sequence.num_reused = prefix.length
        if sequence.retention is not None:
            self.groups.retain(sequence, sequence.retention, range(prefix.length))
        step.admitted.append(sequence)
        if wants_read or prefix.num_below:
            sequence.state = State.READING
            self.reading.append(sequence)
            if wants_read:
                step.reads.append(sequence)
            else:
                step.num_loads += 1
        else:
            sequence.state = State.RUNNING
            self.running.append(sequence)
        return sequence

    def give_up_read(self, sequence: Sequence) -> None:
        """READING -> WAITING: the KV in host memory does not come, and the sequence will compute it."""
        self.reading.remove(sequence)
        self._let_go(sequence)
        sequence.state = State.WAITING
        sequence.is_resumed = sequence.skips_host = True
        self.add(sequence)

    def end_read(self, sequence: Sequence, num_computed: int) -> None:
        """READING -> RUNNING with ``num_computed`` tokens in place: the prompt on success, else the reused prefix."""
        self.reading.remove(sequence)
        sequence.state = State.RUNNING
        sequence.num_computed = sequence.num_written = sequence.num_found = num_computed
        sequence.skip_media(num_computed)
        self.running.append(sequence)

    def hold_media(self, sequence: Sequence) -> None:
        """Makes a sequence hold those of its media embeddings that are stored."""
        held = sequence.embeddings or [None] * len(sequence.media)
        sequence.embeddings = self.media.hold(sequence.media, held)

    def media_shortage(self, sequence: Sequence, num_computed: int) -> EmbeddingShortage | None:
        """Returns why a sequence with media can't be computed from ``num_computed`` on, or None if it can."""
        self.hold_media(sequence)
        shortage = self.media.shortage(sequence.media, sequence.embeddings, num_computed)
        sequence.skip_media(num_computed)
        return shortage

    def finish(self, sequence: Sequence, *, keep_tokens: int = 0) -> list[int]:
        """Ends a sequence in any state. Releases its blocks, except those kept for a handoff.

        With ``keep_tokens``, the blocks that a query after the first ``keep_tokens`` tokens (all written) reads stay
        referenced; they are returned, group by group. A sequence that is part of a step in flight leaves when that step
        is settled; it can keep no blocks.
        """
        if self._pace is not None and sequence.output_token_ids:
            computed = len(sequence.prompt_token_ids) - sequence.num_found  # may include output after a preemption
            self._pace.ended(max(0, computed), len(sequence.output_token_ids))
        if sequence.state is State.WAITING:
            self.waiting.remove(sequence)
        elif sequence.state is State.READING:
            self.reading.remove(sequence)
        elif sequence.state is State.RUNNING:
            self.running.remove(sequence)
        sequence.state = State.FINISHED
        sequence.embeddings = []
        if sequence.num_steps:
            assert not keep_tokens
            self.leaving.append(sequence)
            return []
        return self._let_go(sequence, keep_tokens)

    def settle(self, sequence: Sequence) -> bool:
        """Counts a step with this sequence as done.

        Returns False if the sequence has ended, and its result must be dropped.
        """
        sequence.num_steps -= 1
        if sequence.state is not State.FINISHED:
            return True
        if not sequence.num_steps:
            self.leaving.remove(sequence)
            self._let_go(sequence)
        return False

    def _let_go(self, sequence: Sequence, keep_tokens: int = 0) -> list[int]:
        kept: list[int] = []
        if keep_tokens:
            for group, needed in enumerate(self.groups.exported(keep_tokens)):
                blocks, left = sequence.block_ids[group], sequence.num_left[group]
                self.pool.release(blocks[left : needed.start])
                kept += blocks[needed.start : needed.stop]
                sequence.num_left[group] = needed.stop
        self.pool.release(self.groups.by_age(sequence.held_blocks))
        if sequence.slot >= 0:
            self._free_slots.append(sequence.slot)
        sequence.slot = -1
        sequence.block_ids, sequence.num_left, sequence.room = [], [], 0
        sequence.held = None
        sequence.num_computed = sequence.num_written = sequence.num_registered = 0
        return kept

    def check(self, leased: list[tuple[int, ...]] | None = None) -> None:
        """Raises AssertionError unless pool, queues and slots agree. ``leased``: block lists that leases hold."""
        holding = (*self.running, *self.reading, *self.leaving)
        holders: list[list[int]] = [blocks for s in holding for blocks in s.held_blocks]
        holders += [list(blocks) for blocks in leased or ()]
        if self.prefixes.tier is not None:
            self.prefixes.tier.check()
            holders += self.prefixes.tier.loading
        self.pool.check(holders)
        slots = [s.slot for s in holding]
        if sorted(slots + self._free_slots) != list(range(self.max_batch_size)):
            raise AssertionError(f"slots: held {sorted(slots)} + free {sorted(self._free_slots)}; expected each once")
        for sequence in self.waiting:
            check_waiting(sequence)
        for sequence in self.running:
            check_media(sequence, self.media)
        for sequence in holding:
            check_holding(sequence, self.groups, self.pool.tokens_per_block, is_leaving=sequence in self.leaving)
