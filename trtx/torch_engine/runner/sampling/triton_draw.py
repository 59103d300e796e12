"""Triton kernels that sample exactly the tokens that :mod:`definition` defines. They are launched in this order:

:func:`edit_kernel` applies penalties and banned ids to the rows that have them. :func:`summaries_kernel` finds each
row's largest logit in one pass over the logits. For rows without top-k, :func:`weights_kernel` sums the weights in
another pass.

:func:`choose_kernel` draws a token. Without top-k, it picks a part of the row by the parts' sums, and then a token of
the part. With top-k, it holds the 128 groups of 64 tokens with the largest maxima in registers, and draws among them.
Every logit outside of these groups is below the least of their maxima.

If a row without top-k has top-p, :func:`check_kernel` sums the weights before the drawn token in another pass, and
:func:`retry_kernel` decides whether top-p keeps the token. If not, retry_kernel draws a second token, which is checked
in the same way. Rows that are then still undecided are rare; :mod:`triton_search` decides them.
"""

# Triton has no type stubs, and its decorator hides the signature.
# mypy: disable-error-code="misc, untyped-decorator, no-untyped-def"

from __future__ import annotations

import triton
import triton.language as tl

from trtx.torch_engine.runner.sampling import definition
from trtx.torch_engine.runner.sampling.triton_arithmetic import (
    BEYOND,
    FIELDS,
    HAS_TOP_P,
    IS_SAMPLED,
    MIN_WEIGHT,
    MODE,
    NO_TOKEN,
    PART,
    PRESENCE,
    SCALE,
    TOP_K,
    bits_as_float,
    edited_logits,
    edits_at,
    first_beyond,
    has_token,
    is_before,
    keys_of,
    load_best,
    load_logits,
    load_part,
    part_beyond,
    shift_of,
    top_p_limit,
    wanted_of,
    weights_of,
)
from trtx.torch_engine.sampling_plan import LARGEST_FLOAT

BANNED = tl.constexpr(definition.BANNED)
LARGEST = tl.constexpr(LARGEST_FLOAT)
GROUP = tl.constexpr(64)  # tokens that share one maximum
MOST_GROUPS = tl.constexpr(128)  # groups that one program holds in registers
LOWEST_KEY = tl.constexpr(-(2**31))  # below the key of minus infinity
# State of a row between kernels.
DECIDED, DRAWN, UNDECIDED = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
# Kinds of a row's partial sums: the weights of all tokens, of the candidates, of the tokens before the drawn token, and
# of the candidates before the drawn token.
ALL, CANDIDATES, BEFORE, CANDIDATES_BEFORE = (tl.constexpr(at) for at in range(4))
KINDS_OF_SUMS = tl.constexpr(4)


@triton.jit
def sums_at(sums, row, kind, PARTS: tl.constexpr):
    return sums + (row * KINDS_OF_SUMS + kind) * PARTS


@triton.jit(do_not_specialize_on_alignment=["slots"])
def edit_kernel(logits, slots, rows, vocab, parts, PROGRAMS: tl.constexpr):
    """Writes the logits of rows with edits, edited as in ``definition.sample``. NaN becomes infinity.

    ``PROGRAMS`` programs share the parts of a row.
    """
    row = tl.program_id(0)
    row_params = rows + tl.load(slots + row).to(tl.int64) * FIELDS
    address = edits_at(row_params)
    if address == 0:
        return
    edits_of_row = tl.multiple_of(address.to(tl.pointer_type(tl.int32)), 16)
    edited = edited_logits(address, vocab)
    repetition = bits_as_float(tl.load(row_params + SCALE) >> 32)
    presence = bits_as_float(tl.load(row_params + PRESENCE))
    frequency = bits_as_float(tl.load(row_params + PRESENCE) >> 32)
    for part in range(tl.program_id(1), parts, PROGRAMS):
        ids = part * PART + tl.arange(0, PART)
        inside = ids < vocab
        loaded = tl.load(logits + row.to(tl.int64) * vocab + ids, mask=inside, other=0.0).to(tl.float32)
        edits = tl.load(edits_of_row + ids, mask=inside, other=0)
        kept = tl.where(loaded > 0, tl.div_rn(loaded, loaded * 0 + repetition), loaded * repetition)
        kept = tl.clamp(kept, -LARGEST, LARGEST)
        lost = tl.clamp(presence + frequency * edits.to(tl.float32), -LARGEST, LARGEST)
        changed = tl.clamp(kept - lost, -LARGEST, LARGEST)
        values = tl.where((edits > 0) & (loaded > -float("inf")), changed, loaded)
        values = tl.where(edits == BANNED, -float("inf"), values)
        tl.store(edited + ids, tl.where(loaded < float("inf"), values, float("inf")), mask=inside)


@triton.jit(do_not_specialize_on_alignment=["slots"])
def summaries_kernel(
    logits, slots, rows, part_best, group_keys, vocab, groups, parts, IS_BFLOAT16: tl.constexpr,
):  # fmt: skip
    """Finds the largest logit of each part of a row, and with top-k also the key of each group's largest logit.

    NaN counts as infinity. A row with an infinite maximum gets no token, so later kernels need not handle NaN.
    """
    row = tl.program_id(0)
    part = tl.program_id(1)
    row_params = rows + tl.load(slots + row).to(tl.int64) * FIELDS
    GROUPS: tl.constexpr = PART // GROUP
    group = part * GROUPS + tl.arange(0, GROUPS)
    ids = group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    values = load_logits(logits + row.to(tl.int64) * vocab, row_params, ids, vocab)
    best = tl.max(tl.where(values < float("inf"), values, float("inf")), axis=1)
    tl.store(part_best + row * parts + part, tl.max(best, axis=0))
    if tl.load(row_params + TOP_K) > 0:
        tl.store(group_keys + row * groups + group, keys_of(best, shift_of(row_params, IS_BFLOAT16)), group < groups)


@triton.jit(do_not_specialize_on_alignment=["slots"])
def weights_kernel(logits, slots, rows, part_best, sums, vocab, parts, PARTS: tl.constexpr):
    """For sampled rows without top-k: sums the weights of each part, over all tokens and over the candidates."""
    row = tl.program_id(0)
    part = tl.program_id(1)
    row_params = rows + tl.load(slots + row).to(tl.int64) * FIELDS
    if ((tl.load(row_params + MODE) & IS_SAMPLED) == 0) | (tl.load(row_params + TOP_K) > 0):
        return
    best = tl.max(load_best(part_best, row, parts, PARTS), axis=0)
    if has_token(best) == 0:
        return
    _, values = load_part(logits + row.to(tl.int64) * vocab, row_params, part, vocab)
    found = weights_of(values, best, bits_as_float(tl.load(row_params + SCALE)))
    floor = tl.load(row_params + MIN_WEIGHT)
    mass = tl.sum(found, axis=0)
    tl.store(sums_at(sums, row, ALL, PARTS) + part, mass)
    if floor > 0:
        mass = tl.sum(tl.where(found >= floor, found, 0), axis=0)
    tl.store(sums_at(sums, row, CANDIDATES, PARTS) + part, mass)


@triton.jit
def draw_before(
    row_logits, row_params, position, attempt, best, value, token, candidates, vocab, PARTS: tl.constexpr
):  # fmt: skip
    """Draws one of the candidates that precede ``token`` in the order by logit.

    ``value``: the logit of ``token``. ``candidates``: the sum of these candidates' weights in each part.
    """
    wanted = wanted_of(row_params, position, attempt, tl.sum(candidates, axis=0))
    part, wanted = part_beyond(candidates, wanted, PARTS)
    ids, values = load_part(row_logits, row_params, part, vocab)
    found = weights_of(values, best, bits_as_float(tl.load(row_params + SCALE)))
    is_candidate = is_before(values, ids, value, token) & (found >= tl.load(row_params + MIN_WEIGHT))
    return first_beyond(tl.where(is_candidate, found, 0), ids, wanted)


@triton.jit
def _draw_from_top_k(
    row_logits, row_params, position, best, maxima, chosen_groups, vocab, groups,
    GROUPS: tl.constexpr, IS_BFLOAT16: tl.constexpr,
):  # fmt: skip
    """Draws among the groups with the largest maxima. Returns (token, whether it is decided)."""
    top_k = tl.load(row_params + TOP_K).to(tl.int32)
    shift = shift_of(row_params, IS_BFLOAT16)
    top = keys_of(best, shift)
    # Choose all groups whose maximum reaches `least`, which is as low as MOST_GROUPS allows.
    at_group = tl.arange(0, GROUPS)
    is_group = at_group < groups
    least = top + 1
    below = tl.min(tl.where(is_group, maxima, top), axis=0) - 1
    if groups <= MOST_GROUPS:
        least = below + 1
    while below + 1 < least:
        middle = (least & below) + ((least ^ below) >> 1)
        fits = tl.sum((is_group & (maxima >= middle)).to(tl.int32), axis=0) <= MOST_GROUPS
        least = tl.where(fits, middle, least)
        below = tl.where(fits, below, middle)
    is_chosen = is_group & (maxima >= least)
    place = tl.cumsum(is_chosen.to(tl.int32), axis=0) - 1
    chosen = tl.sum(is_chosen.to(tl.int32), axis=0)
    tl.store(chosen_groups + place, at_group, mask=is_chosen)
    tl.debug_barrier()  # other threads of this program read them

    at = tl.arange(0, MOST_GROUPS * GROUP)
    group = tl.load(chosen_groups + at // GROUP, mask=at // GROUP < chosen, other=groups)
    ids = group * GROUP + at % GROUP
    values = load_logits(row_logits, row_params, ids, vocab)
    keys = keys_of(values, shift)
    keys = tl.where((ids < vocab) & (keys >= least), keys, LOWEST_KEY)
    is_decided = tl.sum((keys > LOWEST_KEY).to(tl.int32), axis=0) >= top_k

    low = least
    high = top + 1
    while low + 1 < high:
        middle = (low & high) + ((low ^ high) >> 1)
        enough = tl.sum((keys >= middle).to(tl.int32), axis=0) >= top_k
        low = tl.where(enough, middle, low)
        high = tl.where(enough, high, middle)
    ties = top_k - tl.sum((keys > low).to(tl.int32), axis=0)
    rank = tl.cumsum((keys == low).to(tl.int32), axis=0)  # from 1
    is_kept = (keys > low) | ((keys == low) & (rank <= ties))
    found = tl.where(is_kept, weights_of(values, best, bits_as_float(tl.load(row_params + SCALE))), 0)
    has_top_p = (tl.load(row_params + MODE) & HAS_TOP_P) != 0
    limit = top_p_limit(row_params, tl.sum(found, axis=0))
    candidates = tl.where(found >= tl.load(row_params + MIN_WEIGHT), found, 0)
    token = tl.min(ids, axis=0)
    attempt = tl.zeros((), tl.int64)
    is_drawing = is_decided
    while is_drawing:
        token = first_beyond(candidates, ids, wanted_of(row_params, position, attempt, tl.sum(candidates, axis=0)))
        is_drawing = has_top_p
        if has_top_p:
            value = tl.max(tl.where(ids == token, values, -float("inf")), axis=0)
            is_ahead = is_before(values, ids, value, token)
            is_drawing = tl.sum(tl.where(is_ahead, found, 0), axis=0) >= limit
            candidates = tl.where(is_ahead, candidates, 0)
            attempt += 1
    return token, is_decided


@triton.jit(do_not_specialize_on_alignment=["slots", "positions"])
def choose_kernel(
    logits, tokens, states, slots, positions, rows, part_best, group_keys, sums, chosen_groups,
    vocab, groups, parts, PARTS: tl.constexpr, GROUPS: tl.constexpr, IS_BFLOAT16: tl.constexpr,
):  # fmt: skip
    """Chooses a row's token, and stores whether it is final, must be checked for top-p, or is undecided."""
    row = tl.program_id(0)
    row_params = rows + tl.load(slots + row).to(tl.int64) * FIELDS
    row_logits = logits + row.to(tl.int64) * vocab
    bests = load_best(part_best, row, parts, PARTS)
    best = tl.max(bests, axis=0)
    mode = tl.load(row_params + MODE)
    if has_token(best) == 0:
        tl.store(tokens + row, tl.full((), NO_TOKEN, tl.int64))
        tl.store(states + row, DECIDED)
    elif (mode & IS_SAMPLED) == 0:
        at_part = tl.arange(0, PARTS)
        ids, values = load_part(
            row_logits, row_params, tl.min(tl.where(bests == best, at_part, PARTS), axis=0), vocab
        )  # fmt: skip
        tl.store(tokens + row, tl.min(tl.where(values == best, ids, BEYOND), axis=0).to(tl.int64))
        tl.store(states + row, DECIDED)
    elif tl.load(row_params + TOP_K) == 0:
        candidates = tl.load(
            sums_at(sums, row, CANDIDATES, PARTS) + tl.arange(0, PARTS), mask=tl.arange(0, PARTS) < parts, other=0
        )
        token = draw_before(
            row_logits, row_params, tl.load(positions + row), tl.zeros((), tl.int64), best, -float("inf"), BEYOND,
            candidates, vocab, PARTS,
        )  # fmt: skip
        tl.store(tokens + row, token.to(tl.int64))
        tl.store(states + row, tl.where((mode & HAS_TOP_P) != 0, DRAWN, DECIDED))
    else:
        at_group = tl.arange(0, GROUPS)
        maxima = tl.load(group_keys + row * groups + at_group, mask=at_group < groups, other=LOWEST_KEY)
        token, is_decided = _draw_from_top_k(
            row_logits, row_params, tl.load(positions + row), best, maxima, chosen_groups + row * MOST_GROUPS, vocab,
            groups, GROUPS, IS_BFLOAT16,
        )  # fmt: skip
        tl.store(tokens + row, token.to(tl.int64))
        tl.store(states + row, tl.where(is_decided, DECIDED, UNDECIDED))


@triton.jit(do_not_specialize_on_alignment=["slots"])
def check_kernel(logits, tokens, states, slots, rows, part_best, sums, vocab, parts, PARTS: tl.constexpr):
    """For rows in state DRAWN: sums the weights of the tokens before the drawn token, as top-p's check needs them."""
    row = tl.program_id(0)
    part = tl.program_id(1)
    if tl.load(states + row) != DRAWN:
        return
    row_params = rows + tl.load(slots + row).to(tl.int64) * FIELDS
    row_logits = logits + row.to(tl.int64) * vocab
    token = tl.load(tokens + row).to(tl.int32)
    best = tl.max(load_best(part_best, row, parts, PARTS), axis=0)
    ids, values = load_part(row_logits, row_params, part, vocab)
    found = weights_of(values, best, bits_as_float(tl.load(row_params + SCALE)))
    found = tl.where(is_before(values, ids, load_logits(row_logits, row_params, token, vocab), token), found, 0)
    floor = tl.load(row_params + MIN_WEIGHT)
    mass = tl.sum(found, axis=0)
    tl.store(sums_at(sums, row, BEFORE, PARTS) + part, mass)
    if floor > 0:
        mass = tl.sum(tl.where(found >= floor, found, 0), axis=0)
    tl.store(sums_at(sums, row, CANDIDATES_BEFORE, PARTS) + part, mass)


@triton.jit(do_not_specialize_on_alignment=["slots", "positions"])
def retry_kernel(
    logits, tokens, states, slots, positions, rows, part_best, sums, vocab, parts, PARTS: tl.constexpr
):  # fmt: skip
    """For rows in state DRAWN: accepts the token if top-p keeps it; otherwise draws another one, to be checked."""
    row = tl.program_id(0)
    if tl.load(states + row) != DRAWN:
        return
    row_params = rows + tl.load(slots + row).to(tl.int64) * FIELDS
    at = tl.arange(0, PARTS)
    own = at < parts
    total = tl.sum(tl.load(sums_at(sums, row, ALL, PARTS) + at, mask=own, other=0), axis=0)
    before = tl.sum(tl.load(sums_at(sums, row, BEFORE, PARTS) + at, mask=own, other=0), axis=0)
    if before < top_p_limit(row_params, total):
        tl.store(states + row, DECIDED)
        return
    row_logits = logits + row.to(tl.int64) * vocab
    token = tl.load(tokens + row).to(tl.int32)
    best = tl.max(load_best(part_best, row, parts, PARTS), axis=0)
    value = load_logits(row_logits, row_params, token, vocab)
    candidates = tl.load(sums_at(sums, row, CANDIDATES_BEFORE, PARTS) + at, mask=own, other=0)
    token = draw_before(
        row_logits, row_params, tl.load(positions + row), tl.zeros((), tl.int64) + 1, best, value, token, candidates,
        vocab, PARTS,
    )  # fmt: skip
    tl.store(tokens + row, token.to(tl.int64))
