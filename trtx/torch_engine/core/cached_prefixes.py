"""The cached prefix of a sequence: which blocks it has on the device and in host memory, and how it takes them."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass

from trtx.torch_engine.core.block_pool import BlockPool
from trtx.torch_engine.core.host_tier import HostTier
from trtx.torch_engine.core.kv_cache_groups import LayerGroups, group_name
from trtx.torch_engine.core.sequence import Sequence


@dataclass(frozen=True, slots=True)
class CachedPrefix:
    """The longest usable prefix. ``blocks``: for each KV cache group the blocks of the prefix that it needs; None: only
    host memory has the block.
    """

    names: SequenceOf[bytes]  # of the blocks that the sequence could reuse
    length: int  # in blocks
    blocks: list[list[int | None]]

    @property
    def num_below(self) -> int:
        return sum(block_id is None for blocks in self.blocks for block_id in blocks)

    @property
    def below(self) -> list[bytes]:
        """The pool's names of the blocks that only host memory has, group by group."""
        return [
            group_name(self.names[self.length - len(blocks) + index], group)
            for group, blocks in enumerate(self.blocks)
            for index, block_id in enumerate(blocks)
            if block_id is None
        ]


class CachedPrefixes:
    """Finds and takes the cached prefixes of sequences."""

    def __init__(self, pool: BlockPool, groups: LayerGroups, tier: HostTier | None = None) -> None:
        self.tier = tier
        self._pool = pool
        self._groups = groups

    def find(self, sequence: Sequence) -> CachedPrefix:
        # At least one token must be computed, to sample from. After a read, that token is the prefill side's first
        # token.
        length = len(sequence.prompt_token_ids) if sequence.wants_read else sequence.num_tokens - 1
        reusable = _reusable(sequence, length, self._pool)
        names = sequence.names(reusable, self._pool.tokens_per_block)[:reusable] if self._pool.enable_reuse else []
        uses_tier = self.tier is not None and not (sequence.wants_read or sequence.skips_host)
        found, blocks = self._groups.match(names, self.tier.can_load if self.tier is not None and uses_tier else None)
        return CachedPrefix(names, found, blocks)

    def shareable_tokens(self, sequence: Sequence) -> int:
        """Leading tokens of a sequence's prompt that it would not compute if another sequence had computed them."""
        if not self._pool.enable_reuse:
            return 0
        reusable = _reusable(sequence, len(sequence.prompt_token_ids) - 1, self._pool)
        return reusable * self._pool.tokens_per_block

    def take(self, sequence: Sequence, prefix: CachedPrefix, *, total: int, reserve: int) -> list[list[int]] | None:
        """Takes the prefix and allocates the other blocks. Returns one list of ``total`` blocks per KV cache group.

        If some blocks of the prefix are in host memory, queues their load. Returns None and changes nothing if fewer
        than ``reserve`` blocks would remain available, or if another sequence is loading one of the blocks already.
        """
        pool, count = self._pool, self._groups.count
        below = prefix.below
        matched = [[block_id for block_id in blocks if block_id is not None] for blocks in prefix.blocks]
        needed = (total - prefix.length) * count + len(below)
        if needed + sum(map(pool.num_evictable, matched)) + reserve > pool.num_available:
            return None
        if below and self.tier is not None and self.tier.is_loading(below):
            return None
        for taken in matched:
            pool.take(taken)
        host_ids = self.tier.reserve(below) if below and self.tier is not None else []
        fresh = pool.allocate(needed)
        assert fresh is not None
        loaded, fresh = fresh[: len(below)], fresh[len(below) :]
        rest = iter(loaded)
        whole = [[next(rest) if block_id is None else block_id for block_id in blocks] for blocks in prefix.blocks]
        missed = (len(prefix.names) - prefix.length) * count
        pool.counters.count(missed=missed, loaded=len(below))
        if self.tier is not None:
            self.tier.admitted(needed)
            self.tier.counters.missed += missed
            self.tier.ask(group_name(name, group) for group in range(count) for name in prefix.names)
            if below:
                num_tokens = prefix.length * pool.tokens_per_block
                self.tier.load(sequence, below, host_ids, loaded, num_tokens)
        return self._groups.lists(prefix.length, whole, fresh)


def _reusable(sequence: Sequence, length: int, pool: BlockPool) -> int:
    """Number of full blocks among the first ``length`` tokens whose KV the sequence need not compute itself."""
    needs_every_logit = sequence.sampling.prompt_logprobs is not None and not sequence.output_token_ids
    return 0 if needs_every_logit else length // pool.tokens_per_block
