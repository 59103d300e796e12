"""The kernel that fills in a decode's token from the result of the previous step."""

# Triton has no type stubs, and its decorator hides the signature.
# mypy: disable-error-code="misc, untyped-decorator, no-untyped-def"

from __future__ import annotations

import triton
import triton.language as tl

from trtx.torch_engine import step as batch

FROM_SLOT = tl.constexpr(batch.FROM_SLOT)


@triton.jit(do_not_specialize_on_alignment=["tokens", "slots"])
def fill_kernel(tokens, slots, last_tokens, filled):
    """One row for each program."""
    row = tl.program_id(0)
    token = tl.load(tokens + row)
    last = tl.load(last_tokens + tl.load(slots + row))
    tl.store(filled + row, tl.where(token == FROM_SLOT, last, token))
