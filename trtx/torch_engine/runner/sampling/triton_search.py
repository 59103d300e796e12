"""The last sampling kernel: decides the remaining rows with passes over their logits, and counts every row's token."""

# Triton has no type stubs, and its decorator hides the signature.
# mypy: disable-error-code="misc, untyped-decorator, no-untyped-def"

from __future__ import annotations

import triton
import triton.language as tl

from trtx.torch_engine.runner.sampling.triton_arithmetic import (
    FIELDS,
    HAS_TOP_P,
    MIN_WEIGHT,
    MODE,
    PART,
    SCALE,
    TOP_K,
    bits_as_float,
    edits_at,
    is_before,
    keys_of,
    load_best,
    load_logits,
    load_part,
    shift_of,
    top_p_limit,
    value_of,
    weights_of,
)
from trtx.torch_engine.runner.sampling.triton_draw import (
    ALL,
    BEFORE,
    CANDIDATES_BEFORE,
    DECIDED,
    DRAWN,
    LOWEST_KEY,
    draw_before,
    sums_at,
)


@triton.jit
def _least_key_of_top_k(row_logits, row_params, maxima, is_group, best, top_k, vocab, groups, parts, shift):
    """The largest key such that at least ``top_k`` tokens are not below it."""
    low = keys_of(best * 0 - float("inf"), shift)
    high = keys_of(best, shift) + 1
    if top_k <= groups:  # top_k group maxima give a lower bound
        above = high
        while low + 1 < above:
            middle = (low & above) + ((low ^ above) >> 1)
            enough = tl.sum((is_group & (maxima >= middle)).to(tl.int32), axis=0) >= top_k
            low = tl.where(enough, middle, low)
            above = tl.where(enough, above, middle)
    while low + 1 < high:
        span = high.to(tl.int64) - low.to(tl.int64)
        first = (low + tl.maximum(span // 4, 1)).to(tl.int32)
        second = (low + tl.maximum(span // 2, 1)).to(tl.int32)
        third = (low + tl.maximum(span * 3 // 4, 1)).to(tl.int32)
        at_first = tl.zeros((PART,), tl.int32)
        at_second = tl.zeros((PART,), tl.int32)
        at_third = tl.zeros((PART,), tl.int32)
        for part in range(parts):
            ids, values = load_part(row_logits, row_params, part, vocab)
            keys = tl.where(ids < vocab, keys_of(values, shift), LOWEST_KEY)
            at_first += (keys >= first).to(tl.int32)
            at_second += (keys >= second).to(tl.int32)
            at_third += (keys >= third).to(tl.int32)
        has_first = tl.sum(at_first, axis=0) >= top_k
        has_second = tl.sum(at_second, axis=0) >= top_k
        has_third = tl.sum(at_third, axis=0) >= top_k
        high = tl.where(has_third, high, tl.where(has_second, third, tl.where(has_first, second, first)))
        low = tl.where(has_third, third, tl.where(has_second, second, tl.where(has_first, first, low)))
    return low


@triton.jit
def _end_of_top_k(row_logits, row_params, value, top_k, vocab, parts):
    """End id of top-k: exactly ``top_k`` tokens are before it in the order.

    ``value``: the logit of the last of them.
    """
    above = tl.zeros((PART,), tl.int32)
    for part in range(parts):
        _, values = load_part(row_logits, row_params, part, vocab)
        above += (values > value).to(tl.int32)
    ties = top_k - tl.sum(above, axis=0)
    end = top_k * 0
    for part in range(parts):
        ids, values = load_part(row_logits, row_params, part, vocab)
        is_tie = (values == value) & (ids < vocab)
        rank = tl.cumsum(is_tie.to(tl.int32), axis=0)
        end = tl.maximum(end, tl.max(tl.where(is_tie & (rank == ties), ids + 1, 0), axis=0))
        ties -= tl.sum(is_tie.to(tl.int32), axis=0)
    return end


@triton.jit
def _sums_before(row_logits, row_params, best, value, token, vocab, parts, PARTS: tl.constexpr):
    """Returns (total weight of the tokens before ``token``, partial sums of the candidates' weights among them)."""
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
def _draw_until_kept(
    row_logits, row_params, position, attempt, best, value, token, candidates, limit, vocab, parts,
    PARTS: tl.constexpr,
):  # fmt: skip
    """Draws among the candidates before ``token``, in as many attempts as top-p needs."""
    has_top_p = (tl.load(row_params + MODE) & HAS_TOP_P) != 0
    is_drawing = limit > 0  # always True
    while is_drawing:
        token = draw_before(
            row_logits, row_params, position, attempt, best, value, token, candidates, vocab, PARTS
        )  # fmt: skip
        is_drawing = has_top_p
        if has_top_p:
            value = load_logits(row_logits, row_params, token, vocab)
            before, candidates = _sums_before(row_logits, row_params, best, value, token, vocab, parts, PARTS)
            is_drawing = before >= limit
            attempt += 1
    return token


@triton.jit(do_not_specialize_on_alignment=["slots", "positions"])
def search_kernel(
    logits, tokens, states, slots, positions, rows, part_best, group_keys, sums, last_tokens, vocab, groups, parts,
    PARTS: tl.constexpr, GROUPS: tl.constexpr, IS_BFLOAT16: tl.constexpr,
):  # fmt: skip
    """Decides the open rows; then counts every row's token in its edits and stores it as its slot's last token."""
    row = tl.program_id(0)
    row_params = rows + tl.load(slots + row).to(tl.int64) * FIELDS
    row_logits = logits + row.to(tl.int64) * vocab
    token = tl.load(tokens + row).to(tl.int32)
    state = tl.load(states + row)
    if state != DECIDED:
        position = tl.load(positions + row)
        best = tl.max(load_best(part_best, row, parts, PARTS), axis=0)
        if state == DRAWN:
            at = tl.arange(0, PARTS)
            own = at < parts
            total = tl.sum(tl.load(sums_at(sums, row, ALL, PARTS) + at, mask=own, other=0), axis=0)
            before = tl.sum(tl.load(sums_at(sums, row, BEFORE, PARTS) + at, mask=own, other=0), axis=0)
            limit = top_p_limit(row_params, total)
            if before >= limit:
                value = load_logits(row_logits, row_params, token, vocab)
                candidates = tl.load(sums_at(sums, row, CANDIDATES_BEFORE, PARTS) + at, mask=own, other=0)
                token = _draw_until_kept(
                    row_logits, row_params, position, tl.zeros((), tl.int64) + 2, best, value, token, candidates,
                    limit, vocab, parts, PARTS,
                )  # fmt: skip
        else:
            top_k = tl.load(row_params + TOP_K).to(tl.int32)
            shift = shift_of(row_params, IS_BFLOAT16)
            at_group = tl.arange(0, GROUPS)
            is_group = at_group < groups
            maxima = tl.load(group_keys + row * groups + at_group, mask=is_group, other=LOWEST_KEY)
            least = _least_key_of_top_k(
                row_logits, row_params, maxima, is_group, best, top_k, vocab, groups, parts, shift
            )  # fmt: skip
            value = value_of(least, shift)
            end = _end_of_top_k(row_logits, row_params, value, top_k, vocab, parts)
            total, candidates = _sums_before(row_logits, row_params, best, value, end, vocab, parts, PARTS)
            token = _draw_until_kept(
                row_logits, row_params, position, tl.zeros((), tl.int64), best, value, end, candidates,
                top_p_limit(row_params, total), vocab, parts, PARTS,
            )  # fmt: skip
        tl.store(tokens + row, token.to(tl.int64))
    tl.store(last_tokens + tl.load(slots + row), tl.maximum(token, 0))
    address = edits_at(row_params)
    if (address != 0) & (token >= 0):
        count = address.to(tl.pointer_type(tl.int32)) + token
        tl.store(count, tl.load(count) + 1)
