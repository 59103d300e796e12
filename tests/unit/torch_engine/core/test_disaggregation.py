"""Prefill and decode engines over oracle runners: the tokens are those of one engine, and no lease outlives its use."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
from examples import examples
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.unit.torch_engine.core.media_prompts import mixed, some_media
from tests.unit.torch_engine.core.oracle_runner import FULL, VOCAB, OracleCopies, OracleTransport, Wire, undisturbed
from tests.unit.torch_engine.core.test_engine_core import Harness, prompt_of, some_windows
from trtx.torch_engine.messages import Handoff, KvTransfer

TIMEOUT_S = 10.0


class Pair:
    """One prefill and one decode engine, joined; time stands still unless a test moves it."""

    def __init__(
        self,
        *,
        prefill_blocks: int = 64,
        decode_blocks: int = 64,
        overlap: bool = True,
        windows: tuple[int | None, ...] = FULL,
        with_stats: bool = False,
        host_blocks: int = 0,
        delay: Callable[[], int] = lambda: 1,
    ) -> None:
        """Blocks are counted for one layer group. ``host_blocks``: of each engine's host tier, with late copies."""
        self.windows = windows
        self.with_stats = with_stats
        self.now = 100.0
        self.overlap = overlap
        self.host_blocks, self.delay = host_blocks * len(windows), delay
        wire = Wire()
        self.prefill = self._engine(wire, "prefill", prefill_blocks)
        self.decode = self._engine(wire, "decode", decode_blocks)

    def _engine(self, wire: Wire, name: str, num_blocks: int) -> Harness:
        harness = Harness(num_blocks * len(self.windows), windows=self.windows)
        transport = OracleTransport(wire, name, harness.runner)
        limits = harness.core.scheduler.limits
        harness.core = type(harness.core)(
            harness.runner,
            limits,
            transport=transport,
            kv_transfer_timeout_s=TIMEOUT_S,
            disable_overlap_scheduler=not self.overlap,
            enable_iter_perf_stats=self.with_stats,
            host_copies=OracleCopies(harness.runner, self.host_blocks, self.delay) if self.host_blocks else None,
            clock=lambda: self.now,
        )
        harness.transport = transport  # type: ignore[attr-defined]
        return harness

    def context(self, sequence_id: int, prompt: list[int], **fields: Any) -> Handoff:
        self.prefill.submit(sequence_id, prompt, 50, handoff=Handoff("context_only", disagg_request_id=7), **fields)
        steps = 0
        while sequence_id not in self.prefill.finished:
            self.prefill.step()
            steps += 1
            if steps > 200:  # unread handoffs hold the blocks that this prompt needs
                self.step_decode()
        found = next(u for u in self.prefill.updates if u.sequence_id == sequence_id and u.handoff)
        assert found.handoff.disagg_request_id == 7
        return _generation(found.handoff)

    def step_decode(self, *, deliver: bool = True) -> None:
        if deliver:
            self.decode.transport.deliver()  # type: ignore[attr-defined]
        self.decode.step()

    def finish_decode(self) -> None:
        scheduler = self.decode.core.scheduler
        while scheduler.waiting or scheduler.running or scheduler.reading or self.decode.core.wait_s == 0.0:
            self.step_decode()
        self.prefill.step()


def transfers(pair: Pair) -> list[KvTransfer]:
    """What decode told of KV that was to come, of each request."""
    return [update.transfer for update in pair.decode.updates if update.transfer is not None]


def _generation(handoff: Handoff) -> Handoff:
    return Handoff(
        "generation_only",
        handoff.first_gen_tokens,
        None,
        handoff.ctx_request_id,
        handoff.disagg_request_id,
        handoff.opaque_state,
    )


@pytest.mark.parametrize("length", [1, 3, 4, 5, 8, 13])
def test_decode_goes_on_where_prefill_stopped_and_the_lease_ends(length: int) -> None:
    pair = Pair()
    prompt = prompt_of(length)
    handoff = pair.context(1, prompt)
    assert handoff.first_gen_tokens == undisturbed(prompt, 1)
    assert pair.prefill.core.scheduler.pool.num_held == -(-length // 4)
    pair.decode.submit(1, prompt, 9, handoff=handoff)
    pair.finish_decode()
    assert pair.decode.tokens[1] == undisturbed(prompt, 9)
    (told,) = transfers(pair)
    assert told.bytes > 0 and told.seconds > 0 and not told.recomputed_because
    assert pair.prefill.is_empty()
    assert pair.decode.is_empty()


def test_blocks_of_a_lease_that_ended_are_told_to_be_free_though_no_step_runs() -> None:
    pair = Pair(with_stats=True)
    handoff = pair.context(1, prompt_of(13))
    assert pair.prefill.stats[-1]["kvCacheStats"]["usedNumBlocks"] == 4
    for _ in range(3):
        pair.prefill.step()
    told = len(pair.prefill.stats)
    pair.decode.submit(1, prompt_of(13), 2, handoff=handoff)
    pair.finish_decode()
    (row,) = pair.prefill.stats[told:]
    assert (row["kvCacheStats"]["usedNumBlocks"], row["iter"]) == (0, pair.prefill.stats[told - 1]["iter"])
    assert sum(row["numCompletedRequests"] for row in pair.prefill.stats) == 1


def test_only_the_blocks_that_the_prefix_cache_lacks_are_read() -> None:
    pair = Pair()
    for sequence_id, length in ((1, 12), (2, 18), (3, 16)):
        prompt = prompt_of(length)
        pair.decode.submit(sequence_id, prompt, 5, handoff=pair.context(sequence_id, prompt))
        pair.finish_decode()
        assert pair.decode.tokens[sequence_id] == undisturbed(prompt, 5)
    # 3 blocks; 5 less the 3 known ones (12 prompt tokens and 4 of the 5 generated); all of 16 but what differs
    assert pair.decode.transport.blocks_read < 3 + 5 + 4  # type: ignore[attr-defined]
    assert pair.prefill.is_empty()


def test_a_prompt_that_is_wholly_cached_releases_the_lease_without_a_read() -> None:
    pair = Pair()
    prompt = prompt_of(8)
    for sequence_id in (1, 2):
        pair.decode.submit(sequence_id, prompt, 5, handoff=pair.context(sequence_id, prompt))
        pair.finish_decode()
    assert pair.decode.tokens[1] == pair.decode.tokens[2] == undisturbed(prompt, 5)
    assert pair.decode.transport.blocks_read == 2  # type: ignore[attr-defined]
    assert transfers(pair)[1] == KvTransfer()
    assert pair.prefill.is_empty()


def test_others_decode_while_blocks_are_on_their_way() -> None:
    pair = Pair()
    pair.decode.submit(9, prompt_of(4, 5), 20)
    handoff = pair.context(1, prompt_of(8))
    pair.decode.submit(1, prompt_of(8), 5, handoff=handoff)
    for _ in range(6):
        pair.step_decode(deliver=False)
    assert len(pair.decode.tokens[9]) == 5  # the sixth is on its way
    assert pair.decode.tokens[1] == handoff.first_gen_tokens
    pair.finish_decode()
    assert pair.decode.tokens[1] == undisturbed(prompt_of(8), 5)


@pytest.mark.parametrize("when", ["dead before", "dead during", "read fails"])
def test_a_peer_that_is_gone_means_local_recomputation(when: str) -> None:
    pair = Pair()
    prompt = prompt_of(10)
    handoff = pair.context(1, prompt)
    peer, own = pair.prefill.transport, pair.decode.transport  # type: ignore[attr-defined]
    peer.is_dead = when == "dead before"
    pair.decode.submit(1, prompt, 6, handoff=handoff)
    pair.step_decode(deliver=False)
    peer.is_dead = when.startswith("dead")
    own.fails_reads = when == "read fails"
    pair.finish_decode()
    assert pair.decode.tokens[1] == undisturbed(prompt, 6)
    assert pair.decode.finished[1] == "length"
    assert pair.decode.core._handoffs is not None
    assert pair.decode.core._handoffs.stats.recomputed == 1
    (told,) = transfers(pair)
    assert told.bytes == 0 and told.recomputed_because and "; " not in told.recomputed_because
    if when == "read fails":
        assert pair.prefill.is_empty(), "a failed read does not release; the engine must"


def test_a_layout_mismatch_is_an_error_before_any_token_and_frees_the_peer() -> None:
    pair = Pair()
    handoff = pair.context(1, prompt_of(8))
    pair.decode.transport.mismatches = True  # type: ignore[attr-defined]
    pair.decode.submit(1, prompt_of(8), 5, handoff=handoff)
    pair.decode.submit(2, prompt_of(5), 3)
    pair.finish_decode()
    assert "on prefill" in pair.decode.errors[1]
    assert pair.decode.tokens[1] == []
    assert pair.decode.tokens[2] == undisturbed(prompt_of(5), 3)
    assert pair.prefill.is_empty()


def test_a_corrupted_handoff_counts_where_its_request_goes_on_with_it() -> None:
    pair = Pair()
    for sequence_id, corrupts in ((1, False), (2, True), (3, True)):
        pair.decode.transport.corrupts = corrupts  # type: ignore[attr-defined]
        prompt = prompt_of(5 + sequence_id)
        pair.decode.submit(sequence_id, prompt, 5, handoff=pair.context(sequence_id, prompt))
        pair.step_decode(deliver=False)
        if sequence_id == 3:
            pair.decode.core.abort([3])  # its read goes on, and nobody computes with what it brings
        pair.finish_decode()
    stats = pair.decode.core._handoffs.stats
    assert (stats.reads, stats.corrupted) == (3, 1)


@pytest.mark.parametrize("steps", [0, 1, 3])
def test_an_abort_releases_the_remote_lease_whenever_it_comes(steps: int) -> None:
    pair = Pair()
    handoff = pair.context(1, prompt_of(10))
    pair.decode.submit(1, prompt_of(10), 30, handoff=handoff)
    for _ in range(steps):
        pair.step_decode(deliver=False)
    pair.decode.core.abort([1])
    pair.step_decode(deliver=False)
    assert pair.decode.finished[1] == "cancelled"
    pair.finish_decode()
    assert pair.prefill.is_empty()
    assert pair.decode.is_empty()


def test_blocks_being_written_to_are_not_given_to_anybody_else() -> None:
    pair = Pair(decode_blocks=4)
    handoff = pair.context(1, prompt_of(10))
    pair.decode.submit(1, prompt_of(10), 5, handoff=handoff)
    pair.step_decode(deliver=False)
    pair.decode.core.abort([1])
    pair.decode.submit(2, prompt_of(11, 3), 4)
    for _ in range(3):
        pair.step_decode(deliver=False)
    assert pair.decode.tokens[2] == []
    pair.finish_decode()
    assert pair.decode.tokens[2] == undisturbed(prompt_of(11, 3), 4)


def test_a_lease_that_nobody_reads_ends_at_its_deadline() -> None:
    pair = Pair()
    pair.context(1, prompt_of(10))
    pair.now += TIMEOUT_S / 2
    pair.prefill.step()
    assert not pair.prefill.is_empty()
    pair.now += TIMEOUT_S
    pair.prefill.step()
    assert pair.prefill.is_empty()


def test_an_engine_whose_blocks_are_all_leased_waits_without_spinning() -> None:
    pair = Pair(prefill_blocks=4)
    handoff = pair.context(1, prompt_of(13))
    pair.prefill.submit(2, prompt_of(5, 3), 3)
    pair.prefill.step()
    assert pair.prefill.tokens[2] == []
    assert pair.prefill.core.wait_s, "0.0 would spin, None would never look at the transport again"
    pair.decode.submit(1, prompt_of(13), 1, handoff=handoff)  # ends at once, and releases the lease
    pair.prefill.run()
    assert pair.prefill.tokens[2] == undisturbed(prompt_of(5, 3), 3)


def test_a_request_refused_for_its_length_still_releases_the_lease() -> None:
    pair = Pair(decode_blocks=3)
    prompt = prompt_of(20)
    pair.decode.submit(1, prompt, 5, handoff=pair.context(1, prompt))
    pair.finish_decode()
    assert "20 tokens" in pair.decode.errors[1]
    assert pair.prefill.is_empty()


def test_a_first_token_that_ends_the_sequence_keeps_no_lease() -> None:
    pair = Pair()
    first = undisturbed(prompt_of(6), 1)[0]
    pair.prefill.submit(1, prompt_of(6), 50, sampling={"end_id": first}, handoff=Handoff("context_only"))
    pair.prefill.run()
    assert pair.prefill.finished[1] == "stop"
    assert pair.prefill.is_empty()


def test_decode_ends_at_once_where_the_handed_token_ends_the_sequence() -> None:
    pair = Pair()
    handoff = pair.context(1, prompt_of(6))
    pair.decode.submit(1, prompt_of(6), 1, handoff=handoff)
    pair.finish_decode()
    assert pair.decode.tokens[1] == handoff.first_gen_tokens
    assert pair.decode.finished[1] == "length"
    assert transfers(pair) == [KvTransfer()], "prefill's tokens were all that it asked for"
    assert pair.prefill.is_empty()


@pytest.mark.parametrize("kind", ["context_only", "generation_only"])
def test_an_engine_without_a_transport_refuses_its_part_of_a_handoff(kind: str) -> None:
    harness = Harness()
    harness.submit(1, prompt_of(5), handoff=Handoff(kind, [1], opaque_state=b"x"))
    harness.run()
    assert "cache_transceiver_config" in harness.errors[1]


@settings(max_examples=examples(80), deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    work=st.lists(
        st.tuples(
            st.integers(1, 30),  # prompt length
            st.integers(0, 2),  # family
            st.integers(1, 10),  # max_tokens
            st.integers(0, 4),  # decode steps before the next arrives
            st.booleans(),  # reads are delivered in those steps
            st.sampled_from(["", "", "", "abort", "fail", "die"]),
            st.one_of(st.just([]), some_media),
        ),
        min_size=1,
        max_size=10,
    ),
    decode_blocks=st.integers(11, 30),
    overlap=st.booleans(),
    ends=st.sets(st.integers(0, VOCAB - 1), max_size=8),
    at_once=st.booleans(),
    windows=some_windows,
)
def test_any_mix_of_handoffs_failures_and_aborts_ends_with_whole_tokens_and_empty_pools(
    work: list[tuple[int, int, int, int, bool, str, list[tuple[str, int]]]], decode_blocks: int, overlap: bool,
    ends: set[int], at_once: bool, windows: tuple[int | None, ...],
) -> None:  # fmt: skip
    pair = Pair(prefill_blocks=100, decode_blocks=decode_blocks, overlap=overlap, windows=windows)
    pair.decode.transport.copies_at_once = at_once  # type: ignore[attr-defined]
    sampling = {"stop_token_ids": sorted(ends), "include_stop_str_in_output": True} if ends else {}
    for sequence_id, (length, family, max_tokens, steps, delivers, fate, media) in enumerate(work):
        prompt = mixed(length, family, media)
        prompt.put(pair.prefill.core)
        handoff = pair.context(sequence_id, prompt.tokens, media=prompt.spans)
        pair.decode.submit(
            sequence_id, prompt.tokens, max_tokens, handoff=handoff, sampling=sampling, media=prompt.spans
        )
        pair.decode.transport.fails_reads = fate == "fail"  # type: ignore[attr-defined]
        pair.prefill.transport.is_dead = fate == "die"  # type: ignore[attr-defined]
        for _ in range(steps):
            pair.step_decode(deliver=delivers)
            pair.prefill.step()
        if fate == "abort":
            pair.decode.core.abort([sequence_id])
    pair.decode.transport.fails_reads = False  # type: ignore[attr-defined]
    pair.finish_decode()
    pair.now += 2 * TIMEOUT_S  # of leases whose reader found the peer dead
    pair.prefill.step()
    needed = {update.sequence_id for update in pair.decode.updates if update.media_needed}
    for sequence_id, (length, family, max_tokens, *_rest, media) in enumerate(work):
        got = pair.decode.tokens[sequence_id]
        whole = undisturbed(mixed(length, family, media).seen, max_tokens, windows)
        whole = whole[: next((at + 1 for at, token in enumerate(whole) if token in ends), len(whole))]
        if sequence_id in needed:
            assert media and got == whole[: len(got)], "decode has no embeddings, and computes nothing of a placeholder"
            continue
        assert got == (whole if pair.decode.finished[sequence_id] != "cancelled" else whole[: len(got)])
    assert pair.prefill.is_empty()
    assert pair.decode.is_empty()


@settings(max_examples=examples(120), deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    turns=st.lists(st.tuples(st.integers(0, 5), st.integers(1, 30), st.booleans()), min_size=3, max_size=25),
    blocks=st.integers(12, 20),
    dies_after=st.one_of(st.none(), st.integers(0, 20)),
    overlap=st.booleans(),
    windows=some_windows,
    seed=st.integers(0, 1000),
)
def test_handoffs_between_engines_with_host_tiers_leave_every_sequence_undisturbed(
    turns: list[tuple[int, int, bool]],
    blocks: int,
    dies_after: int | None,
    overlap: bool,
    windows: tuple[int | None, ...],
    seed: int,
) -> None:
    dice = random.Random(seed)
    pair = Pair(
        prefill_blocks=blocks, decode_blocks=blocks, overlap=overlap, windows=windows, host_blocks=40,
        delay=lambda: dice.randint(1, 6),
    )  # fmt: skip
    expected = {}
    for index, (conversation, length, goes_on) in enumerate(turns):
        prompt = prompt_of(length, conversation)
        expected[index] = undisturbed(prompt, 6, windows)
        is_dead = dies_after is not None and index > dies_after
        handoff = None if is_dead else pair.context(index, prompt)
        pair.decode.submit(index, prompt, 6, handoff=handoff)
        if index == dies_after:
            pair.prefill.transport.is_dead = True  # type: ignore[attr-defined]
        if goes_on:
            pair.step_decode(deliver=dice.random() < 0.5)
        else:
            pair.finish_decode()
    pair.finish_decode()
    for index, tokens in expected.items():
        assert pair.decode.tokens[index] == tokens, index
    while pair.decode.core.wait_s is not None:
        pair.step_decode()
    assert pair.decode.is_empty()
