"""Media in the engine core: whose rows a placeholder gets, what blocks are called, who holds an embedding."""

from __future__ import annotations

from typing import Any

import pytest
from examples import examples
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.unit.torch_engine.core.media_prompts import PLACEHOLDER, MediaPrompt, embedding_of, key_of
from tests.unit.torch_engine.core.oracle_runner import undisturbed
from tests.unit.torch_engine.core.test_disaggregation import Pair
from tests.unit.torch_engine.core.test_engine_core import Harness, prompt_of
from trtx.torch_engine.core.block_names import block_name, root_name
from trtx.torch_engine.core.media import media_identity
from trtx.torch_engine.messages import Handoff, MediaSpan

CAT = MediaPrompt([3, ("cat", 6), 4])
DOG = MediaPrompt([3, ("dog", 6), 4])
ENDS_WITH_IT = MediaPrompt([3, ("cat", 6)])


def ask(h: Harness, sequence_id: int, prompt: MediaPrompt, count: int = 6, **fields: Any) -> None:
    h.submit(sequence_id, prompt.tokens, count, media=prompt.spans, **fields)


@pytest.mark.parametrize("prompt", [CAT, ENDS_WITH_IT, MediaPrompt([("a", 1), ("b", 5), 1, ("a", 1), ("c", 3)])])
@pytest.mark.parametrize("tokens", range(1, 17))
def test_placeholders_take_their_rows_wherever_the_prompt_is_cut(prompt: MediaPrompt, tokens: int) -> None:
    h = Harness(tokens=tokens)
    prompt.put(h.core)
    ask(h, 1, prompt)
    h.submit(2, prompt_of(5), 6)
    ask(h, 3, prompt)
    h.run()
    assert h.tokens[1] == h.tokens[3] == undisturbed(prompt.seen, 6)
    assert h.tokens[2] == undisturbed(prompt_of(5), 6)
    assert h.is_empty()


@pytest.mark.parametrize(
    "prompt", [MediaPrompt([2, ("cat", 2)]), MediaPrompt([("cat", 8)]), MediaPrompt([3, ("cat", 6)])]
)
def test_a_last_placeholder_that_the_cache_leaves_over_is_no_decode(prompt: MediaPrompt) -> None:
    """A decode takes the token's own embedding."""
    h = Harness()
    prompt.put(h.core)
    for sequence_id in (1, 2):
        ask(h, sequence_id, prompt)
        h.run()
        assert h.tokens[sequence_id] == undisturbed(prompt.seen, 6)


def test_other_media_behind_equal_placeholders_share_no_block_and_equal_ones_do() -> None:
    h = Harness()
    CAT.put(h.core)
    DOG.put(h.core)
    ask(h, 1, CAT)
    h.run()
    ask(h, 2, DOG)
    ask(h, 3, CAT)
    h.submit(4, CAT.tokens, 6)  # a user typed the placeholders
    h.run()
    assert h.tokens[1] == h.tokens[3] == undisturbed(CAT.seen, 6)
    assert h.tokens[2] == undisturbed(DOG.seen, 6)
    assert h.tokens[4] == undisturbed(CAT.tokens, 6)
    assert {u.sequence_id: u.reused_blocks for u in h.updates if u.reused_blocks} == {3: 3}


def test_what_the_cache_has_needs_no_embedding() -> None:
    h = Harness()
    CAT.put(h.core)
    ask(h, 1, CAT)
    h.run()
    h.core.scheduler.media.drop([key_of("cat")])
    ask(h, 2, CAT)
    h.run()
    assert h.tokens[2] == undisturbed(CAT.seen, 6)
    ask(h, 3, CAT, cache_salt="other")
    h.run()
    assert "neither embedding nor KV for 1 of the prompt's 1 media items" in h.errors[3]


def test_a_dropped_key_is_gone_for_later_sequences_and_stays_with_those_that_came_before() -> None:
    h = Harness(tokens=4, batch=1)
    CAT.put(h.core)
    for sequence_id in (1, 2):
        ask(h, sequence_id, CAT, cache_salt=str(sequence_id))
    h.step()
    h.core.scheduler.media.drop([key_of("cat"), key_of("nobody's")])
    ask(h, 3, CAT, cache_salt="3")
    h.run()
    assert h.tokens[1] == h.tokens[2] == undisturbed(CAT.seen, 6)
    assert not h.tokens[3] and 3 in h.errors
    assert len(h.core.scheduler.media) == 0


def test_embeddings_are_let_go_of_once_their_prompt_is_computed() -> None:
    h = Harness()
    CAT.put(h.core)
    ask(h, 1, CAT, 20)
    held = h.core.scheduler.waiting[0].embeddings
    assert [one.rows for one in held if one is not None] == [6]
    h.step()
    (running,) = h.core.scheduler.running
    assert running.embeddings == [] and running.held is not None
    h.step()
    assert running.held.embeddings == ()


def preempting(*, drops: bool) -> Harness:
    h = Harness(num_blocks=10, batch=4, tokens=64, enable_iter_perf_stats=True, enable_block_reuse=False)
    prompt = MediaPrompt([2, ("cat", 6)])
    prompt.put(h.core)
    for sequence_id in range(4):
        ask(h, sequence_id, prompt, 20)
    for _ in range(2):
        h.step()
    if drops:
        h.core.scheduler.media.drop([key_of("cat")])
    h.run()
    assert any(row["inflightBatchingStats"]["numPausedRequests"] for row in h.stats), "nothing was preempted"
    assert h.is_empty()
    return h


def test_preempted_sequences_compute_their_media_again() -> None:
    h = preempting(drops=False)
    assert all(h.tokens[i] == undisturbed(MediaPrompt([2, ("cat", 6)]).seen, 20) for i in range(4))


def test_a_preempted_sequence_whose_embedding_was_dropped_ends_with_what_it_needs_and_can_be_gone_on_with() -> None:
    h = preempting(drops=True)
    whole = undisturbed(MediaPrompt([2, ("cat", 6)]).seen, 20)
    needed = {u.sequence_id: u.media_needed for u in h.updates if u.error is not None}
    assert needed and set(needed) == set(h.errors) and set(h.finished) == set(range(4)) - set(needed)
    prompt = MediaPrompt([2, ("cat", 6)])
    prompt.put(h.core)
    for sequence_id, keys in needed.items():
        assert keys == [key_of("cat")]
        had = h.tokens[sequence_id]
        assert had == whole[: len(had)]
        ask(h, 100 + sequence_id, prompt, 20, handoff=Handoff("generation_only", had))
    h.run()
    assert all(h.tokens[100 + sequence_id] == whole for sequence_id in needed)


def test_what_is_wrong_with_an_embedding_ends_those_that_need_it_alone() -> None:
    h = Harness()
    store = h.core.scheduler.media
    CAT.put(h.core)
    store.put(key_of("long"), embedding_of("long", 7))
    store.put(key_of("bad"), ValueError("it holds numbers that are NaN or infinite; expected finite ones"))
    store.put(key_of("full"), RuntimeError("OutOfMemoryError"))
    for sequence_id, name in enumerate(("cat", "long", "bad", "nowhere", "cat", "full")):
        ask(h, sequence_id, MediaPrompt([3, (name, 6), 4]))
    h.run()
    assert h.tokens[0] == h.tokens[4] == undisturbed(CAT.seen, 6)
    assert (
        "has 7 rows; expected 6" in h.errors[1]
        and "NaN" in h.errors[2]
        and "has neither embedding nor KV" in h.errors[3]
    )
    ends = {u.sequence_id: (u.is_failure, u.media_needed) for u in h.updates if u.error is not None}
    assert ends == {1: (False, None), 2: (False, None), 3: (True, [key_of("nowhere")]), 5: (True, None)}
    store.put(key_of("bad"), embedding_of("bad", 6))
    ask(h, 9, MediaPrompt([3, ("bad", 6), 4]))
    h.run()
    assert h.tokens[9] == undisturbed(MediaPrompt([3, ("bad", 6), 4]).seen, 6)


def test_many_that_lack_their_embedding_end_at_once_and_those_behind_them_run() -> None:
    h = Harness(batch=2)
    for sequence_id in range(2000):
        ask(h, sequence_id, CAT)
    h.submit(5000, prompt_of(5), 3)
    h.run(limit=20)
    assert len(h.errors) == 2000 and h.tokens[5000] == undisturbed(prompt_of(5), 3)


KEY = key_of("cat")


@pytest.mark.parametrize(
    ("media", "says"),
    [
        ([MediaSpan(3, 6, b"short")], "media 0 has a key of 5 bytes; expected 32"),
        ([MediaSpan(3, 0, KEY)], "tokens 3 to 3 of 13"),
        ([MediaSpan(-1, 2, KEY)], "tokens -1 to 1 of 13"),
        ([MediaSpan(9, 5, KEY)], "tokens 9 to 14 of 13"),
        (
            [MediaSpan(3, 6, KEY), MediaSpan(8, 2, KEY)],
            "media 1 covers tokens 8 to 10 of 13; expected at least one",
        ),
        ([MediaSpan(3, 6, KEY, (1, 2, 2))], "a grid of 1 x 2 x 2 and 6 tokens"),
        ([MediaSpan(3, 6, KEY, (1, -2, -3))], "a grid of 1 x -2 x -3"),
        ([MediaSpan(3, 6, KEY, first=1)], "media 0 uses rows 1 to 7 of 6; expected a part"),
        ([MediaSpan(3, 6, KEY, first=3, rows=8)], "rows 3 to 9 of 8"),
        ([MediaSpan(3, 6, KEY, first=-1, rows=8)], "rows -1 to 5 of 8"),
        ([MediaSpan(3, 6, KEY, time_step=0.0)], "a time_step of 0.0; expected one above 0"),
        ([MediaSpan(3, 6, KEY, time_step=float("nan"))], "a time_step of nan"),
        ([MediaSpan(3, 6, KEY, time_step=1e9)], "up to 1000000.0"),
    ],
)
def test_spans_that_cannot_be_are_refused_with_numbers(media: list[MediaSpan], says: str) -> None:
    h = Harness()
    h.submit(1, CAT.tokens, media=media)
    h.run()
    assert says in h.errors[1]


@pytest.mark.parametrize(
    ("ids", "says"),
    [([1] * 12, "has 12 ids; expected 13"), ([-1] * 13, "an invalid id"), ([2**32] * 13, "an invalid id")],
)
def test_routing_ids_that_are_none_are_refused(ids: list[int], says: str) -> None:
    h = Harness()
    CAT.put(h.core)
    ask(h, 1, CAT, routing_token_ids=ids)
    h.run()
    assert says in h.errors[1]


def told(h: Harness) -> list[list[int]]:
    """Tokens of the blocks that events tell of, which are also sound: parents are known, and what goes had come."""
    known: set[int] = set()
    found = []
    for event in h.events:
        data = event["data"]
        if data["type"] == "stored":
            assert data["parent_hash"] is None or data["parent_hash"] in known
            for block in data["blocks"]:
                known.add(block["block_hash"])
                found.append([token["token_id"] for token in block["tokens"]])
        elif data["type"] == "removed":
            assert data["block_hashes"] and set(data["block_hashes"]) <= known
            known -= set(data["block_hashes"])
    return found


def test_events_tell_of_media_by_routing_ids_and_without_them_not_at_all() -> None:
    h = Harness(num_blocks=12, event_buffer_max_size=1000)
    long = MediaPrompt([5, ("cat", 6), 6])
    long.put(h.core)
    ask(h, 1, long, 4)
    h.run()
    assert told(h) == [long.tokens[:4]], "nothing of the block with media, nor of those behind it"
    routing = [900 + token for token in long.tokens]
    ask(h, 2, MediaPrompt([5, ("dog", 6), 6]), 4, routing_token_ids=routing)
    h.run()
    assert told(h)[1:] == [], "its embedding is not there"
    MediaPrompt([5, ("dog", 6), 6]).put(h.core)
    ask(h, 3, MediaPrompt([5, ("dog", 6), 6]), 8, routing_token_ids=routing)
    h.run()
    answer = undisturbed(MediaPrompt([5, ("dog", 6), 6]).seen, 8)
    expected = routing + answer
    assert told(h)[1:] == [expected[at : at + 4] for at in range(4, 24, 4)]
    for sequence_id in range(10, 14):  # evicts all of it, told and untold
        h.submit(sequence_id, prompt_of(30, sequence_id), 4)
        h.run()
    assert len(told(h)) > 20


# What these names were before there were media: prefix caches of another version are read over a handoff.
TEXT_NAMES = {
    None: "deae9a370c69c0adac2580ca7d6ee0cb483da552e38f673251cf5f671910d0dc",
    "salt": "07b785704568bd9b4ff7de51ea7bc72173b0b19a24013793bacf126b9adac016",
}


def test_names_of_text_are_what_they_were() -> None:
    for salt, name in TEXT_NAMES.items():
        assert block_name(block_name(root_name(salt), [1, 2, 3, 4]), [5, 6, 7, 2**31 - 1]).hex() == name


def names(tokens: list[int], spans: list[MediaSpan], size: int) -> list[bytes]:
    found, parent = [], root_name(None)
    for start in range(0, len(tokens) - size + 1, size):
        parent = block_name(parent, tokens[start : start + size], media_identity(spans, start, start + size))
        found.append(parent)
    return found


def contents(tokens: list[int], spans: list[MediaSpan]) -> list[Any]:
    found: list[Any] = list(tokens)
    for span in spans:
        for row in range(span.length):
            row_of_it = span.first + row
            found[span.start + row] = (tokens[span.start + row], span.key, row_of_it, span.grid, span.time_step)
    return found


prompts = st.lists(
    st.one_of(
        st.integers(1, 3),
        st.tuples(
            st.sampled_from("abc"), st.integers(1, 6), st.sampled_from([None, None, "wide", "tall", "slow", "part"])
        ),
    ), min_size=1, max_size=6,
)  # fmt: skip


def spelled(parts: list[Any]) -> tuple[list[int], list[MediaSpan]]:
    tokens: list[int] = []
    spans = []
    for part in parts:
        if isinstance(part, int):
            tokens += [PLACEHOLDER] * part
        else:
            name, rows, form = part
            grid = {"wide": (1, 1, rows), "tall": (1, rows, 1), "slow": (rows, 1, 1)}.get(form)
            spans.append(
                MediaSpan(
                    len(tokens), rows, key_of(name), grid, time_step=1.5 if form == "slow" else 1.0,
                    first=2 if form == "part" else 0, rows=rows + 3 if form == "part" else 0,
                )
            )  # fmt: skip
            tokens += [PLACEHOLDER] * rows
    return tokens, spans


@settings(max_examples=examples(400), deadline=None)
@given(one=prompts, other=prompts, size=st.integers(1, 5))
@example([("a", 2, None), ("a", 2, None)], [("a", 4, None)], 2)
def test_two_blocks_have_one_name_exactly_where_all_up_to_their_end_is_the_same(
    one: list[Any], other: list[Any], size: int
) -> None:
    """Every token is the placeholder, so that only media can tell them apart."""
    (tokens, spans), (others, other_spans) = spelled(one), spelled(other)
    mine, theirs = contents(tokens, spans), contents(others, other_spans)
    for index, (a, b) in enumerate(zip(names(tokens, spans, size), names(others, other_spans, size), strict=False)):
        end = (index + 1) * size
        assert (a == b) == (mine[:end] == theirs[:end])


# --- handoff ---


def handed(pair: Pair, sequence_id: int, prompt: MediaPrompt) -> Handoff:
    prompt.put(pair.prefill.core)
    return pair.context(sequence_id, prompt.tokens, media=prompt.spans)


@pytest.mark.parametrize("prompt", [CAT, ENDS_WITH_IT])
def test_decode_needs_no_embedding_and_finds_the_same_blocks(prompt: MediaPrompt) -> None:
    pair = Pair()
    for sequence_id in (1, 2):
        handoff = handed(pair, sequence_id, prompt)
        ask(pair.decode, sequence_id, prompt, 9, handoff=handoff)
        pair.finish_decode()
        assert pair.decode.tokens[sequence_id] == undisturbed(prompt.seen, 9)
    whole, rest = divmod(len(prompt.tokens), 4)
    assert pair.decode.transport.blocks_read == whole + 2 * bool(rest)  # type: ignore[attr-defined]
    sent = [u.handoff for u in pair.prefill.updates if u.handoff is not None]
    assert [handoff.media for handoff in sent] == [prompt.spans] * 2
    assert pair.prefill.is_empty() and pair.decode.is_empty()


@pytest.mark.parametrize("when", ["dead before", "dead during", "read fails"])
@pytest.mark.parametrize("has", [False, True])
def test_decode_that_has_to_compute_a_prompt_with_media_needs_them(when: str, has: bool) -> None:
    pair = Pair()
    handoff = handed(pair, 1, CAT)
    if has:
        CAT.put(pair.decode.core)
    peer, own = pair.prefill.transport, pair.decode.transport  # type: ignore[attr-defined]
    peer.is_dead = when == "dead before"
    ask(pair.decode, 1, CAT, 6, handoff=handoff)
    pair.decode.submit(2, prompt_of(5), 4)
    pair.step_decode(deliver=False)
    peer.is_dead = when.startswith("dead")
    own.fails_reads = when == "read fails"
    pair.finish_decode()
    assert pair.decode.tokens[2] == undisturbed(prompt_of(5), 4)
    assert pair.decode.core._handoffs is not None
    assert pair.decode.core._handoffs.stats.recomputed == has
    whole = undisturbed(CAT.seen, 6)
    if has:
        assert pair.decode.tokens[1] == whole
    else:
        (end,) = [u for u in pair.decode.updates if u.error is not None]
        assert end.media_needed == [key_of("cat")] and end.is_failure
        had = pair.decode.tokens[1]
        assert had == whole[: len(had)]
        CAT.put(pair.decode.core)
        ask(pair.decode, 3, CAT, 6, handoff=Handoff("generation_only", had or handoff.first_gen_tokens))
        pair.finish_decode()
        assert pair.decode.tokens[3] == whole
    assert pair.decode.is_empty()
    if when == "read fails":
        assert pair.prefill.is_empty()
