"""What drafters guess, and how many guesses a step verifies."""

from __future__ import annotations

import random

import pytest

from trtx.torch_engine.core.speculation.drafters import Draft, NGramDrafter
from trtx.torch_engine.core.speculation.lengths import DraftLengths
from trtx.torch_engine.core.speculation.suffixes import SuffixDrafter


def n_grams(
    size: int = 2, *, is_keep_all: bool = True, is_use_oldest: bool = True, is_public_pool: bool = True
) -> NGramDrafter:
    return NGramDrafter(
        max_matching_ngram_size=size, is_keep_all=is_keep_all, is_use_oldest=is_use_oldest,
        is_public_pool=is_public_pool,
    )  # fmt: skip


def drafted(drafter: NGramDrafter | SuffixDrafter, tokens: list[int], most: int = 3, salt: str | None = None) -> Draft:
    state = drafter.begin(salt)
    state.tokens += tokens
    return drafter.draft(state, most)


def test_ngrams_continue_the_longest_match_and_say_how_long_it_was() -> None:
    tokens = [1, 2, 3, 4, 9, 2, 7, 1, 2]
    assert drafted(n_grams(), tokens) == Draft([3, 4, 9], 2)
    assert drafted(n_grams(1), tokens) == Draft([3, 4, 9], 1)
    assert drafted(n_grams(), tokens, most=1) == Draft([3], 2)
    assert drafted(n_grams(), [5, 6, 7]) == Draft()


@pytest.mark.parametrize(("keep", "oldest", "first"), [(True, True, 3), (True, False, 4), (False, False, 3)])
def test_the_oldest_or_the_newest_continuation_is_used(keep: bool, oldest: bool, first: int) -> None:
    tokens = [1, 2, 3, 1, 2, 4, 1, 2]
    assert drafted(n_grams(is_keep_all=keep, is_use_oldest=oldest), tokens).tokens[0] == first


def test_the_public_pool_is_shared_by_unsalted_sequences_alone() -> None:
    public, private = n_grams(), n_grams(is_public_pool=False)
    for drafter in (public, private):
        drafted(drafter, [1, 2, 3, 4])
        drafted(drafter, [6, 7, 8], salt="a")
    assert drafted(public, [9, 1, 2]).tokens == [3, 4]
    assert drafted(private, [9, 1, 2]) == Draft()
    assert drafted(public, [9, 6, 7]) == Draft(), "nothing of a salted sequence reaches another"
    assert drafted(public, [9, 1, 2], salt="b") == Draft(), "and nothing reaches it"


def test_known_tokens_are_indexed_once_as_they_come() -> None:
    drafter = n_grams()
    state = drafter.begin(None)
    state.tokens += [1, 2, 3]
    assert drafter.draft(state, 3) == Draft()
    state.tokens += [1, 2]
    assert drafter.draft(state, 3) == Draft([3, 1, 2], 2)


@pytest.mark.parametrize("most", [-1, 2])
def test_suffixes_continue_the_first_place_of_the_longest_repeated_suffix(most: int) -> None:
    dice = random.Random(most)
    for _ in range(200):
        tokens = [dice.randrange(3) for _ in range(dice.randrange(1, 40))]
        found = drafted(SuffixDrafter(max_matching_ngram_size=most), tokens)
        lengths = range(len(tokens) - 1, 0, -1) if most < 0 else range(min(most, len(tokens) - 1), 0, -1)
        expected = Draft()
        for length in lengths:
            ends = [end for end in range(length, len(tokens)) if tokens[end - length : end] == tokens[-length:]]
            if ends:
                expected = Draft(tokens[ends[0] : ends[0] + 3], length)
                break
        assert found == expected


def places(texts: list[list[int]], suffix: list[int]) -> list[list[int]]:
    """Returns the tokens after each place of ``suffix``, in order."""
    size = len(suffix)
    return [one[at:] for one in texts for at in range(size, len(one)) if one[at - size : at] == suffix]


def test_the_global_pool_continues_the_first_place_of_the_longest_suffix_in_any_unsalted_sequence() -> None:
    dice = random.Random(0)
    for _ in range(100):
        drafter = SuffixDrafter(max_matching_ngram_size=-1, enable_global_pool=True)
        texts = [[dice.randrange(3) for _ in range(dice.randrange(1, 12))] for _ in range(4)]
        drafts = [drafted(drafter, text) for text in texts]
        for number, (text, found) in enumerate(zip(texts, drafts, strict=True), 1):
            sizes = (size for size in range(len(text), 0, -1) if places(texts[:number], text[-size:]))
            size = next(sizes, 0)
            assert found == (Draft(places(texts[:number], text[-size:])[0][:3], size) if size else Draft())


def test_sequences_of_the_global_pool_that_grow_in_turns_get_tokens_that_followed_their_last_ones() -> None:
    dice = random.Random(1)
    drafter = SuffixDrafter(max_matching_ngram_size=-1, enable_global_pool=True)
    states = [drafter.begin(None) for _ in range(4)]
    for _ in range(300):
        state = dice.choice(states)
        state.tokens += [dice.randrange(6) for _ in range(dice.randrange(1, 4))]
        found = drafter.draft(state, 2)
        suffix = state.tokens[len(state.tokens) - found.strength :]
        assert not found.tokens or found.tokens in [one[:2] for one in places([one.tokens for one in states], suffix)]
    assert found.strength


def test_nothing_crosses_a_cache_salt_by_the_global_pool() -> None:
    shared, own = (SuffixDrafter(max_matching_ngram_size=-1, enable_global_pool=pool) for pool in (True, False))
    for drafter in (shared, own):
        drafted(drafter, [1, 2, 3, 4])
        drafted(drafter, [6, 7, 8], salt="a")
    assert drafted(shared, [9, 1, 2]) == Draft([3, 4], 2)
    assert drafted(own, [9, 1, 2]) == Draft()
    assert drafted(shared, [9, 6, 7]) == Draft(), "nothing of a salted sequence reaches another"
    assert drafted(shared, [9, 6, 7], salt="a") == Draft(), "one with the same salt neither"
    assert drafted(shared, [9, 1, 2], salt="b") == Draft(), "and nothing reaches a salted one"


def test_the_global_pool_begins_anew_after_as_many_sequences_as_it_may_hold() -> None:
    drafter = SuffixDrafter(max_matching_ngram_size=-1, enable_global_pool=True, global_pool_size=2)
    running = drafter.begin(None)
    running.tokens += [1, 2, 3, 4]
    drafter.draft(running, 3)
    assert drafted(drafter, [9, 1, 2]) == Draft([3, 4], 2)
    assert drafted(drafter, [8, 1, 2]) == Draft()
    running.tokens += [9, 1]
    assert drafter.draft(running, 3) == Draft([2], 2), "a running sequence keeps its pool"


GUESSES = Draft([1, 2, 3, 4], 2)


def measured(lengths: DraftLengths, batch: int, plain_s: float, extra_s: float) -> DraftLengths:
    """``extra_s``: what each drafted token adds to a step."""
    for _ in range(5):
        lengths.stepped(batch, 0, plain_s)
        for drafted_tokens in range(1, 4 * batch + 1):
            lengths.stepped(batch, drafted_tokens, plain_s + extra_s * drafted_tokens)
    return lengths


def teach(lengths: DraftLengths, accepted: int) -> DraftLengths:
    for _ in range(200):
        lengths.verified(GUESSES, 4, accepted)
    return lengths


def test_nothing_is_drafted_before_a_plain_step_was_measured() -> None:
    lengths = DraftLengths(4)
    assert lengths.choose(1, [GUESSES]) == [0]
    assert measured(lengths, 1, 1.0, 0.01).choose(1, [GUESSES]) != [0]


def test_a_cheap_draft_that_is_accepted_is_long_and_an_expensive_one_is_not_made() -> None:
    assert teach(measured(DraftLengths(4), 1, 1.0, 0.01), accepted=4).choose(1, [GUESSES]) == [4]
    assert teach(measured(DraftLengths(4), 1, 1.0, 1.5), accepted=4).choose(1, [GUESSES]) == [0]


def test_a_draft_that_is_never_accepted_is_tried_ever_more_seldom() -> None:
    lengths = teach(measured(DraftLengths(4), 1, 1.0, 0.01), accepted=0)
    tried = 0
    for _ in range(10_000):
        drafted_tokens = lengths.choose(1, [GUESSES])[0]
        lengths.stepped(1, drafted_tokens, 1.0 + 0.01 * drafted_tokens)
        if drafted_tokens:
            tried += 1
            lengths.verified(GUESSES, drafted_tokens, 0)
    assert 10 <= tried <= 40


def test_tries_that_cost_several_steps_take_little_of_the_time() -> None:
    """As at 256 sequences on an H200, where a step with drafts costs the overlap of two steps."""
    lengths, batch, plain_s, try_s = DraftLengths(4), 256, 0.010, 0.022
    tried, steps = 0, 200
    for _ in range(steps):
        chosen = lengths.choose(batch, [GUESSES] * batch)
        lengths.stepped(batch, sum(chosen), try_s if any(chosen) else plain_s)
        tried += any(chosen)
        for drafted_tokens in filter(None, chosen):
            lengths.verified(GUESSES, drafted_tokens, 0)
    assert tried
    assert tried * (try_s - plain_s) / (steps * plain_s) < 0.02


def some_rates(lengths: DraftLengths, dice: random.Random) -> None:
    for strength in range(1, 5):
        for _ in range(dice.randrange(60)):
            lengths.verified(Draft([1, 2, 3, 4], strength), 4, dice.randrange(5))


@pytest.mark.parametrize("seed", range(30))
def test_where_no_draft_may_pay_none_is_chosen(seed: int) -> None:
    dice = random.Random(seed)
    batch, plain_s = dice.choice([1, 3, 8, 64, 256]), 0.01
    lengths = DraftLengths(4)
    some_rates(lengths, dice)
    skipped = 0
    for _ in range(400):
        drafts = [Draft([1] * dice.randrange(5), dice.randrange(1, 6)) for _ in range(batch)]
        may_pay, chosen = lengths.may_pay(batch), lengths.choose(batch, drafts)
        assert may_pay or not any(chosen)
        skipped += not may_pay
        drafted_tokens = sum(chosen)
        lengths.stepped(batch, drafted_tokens, plain_s * (1 + drafted_tokens / batch) if drafted_tokens else plain_s)
        for draft, length in zip(drafts, chosen, strict=True):
            if length:
                lengths.verified(draft, length, dice.randrange(length + 1))
    assert skipped > (100 if batch == 256 else 0), "the question saves the search where steps are bound by arithmetic"


def test_a_try_outlasts_the_question_whether_to_wait_for_tokens() -> None:
    """On a GPU the choice is made twice: before the step in flight is committed, and for the step."""
    lengths = teach(measured(DraftLengths(4), 1, 1.0, 0.01), accepted=0)
    tried = 0
    for _ in range(2_000):
        asked, chosen = lengths.choose(1, [GUESSES]), lengths.choose(1, [GUESSES])
        assert asked == chosen
        tried += any(chosen)
        lengths.stepped(1, chosen[0], 1.0 + 0.01 * chosen[0])
        if any(chosen):
            lengths.verified(GUESSES, chosen[0], 0)
    assert 5 <= tried <= 20


def test_drafts_without_a_token_to_verify_become_rare() -> None:
    lengths = teach(measured(DraftLengths(4), 1, 1.0, 0.01), accepted=4)
    made = 0
    for _ in range(2_000):
        made += any(lengths.choose(1, [GUESSES]))
        if any(lengths.choose(1, [GUESSES])):
            lengths.wasted([GUESSES])
        lengths.stepped(1, 0, 1.0)
    assert made <= 200


def test_acceptance_that_comes_back_is_noticed() -> None:
    lengths = teach(measured(DraftLengths(4), 1, 1.0, 0.01), accepted=0)
    drafted_steps = 0
    for _ in range(3_000):
        drafted_tokens = lengths.choose(1, [GUESSES])[0]
        lengths.stepped(1, drafted_tokens, 1.0)
        if drafted_tokens:
            drafted_steps += 1
            lengths.verified(GUESSES, drafted_tokens, drafted_tokens)
    assert drafted_steps > 1_000


def test_each_draft_gets_what_its_own_matches_were_worth() -> None:
    lengths = measured(DraftLengths(4), 2, 1.0, 0.05)
    weak = Draft([5, 6, 7, 8], 1)
    for _ in range(200):
        lengths.verified(GUESSES, 4, 4)
        lengths.verified(weak, 4, 0)
    assert lengths.choose(2, [GUESSES, weak]) == [4, 0]


def test_limits_follow_max_concurrency_and_the_schedule() -> None:
    assert [DraftLengths(4, max_concurrency=8).limit(batch) for batch in (1, 8, 9)] == [4, 4, 0]
    scheduled = DraftLengths(4, schedule={2: 4, 8: 1})
    assert [scheduled.limit(batch) for batch in (1, 2, 3, 8, 9)] == [4, 4, 1, 1, 0]
    assert scheduled.choose(1, [GUESSES]) == [4], "a schedule decides alone"
