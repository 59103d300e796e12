"""The kernel that copies blocks out of another GPU's pool."""

# Triton has no type stubs, and its decorator hides the signature.
# mypy: disable-error-code="misc, untyped-decorator, no-untyped-def"

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["count"])
def gather_blocks_kernel(source, target, ids, count, BLOCK_WORDS: tl.constexpr, TILE: tl.constexpr):
    """``target[ids[count + i]] = source[ids[i]]`` for i < ``count``, for blocks of ``BLOCK_WORDS`` int64.

    Works with any number of programs: program p of P copies tiles p, p + P, p + 2P, … All loads of a tile are in flight
    before its first store, to hide NVLink's latency.
    """
    tiles = tl.cdiv(BLOCK_WORDS, TILE)
    for item in range(tl.program_id(0), count * tiles, tl.num_programs(0)):
        words = (item % tiles) * TILE + tl.arange(0, TILE)
        inside = words < BLOCK_WORDS
        there = tl.load(ids + item // tiles).to(tl.int64) * BLOCK_WORDS
        here = tl.load(ids + count + item // tiles).to(tl.int64) * BLOCK_WORDS
        tl.store(target + here + words, tl.load(source + there + words, mask=inside), mask=inside)
