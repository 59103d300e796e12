"""The engine core against an oracle that reads its own KV cells back: tokens, blocks and slots after every step."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from examples import examples
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.unit.torch_engine.core.media_prompts import key_of, mixed, some_media
from tests.unit.torch_engine.core.oracle_runner import FULL, VOCAB, OracleRunner, next_token, undisturbed
from trtx.torch_engine.core.engine_core import EngineCore
from trtx.torch_engine.core.scheduler_limits import SchedulerLimits
from trtx.torch_engine.core.sequence import Sequence
from trtx.torch_engine.core.speculation.drafters import Draft, DraftState
from trtx.torch_engine.core.speculation.lengths import DraftLengths
from trtx.torch_engine.core.speculation.sources import LookupDrafts
from trtx.torch_engine.core.speculation.speculation import Speculation
from trtx.torch_engine.llmapi.sampling import SamplingParams, resolve_sampling
from trtx.torch_engine.messages import Submit
from trtx.torch_engine.sampling_plan import SamplingPlan


@dataclass
class KnownTokens:
    tokens: list[int] = field(default_factory=list)


class Harness:
    """An engine, what its client has seen, and ``check`` after every step."""

    def __init__(
        self,
        num_blocks: int = 64,
        *,
        batch: int = 8,
        tokens: int = 16,
        chunked: bool = True,
        beside_decodes: int | None = None,
        overlap: bool = True,
        bad_token: int | None = None,
        windows: tuple[int | None, ...] = FULL,
        **core: Any,
    ) -> None:
        masks = np.zeros((batch, -(-VOCAB // 32)), dtype=np.int32) if core.get("grammars") is not None else None
        self.runner = OracleRunner(num_blocks, bad_token=bad_token, windows=windows, masks=masks)
        limits = SchedulerLimits(
            batch,
            tokens,
            enable_chunked_prefill=chunked,
            max_prompt_tokens_beside_decodes=beside_decodes,
            paced_steps=None,
        )
        self.core = EngineCore(self.runner, limits, disable_overlap_scheduler=not overlap, **core)
        self.tokens: dict[int, list[int]] = defaultdict(list)
        self.finished: dict[int, str] = {}
        self.errors: dict[int, str] = {}
        self.updates: list[Any] = []
        self.events: list[dict[str, Any]] = []
        self.stats: list[dict[str, Any]] = []

    def submit(self, sequence_id: int, prompt: list[int], max_tokens: int = 8, **fields: Any) -> None:
        sampling = {"max_tokens": max_tokens, **fields.pop("sampling", {})}
        self.core.submit(Submit(sequence_id, prompt, resolve_sampling(SamplingParams(**sampling)), **fields))

    def step(self) -> None:
        report = self.core.step()
        self.core.check()
        if report is None:
            return
        for update in report.updates:
            self.updates.append(update)
            assert update.sequence_id not in self.finished, "nothing comes after the end"
            self.tokens[update.sequence_id] += update.token_ids
            if update.error is not None:
                self.errors[update.sequence_id] = update.error
            elif update.finish_reason is not None:
                self.finished[update.sequence_id] = update.finish_reason
        self.events += report.kv_events or []
        if report.stats:
            self.stats.append(report.stats)

    def run(self, limit: int = 5000) -> None:
        for _ in range(limit):
            scheduler = self.core.scheduler
            if not (scheduler.waiting or scheduler.running or scheduler.reading or self.core.wait_s == 0.0):
                return
            self.step()
        raise AssertionError(f"work left after {limit} steps")

    def is_empty(self) -> bool:
        return self.core.scheduler.pool.num_held == 0


def prompt_of(length: int, seed: int = 0) -> list[int]:
    return [(seed * 31 + i * 7 + 3) % VOCAB for i in range(length)]


def test_one_request_gets_the_tokens_of_an_undisturbed_run() -> None:
    h = Harness()
    h.submit(1, prompt_of(9), 12)
    h.run()
    assert h.tokens[1] == undisturbed(prompt_of(9), 12)
    assert h.finished == {1: "length"}
    assert h.is_empty()


def test_a_long_prompt_is_chunked_while_others_go_on_decoding() -> None:
    h = Harness(num_blocks=128, tokens=8)
    h.submit(1, prompt_of(3), 40)
    h.step()
    h.submit(2, prompt_of(100, 5), 2)
    before = len(h.tokens[1])
    for _ in range(10):
        h.step()
    assert len(h.tokens[1]) == before + 10
    assert not h.tokens[2]
    h.run()
    assert h.tokens[2] == undisturbed(prompt_of(100, 5), 2)
    assert max(tokens for _, tokens in h.runner.steps) <= 8


@pytest.mark.parametrize("overlap", [False, True])
def test_prompt_tokens_beside_decodes_are_capped_and_alone_they_are_not(overlap: bool) -> None:
    h = Harness(num_blocks=128, tokens=30, beside_decodes=5, overlap=overlap)
    h.submit(1, prompt_of(3), 10)
    h.step()
    h.submit(2, prompt_of(100, 5), 2)
    h.submit(3, prompt_of(7, 6), 2)
    h.run()
    for each, prompt, count in ((1, prompt_of(3), 10), (2, prompt_of(100, 5), 2), (3, prompt_of(7, 6), 2)):
        assert h.tokens[each] == undisturbed(prompt, count)
    tokens = [tokens for _, tokens in h.runner.steps]
    assert 6 in tokens and 30 in tokens, "five beside a decode, as many as there is room for without one"


def test_preempted_sequences_resume_with_identical_tokens() -> None:
    """The scheduler asserts that no step is under way while it preempts; here steps overlap."""
    h = Harness(num_blocks=10, batch=4, tokens=64, enable_iter_perf_stats=True)
    for i in range(4):
        h.submit(i, prompt_of(8, i), 20)
    h.run()
    assert any(row["inflightBatchingStats"]["numPausedRequests"] for row in h.stats), "nothing was preempted"
    assert h.stats[-1]["numPreemptions"] == h.core.scheduler.num_preemptions > 0
    assert all(row["deviceWaitMS"] <= row["iterLatencyMS"] for row in h.stats)
    assert "numGraphMisses" not in h.stats[-1], "this runner has no graphs"
    assert h.runner.most_queued == 2
    assert all(h.tokens[i] == undisturbed(prompt_of(8, i), 20) for i in range(4))


def test_a_second_request_reuses_the_first_ones_prefix() -> None:
    h = Harness(event_buffer_max_size=1000)
    h.submit(1, prompt_of(12), 4)
    h.run()
    h.submit(2, prompt_of(13), 4)
    h.run()
    assert h.tokens[2] == undisturbed(prompt_of(13), 4)
    assert [u.reused_blocks for u in h.updates if u.sequence_id == 2 and u.reused_blocks] == [3]
    assert h.core.scheduler.pool.counters.reused == 3


def test_another_salt_shares_nothing() -> None:
    h = Harness()
    h.submit(1, prompt_of(12), 4, cache_salt="a")
    h.run()
    h.submit(2, prompt_of(12), 4, cache_salt="b")
    h.run()
    assert h.core.scheduler.pool.counters.reused == 0
    assert h.tokens[2] == h.tokens[1]


def test_without_block_reuse_nothing_is_cached() -> None:
    h = Harness(enable_block_reuse=False, event_buffer_max_size=10)
    h.submit(1, prompt_of(12), 4)
    h.run()
    h.submit(2, prompt_of(12), 4)
    h.run()
    assert h.core.scheduler.pool.num_cached == 0
    assert h.events == []
    assert h.tokens[1] == h.tokens[2] == undisturbed(prompt_of(12), 4)


@pytest.mark.parametrize(
    ("prompt", "says"),
    [
        ([], "no tokens"),
        (prompt_of(40), "the prompt has 40 tokens; expected at most 39"),
        ([1, 2, VOCAB], f"token id {VOCAB}; expected 0 to {VOCAB - 1}"),
        ([1, -2], "token id -2"),
    ],
)
def test_a_request_that_can_never_run_is_refused_with_numbers(prompt: list[int], says: str) -> None:
    h = Harness(num_blocks=10)
    h.submit(1, prompt)
    h.submit(2, prompt_of(5), 3)
    h.run()
    assert says in h.errors[1]
    assert h.tokens[2] == undisturbed(prompt_of(5), 3)


def test_without_chunked_prefill_a_prompt_past_the_token_budget_is_refused() -> None:
    h = Harness(chunked=False, tokens=16)
    h.submit(1, prompt_of(17))
    h.submit(2, prompt_of(16), 2)
    h.run()
    assert "max_num_tokens, which is 16" in h.errors[1]
    assert h.tokens[2] == undisturbed(prompt_of(16), 2)


def test_max_tokens_is_clamped_to_the_context() -> None:
    h = Harness(max_seq_len=12)
    h.submit(1, prompt_of(8), 1000)
    h.run()
    assert h.tokens[1] == undisturbed(prompt_of(8), 4)
    assert h.finished[1] == "length"


def test_stop_token_ids_end_a_sequence_and_stay_out_of_its_tokens() -> None:
    whole = undisturbed(prompt_of(6), 10)
    stop = whole[3]
    cut = whole.index(stop)
    h = Harness()
    h.submit(1, prompt_of(6), 10, sampling={"stop_token_ids": [stop]})
    h.submit(2, prompt_of(6), 10, sampling={"stop_token_ids": [stop], "include_stop_str_in_output": True})
    h.submit(3, prompt_of(6), 10, sampling={"end_id": stop})
    h.submit(4, prompt_of(6), 10, sampling={"stop_token_ids": [stop], "min_tokens": 10})
    h.run()
    assert h.tokens[1] == whole[:cut]
    assert h.tokens[2] == h.tokens[3] == whole[: cut + 1]
    assert h.tokens[4] == whole
    assert h.finished == {1: "stop", 2: "stop", 3: "stop", 4: "length"}
    assert {u.sequence_id: u.stop_reason for u in h.updates if u.finish_reason} == {1: stop, 2: stop, 3: None, 4: None}


def test_a_request_whose_every_token_would_end_it_too_soon_is_refused_and_one_that_leaves_a_token_runs() -> None:
    h = Harness()
    h.submit(1, prompt_of(6), 4, sampling={"stop_token_ids": list(range(VOCAB)), "min_tokens": 2})
    h.submit(2, prompt_of(6), 4, sampling={"stop_token_ids": list(range(1, VOCAB)), "min_tokens": 2})
    h.run()
    assert "min_tokens is 2" in h.errors[1] and f"hold all {VOCAB} tokens" in h.errors[1]
    assert 2 not in h.errors and 2 in h.finished


def test_an_aborted_sequence_gives_everything_back_at_any_state() -> None:
    h = Harness(num_blocks=12, batch=2, tokens=4)
    for i in range(4):
        h.submit(i, prompt_of(10, i), 20)
    h.step()
    h.core.abort([0, 3])  # one in the middle of its prompt, one waiting
    h.core.abort([0, 77])
    h.step()
    h.run()
    assert h.finished[0] == h.finished[3] == "cancelled"
    assert h.tokens[1] == undisturbed(prompt_of(10, 1), 20)
    assert h.is_empty()


def test_events_of_stored_blocks_have_the_salt_of_their_sequence() -> None:
    """Without it, a router would take the blocks of salted prompts for those of unsalted ones."""
    h = Harness(num_blocks=12, batch=2, tokens=64, event_buffer_max_size=100)
    for index, salt in enumerate(("a", None)):
        h.submit(index, prompt_of(9), 1, cache_salt=salt)
        h.run()
    stored = [event["data"] for event in h.events if event["data"]["type"] == "stored"]
    assert [data.get("cache_salt") for data in stored] == ["a", None]


def test_events_name_every_cached_block_and_every_eviction() -> None:
    h = Harness(num_blocks=12, batch=2, tokens=64, event_buffer_max_size=10_000)
    for i in range(8):
        h.submit(i, prompt_of(9 + i, i), 10)
    h.run()
    assert [event["event_id"] for event in h.events] == list(range(len(h.events)))
    assert h.events[0]["data"] == {"type": "created", "num_blocks_per_cache_level": [12, 0]}
    known: set[int] = set()
    for event in h.events[1:]:
        data = event["data"]
        if data["type"] == "stored":
            assert data["parent_hash"] is None or data["parent_hash"] in known
            hashes = [block["block_hash"] for block in data["blocks"]]
            assert not known & set(hashes)
            known |= set(hashes)
            assert all(len(block["tokens"]) == 4 for block in data["blocks"])
        else:
            assert set(data["block_hashes"]) <= known
            known -= set(data["block_hashes"])
    assert len(known) == h.core.scheduler.pool.num_cached


def test_what_goes_wrong_with_one_sequence_ends_that_sequence_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted at two places of a sequence's life: whatever is wrong there, is wrong with it."""
    real_advance, real_submit = Sequence.advance, Sequence.from_submit

    def advance(self: Sequence, sampled: Any, end: int) -> Any:
        if self.sequence_id == 2 and len(self.output_token_ids) == 3:
            raise ZeroDivisionError("planted in advance")
        return real_advance(self, sampled, end)

    def from_submit(submit: Submit, **more: Any) -> Sequence:
        if submit.sequence_id == 3:
            raise ZeroDivisionError("planted in submit")
        return real_submit(submit, **more)

    monkeypatch.setattr(Sequence, "advance", advance)
    monkeypatch.setattr(Sequence, "from_submit", from_submit)
    h = Harness()
    for sequence_id in (1, 2, 3, 4):
        h.submit(sequence_id, prompt_of(9, sequence_id), 8)
    h.run()
    assert {key: error.split(";")[0] for key, error in h.errors.items()} == {
        2: "the engine could not serve this request: ZeroDivisionError: planted in advance",
        3: "the engine could not serve this request: ZeroDivisionError: planted in submit",
    }
    assert [h.tokens[key] for key in (1, 4)] == [undisturbed(prompt_of(9, key), 8) for key in (1, 4)]
    assert h.is_empty()


def test_statistics_have_tensorrt_llms_keys_and_add_up() -> None:
    h = Harness(enable_iter_perf_stats=True)
    h.submit(1, prompt_of(9), 3)
    h.run()
    first = h.stats[0]
    assert first["cpuMemUsage"] > 0
    assert first["newActiveRequestsQueueLatencyMS"] > 0
    assert first["kvCacheStats"]["usedNumBlocks"] + first["kvCacheStats"]["freeNumBlocks"] == 64
    assert first["inflightBatchingStats"]["numContextRequests"] == 1
    assert [row["inflightBatchingStats"]["numGenRequests"] for row in h.stats] == [0, 1, 1]
    assert sum(row["numCompletedRequests"] for row in h.stats) == 1
    assert [row["iter"] for row in h.stats] == [1, 2, 3]


def test_priority_decides_who_waits_only_where_it_is_asked_for() -> None:
    order = {}
    for by_priority in (False, True):
        runner = OracleRunner(64)
        core = EngineCore(runner, SchedulerLimits(1, 64, by_priority=by_priority))
        for sequence_id, priority in ((1, 0.1), (2, 0.5), (3, 0.9)):
            core.submit(Submit(sequence_id, prompt_of(4, sequence_id), SamplingPlan(max_tokens=1), priority=priority))
        ended = []
        while core.wait_s == 0.0:
            report = core.step()
            ended += [update.sequence_id for update in report.updates] if report is not None else []
        order[by_priority] = ended
    assert order == {False: [1, 2, 3], True: [3, 2, 1]}


some_windows = st.sampled_from([FULL, (5,), (1,), (None, 9), (None, 2, 13)])  # of layer groups; blocks have 4 tokens

arrivals = st.lists(
    st.tuples(
        st.integers(0, 6),  # steps before it
        st.integers(1, 30),  # prompt length
        st.integers(0, 3),  # prompt family: equal ones share prefixes
        st.integers(1, 16),  # max_tokens
        st.one_of(st.none(), st.integers(0, 12)),  # abort after that many steps
        st.one_of(st.just([]), some_media),
        st.sampled_from(["", "", "", "a", "ab"]),  # dropped, and put again with the next one
    ),
    min_size=1,
    max_size=14,
)


class OracleDrafter:
    """Drafts what the oracle says, with a wrong guess now and then; without the media that it can't see."""

    def __init__(self, windows: tuple[int | None, ...]) -> None:
        self._windows = windows

    def begin(self, cache_salt: str | None) -> KnownTokens:
        return KnownTokens()

    def draft(self, state: DraftState, most: int) -> Draft:
        tokens = list(state.tokens)
        for _ in range(most):
            tokens.append((next_token(tokens, windows=self._windows) + (len(tokens) % 5 == 0)) % VOCAB)
        return Draft(tokens[len(state.tokens) :], 1)


def oracle_speculation(most: int, batch: int, windows: tuple[int | None, ...]) -> Speculation | None:
    lengths = DraftLengths(most, schedule={max(1, batch // 2): most, batch: 1})
    return Speculation(LookupDrafts(OracleDrafter(windows)), lengths, is_asynchronous=True) if most else None


@settings(max_examples=examples(120), deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    work=arrivals,
    num_blocks=st.integers(12, 30),
    batch=st.integers(1, 6),
    tokens=st.integers(1, 24),
    chunked=st.booleans(),
    reuse=st.booleans(),
    overlap=st.booleans(),
    ends=st.sets(st.integers(0, VOCAB - 1), max_size=8),
    bad_token=st.one_of(st.none(), st.integers(0, VOCAB - 1)),
    windows=some_windows,
    most_drafts=st.sampled_from([0, 0, 1, 4]),
)
def test_any_mix_of_arrivals_aborts_and_tiny_pools_leaves_every_sequence_undisturbed(
    work: list[tuple[int, int, int, int, int | None, list[tuple[str, int]], str]],
    num_blocks: int,
    batch: int,
    tokens: int,
    chunked: bool,
    reuse: bool,
    overlap: bool,
    ends: set[int],
    bad_token: int | None,
    windows: tuple[int | None, ...],
    most_drafts: int,
) -> None:
    """A token ends a sequence where nobody could know it: a step that was launched with it in it must harm nobody.

    A preempted sequence may lack its embeddings: what it had until then is right.
    """
    h = Harness(
        num_blocks * len(windows), batch=batch, tokens=tokens, chunked=chunked, overlap=overlap, bad_token=bad_token,
        windows=windows, enable_block_reuse=reuse, speculation=oracle_speculation(most_drafts, batch, windows),
    )  # fmt: skip
    aborts: dict[int, list[int]] = defaultdict(list)
    now = 0
    for sequence_id, (wait, length, family, max_tokens, abort_after, media, drops) in enumerate(work):
        for _ in range(wait):
            h.core.abort(aborts.pop(now, []))
            h.step()
            now += 1
        sampling = {"stop_token_ids": sorted(ends), "include_stop_str_in_output": True} if ends else {}
        prompt = mixed(length, family, media)
        prompt.put(h.core)
        h.submit(sequence_id, prompt.tokens, max_tokens, sampling=sampling, media=prompt.spans)
        h.core.scheduler.media.drop(map(key_of, drops))
        if abort_after is not None:
            aborts[now + abort_after].append(sequence_id)
    while aborts:
        h.core.abort(aborts.pop(now, []))
        h.step()
        now += 1
    h.run()
    needed = {update.sequence_id for update in h.updates if update.media_needed}
    for sequence_id, (_, length, family, max_tokens, _abort, media, _drops) in enumerate(work):
        prompt = mixed(length, family, media)
        whole = undisturbed(prompt.seen, max_tokens, windows)
        end = next((at + 1 for at, token in enumerate(whole) if token in ends or token == bad_token), len(whole))
        whole, is_bad = whole[:end], whole[end - 1] == bad_token
        whole = whole[: end - is_bad]
        got = h.tokens[sequence_id]
        if sequence_id in h.errors:
            is_refused = not chunked and len(prompt.tokens) > tokens
            is_short = sequence_id in needed and got == whole[: len(got)]
            assert (is_bad and got == whole) or is_refused or is_short
        elif h.finished[sequence_id] == "cancelled":
            assert got == whole[: len(got)]
        else:
            assert got == whole and not is_bad
    assert h.is_empty() and not h.runner.queue


def test_a_draft_saves_steps_takes_no_block_beyond_the_pool_and_registers_accepted_tokens_alone() -> None:
    h = Harness(batch=1, speculation=oracle_speculation(4, 1, FULL), event_buffer_max_size=100)
    h.submit(1, prompt_of(9), 13)
    h.run()
    whole = prompt_of(9) + undisturbed(prompt_of(9), 13)
    assert h.tokens[1] == whole[9:]
    assert len(h.runner.steps) < 10
    blocks = [block for event in h.events for block in event["data"].get("blocks", ())]
    tokens = [token["token_id"] for block in blocks for token in block["tokens"]]
    assert tokens == whole[:20], "the 21 tokens that are computed fill 5 blocks of 4"


def test_the_oracle_notices_a_wrong_cell() -> None:
    """The property tests above rest on this."""
    h = Harness()
    h.submit(1, prompt_of(9), 4)
    h.step()
    h.step()
    block = h.core.scheduler.running[0].block_ids[0][0]
    h.runner.cells[block][0] = (1, 1)
    h.run()
    assert h.tokens[1] != undisturbed(prompt_of(9), 4)
    assert next_token([1, 2]) != next_token([2, 1])
