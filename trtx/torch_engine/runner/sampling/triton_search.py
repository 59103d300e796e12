"""The last kernel of sampling: rows that the others leave open, in passes over the row; then every row is counted."""

# Triton has no type stubs, and its decorator hides the signature.
# mypy: disable-error-code="misc, untyped-decorator, no-untyped-def"

from __future__ import annotations

import triton
import triton.language as tl

from trtx.torch_engine.runner.sampling.triton_arithmetic import (
    EDITS,
    FIELDS,
    HAS_TOP_P,
    MIN_WEIGHT,
    MODE,
    SCALE,
    TOP_K,
    bits_as_float,
    first_beyond,
    is_before,
    keys_of,
    load_best,
    load_logits,
    load_part,
    part_beyond,
    shift_of,
    top_p_limit,
    value_of,
    wanted_of,
    weights_of,
)
from trtx.torch_engine.runner.sampling.triton_draw import (
    ALL,
    BEFORE,
    CANDIDATES_BEFORE,
    DECIDED,
    DRAWN,
    LOWEST_KEY,
    sums_at,
)

BITS = tl.constexpr(4)  # of a key that one pass over the row finds
TRIED = tl.constexpr(2**4)
FIRST_STEP = tl.constexpr(2**32 // 2**4)


@triton.jit
def _end_of_top_k(row_logits, row_params, top_k, vocab, parts, shift):
    """(logit, id): the ``top_k`` first tokens are those before it."""
    low = (top_k * 0 + LOWEST_KEY) >> shift
    step = (top_k * 0 + FIRST_STEP) >> shift
    while step > 0:
        tried = low + step * tl.arange(0, TRIED)
        counts = tl.zeros((TRIED,), tl.int32)
        for part in range(parts):
            ids, values = load_part(row_logits, row_params, part, vocab)
            keys = tl.where(ids < vocab, keys_of(values, shift), LOWEST_KEY)
            counts += tl.sum((keys[:, None] >= tried[None, :]).to(tl.int32), axis=0)
        low += step * (tl.sum((counts >= top_k).to(tl.int32), axis=0) - 1)
        step = step >> BITS
    value = value_of(low, shift)
    ties = top_k
    for part in range(parts):
        _, values = load_part(row_logits, row_params, part, vocab)
        ties -= tl.sum((values > value).to(tl.int32), axis=0)
    end = top_k * 0
    for part in range(parts):
        ids, values = load_part(row_logits, row_params, part, vocab)
        is_tie = (values == value) & (ids < vocab)
        rank = tl.cumsum(is_tie.to(tl.int32), axis=0)
        end = tl.maximum(end, tl.max(tl.where(is_tie & (rank == ties), ids + 1, 0), axis=0))
        ties -= tl.sum(is_tie.to(tl.int32), axis=0)
    return value, end


@triton.jit
def _sums_before(row_logits, row_params, best, value, token, vocab, parts, PARTS: tl.constexpr):
    """(the weight of all tokens before one, the candidates' among them by parts)"""
    scale = bits_as_float(tl.load(row_params + SCALE))
    floor = tl.load(row_params + MIN_WEIGHT)
    before = tl.zeros((), tl.int64)
    sums = tl.zeros((PARTS,), tl.int64)
    for part in range(parts):
        ids, values = load_part(row_logits, row_params, part, vocab)
        found = tl.where(is_before(values, ids, value, token), weights_of(values, best, scale), 0)
        mass = tl.sum(found, axis=0)
        before += mass
        if floor > 0:
            mass = tl.sum(tl.where(found >= floor, found, 0), axis=0)
        sums = tl.where(tl.arange(0, PARTS) == part, mass, sums)
    return before, sums


@triton.jit
def _draw_before(
    row_logits, row_params, position, attempt, best, value, token, sums, has_top_p, limit, vocab, parts,
    PARTS: tl.constexpr,
):  # fmt: skip
    """A token among the candidates before one, whose sums by parts are ``sums``, in as many attempts as it takes."""
    scale = bits_as_float(tl.load(row_params + SCALE))
    floor = tl.load(row_params + MIN_WEIGHT)
    is_drawing = limit > 0  # always
    while is_drawing:
        part, wanted = part_beyond(
            sums, wanted_of(row_params, position, attempt, tl.sum(sums, axis=0)), PARTS
        )  # fmt: skip
        ids, values = load_part(row_logits, row_params, part, vocab)
        found = weights_of(values, best, scale)
        is_candidate = is_before(values, ids, value, token) & (found >= floor)
        token = first_beyond(tl.where(is_candidate, found, 0), ids, wanted)
        is_drawing = has_top_p
        if has_top_p:
            value = load_logits(row_logits, row_params, token, vocab)
            before, sums = _sums_before(row_logits, row_params, best, value, token, vocab, parts, PARTS)
            is_drawing = before >= limit
            attempt += 1
    return token


@triton.jit(do_not_specialize_on_alignment=["slots", "positions"])
def search_kernel(
    logits, tokens, states, slots, positions, rows, part_best, sums, vocab, parts,
    PARTS: tl.constexpr, IS_BFLOAT16: tl.constexpr,
):  # fmt: skip
    """Decides rows that are not; one more of its token in each row's edits."""
    row = tl.program_id(0)
    row_params = rows + tl.load(slots + row).to(tl.int64) * FIELDS
    row_logits = logits + row.to(tl.int64) * vocab
    token = tl.load(tokens + row).to(tl.int32)
    state = tl.load(states + row)
    if state != DECIDED:
        position = tl.load(positions + row)
        best = tl.max(load_best(part_best, row, parts, PARTS), axis=0)
        has_top_p = (tl.load(row_params + MODE) & HAS_TOP_P) != 0
        at = tl.arange(0, PARTS)
        if state == DRAWN:
            own = at < parts
            total = tl.sum(tl.load(sums_at(sums, row, ALL, PARTS) + at, mask=own, other=0), axis=0)
            before = tl.sum(tl.load(sums_at(sums, row, BEFORE, PARTS) + at, mask=own, other=0), axis=0)
            limit = top_p_limit(row_params, total)
            if before >= limit:
                value = load_logits(row_logits, row_params, token, vocab)
                candidates = tl.load(sums_at(sums, row, CANDIDATES_BEFORE, PARTS) + at, mask=own, other=0)
                token = _draw_before(
                    row_logits, row_params, position, tl.zeros((), tl.int64) + 1, best, value, token, candidates,
                    has_top_p, limit, vocab, parts, PARTS,
                )  # fmt: skip
        else:
            top_k = tl.load(row_params + TOP_K).to(tl.int32)
            value, end = _end_of_top_k(
                row_logits, row_params, top_k, vocab, parts, shift_of(row_params, IS_BFLOAT16)
            )  # fmt: skip
            total, candidates = _sums_before(row_logits, row_params, best, value, end, vocab, parts, PARTS)
            token = _draw_before(
                row_logits, row_params, position, tl.zeros((), tl.int64), best, value, end, candidates,
                has_top_p, top_p_limit(row_params, total), vocab, parts, PARTS,
            )  # fmt: skip
        tl.store(tokens + row, token.to(tl.int64))
    address = tl.load(row_params + EDITS)
    if (address != 0) & (token >= 0):
        count = address.to(tl.pointer_type(tl.int32)) + token
        tl.store(count, tl.load(count) + 1)
