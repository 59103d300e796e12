"""The kernel that applies token masks (guided decoding) to logits."""

# Triton has no type stubs, and its decorator hides the signature.
# mypy: disable-error-code="misc, untyped-decorator, no-untyped-def"

from __future__ import annotations

import triton
import triton.language as tl

from trtx.torch_engine.runner.sampling.triton_arithmetic import PART


@triton.jit(do_not_specialize=["place"], do_not_specialize_on_alignment=["slots"])
def mask_kernel(logits, slots, mask_rows, masks, place, vocab, words, parts, PROGRAMS: tl.constexpr):
    """Overwrites the logits of tokens that a row must not sample with minus infinity.

    ``PROGRAMS`` programs share the parts of a row. A row whose slot is unlimited costs one load. ``place``: number of
    drafted tokens before the rows.
    """
    row = tl.program_id(0)
    mask_row = tl.load(mask_rows + tl.load(slots + row))
    if mask_row < 0:
        return
    bits_of_row = masks + (mask_row + place).to(tl.int64) * words
    for part in range(tl.program_id(1), parts, PROGRAMS):
        ids = part * PART + tl.arange(0, PART)
        inside = ids < vocab
        bits = tl.load(bits_of_row + (ids >> 5), mask=inside, other=-1)
        is_banned = inside & (((bits >> (ids & 31)) & 1) == 0)
        tl.store(logits + row.to(tl.int64) * vocab + ids, -float("inf"), mask=is_banned)
