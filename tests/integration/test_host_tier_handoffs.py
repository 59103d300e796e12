"""Returning conversations over two engines with host tiers: handoffs, cancellations, salts and a killed peer."""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any

import psutil
import pytest
from topology_clients import wait_until

from trtx.torch_engine.llmapi import LLM, DisaggregatedParams, RequestError, SamplingParams

pytestmark = pytest.mark.proof

MODEL = "synthetic:tiny"
CONVERSATIONS, TURNS = 400, 13
KILLED_IN = 6  # this turn, half-way
LONGEST = 512
SALTS = (None, "one", "two", "three")
POOL_TOKENS = 40 * 88  # about 40 conversations
HANDS_OFF = {"backend": "NIXL", "kv_transfer_timeout_ms": 20_000}


def engine(*, pool_tokens: int, **more: Any) -> LLM:
    kv = {"tokens_per_block": 8, "max_tokens": pool_tokens, "dtype": "fp8", **more.pop("kv", {})}
    return LLM(MODEL, deterministic=True, max_batch_size=16, max_seq_len=LONGEST, kv_cache_config=kv, **more)


def tiered(ranks: int) -> LLM:
    return engine(
        pool_tokens=POOL_TOKENS, kv={"host_cache_size": (64 << 20) // ranks}, cache_transceiver_config=HANDS_OFF,
        enable_iter_perf_stats=True, tensor_parallel_size=ranks,
    )  # fmt: skip


def has_memory(pid: int) -> bool:
    """Whether a process can still be read, as a killed one can until it has a core once more."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@dataclass
class Peers:
    """The engine with a pool for all, and the pair whose answers are compared with its."""

    whole: LLM
    prefill: LLM
    decode: LLM
    handed: int = 0
    ranks: int = 1  # of each engine
    alone: int = 0  # requests without a prefill engine

    def expected(self, prompt: list[int], params: SamplingParams, salt: str | None) -> list[int]:
        return list(self.whole.generate_async(prompt, params, cache_salt=salt).result(120).outputs[0].token_ids)

    def found(
        self, prompt: list[int], params: SamplingParams, salt: str | None, *, cancels: bool, kills: bool
    ) -> tuple[list[int], int]:
        """Returns (tokens, reused blocks of the prompt on the first engine).

        ``kills``: kills the prefill engine before the decode engine reads its KV.
        """
        handed = first = None
        try:
            asked = DisaggregatedParams(request_type="context_only", disagg_request_id=1 << 41)
            first = self.prefill.generate_async(
                prompt, params, disaggregated_params=asked, cache_salt=salt
            ).result(120)  # fmt: skip
            given = first.outputs[0].disaggregated_params
            assert given is not None
            handed = replace(given, request_type="generation_only")
            self.handed += 1
        except (RequestError, RuntimeError):  # it is dead
            self.alone += 1
        if kills:
            os.kill(pid := self.prefill.engine_pid, signal.SIGKILL)
            wait_until(lambda: not has_memory(pid), 30, "the prefill engine gone, with all that could be read")
        rest = self.decode.generate_async(prompt, params, disaggregated_params=handed, cache_salt=salt)
        if cancels:
            rest.abort()
        answer = rest.result(120)
        metrics = (first or answer).outputs[0].request_perf_metrics
        reused = metrics.kv_cache_metrics.num_reused_blocks if metrics and metrics.kv_cache_metrics else 0
        return list(answer.outputs[0].token_ids), reused


@dataclass
class Talk:
    """One conversation. Four begin with the same prompt under different salts."""

    index: int
    history: list[int] = field(default_factory=list)
    dice: random.Random = field(init=False)

    def __post_init__(self) -> None:
        self.dice = random.Random(self.index)

    def turn(self, number: int, peers: Peers, kills: bool) -> bool:
        """Compares one turn's answers. Returns whether it was cancelled."""
        dice, salt = self.dice, SALTS[self.index % len(SALTS)]
        count = dice.randint(1, 6)
        if not number:
            count, dice = dice.randint(16, 60), random.Random(1000 + self.index // len(SALTS))
            count = dice.randint(16, 60)
        prompt = self.history + [dice.randint(5, 999) for _ in range(count)]
        temperature = self.dice.choice([0.0, 1.0])
        params = SamplingParams(
            max_tokens=self.dice.randint(2, 6), ignore_eos=True, seed=self.dice.randrange(1 << 60),
            temperature=temperature,
        )  # fmt: skip
        cancels = self.dice.random() < 0.1 and not kills
        expected = peers.expected(prompt, params, salt)
        found, reused = peers.found(prompt, params, salt, cancels=cancels, kills=kills)
        at = f"conversation {self.index}, turn {number}"
        assert found == (expected[: len(found)] if cancels else expected), at
        assert reused * 8 <= len(self.history), f"{at}: blocks of another salt"
        self.history = prompt + expected
        return cancels


@pytest.fixture
def peers(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Peers]:
    ranks: int = request.param
    monkeypatch.setenv("UCX_NET_DEVICES", "lo")
    with ThreadPoolExecutor() as pool:
        loading = [
            pool.submit(engine, pool_tokens=CONVERSATIONS * 240, tensor_parallel_size=ranks),
            pool.submit(tiered, ranks), pool.submit(tiered, ranks),
        ]  # fmt: skip
        made = Peers(*(future.result() for future in loading), ranks=ranks)
    yield made
    for one in (made.whole, made.prefill, made.decode):
        one.shutdown()


@pytest.mark.parametrize("peers", [1, 2], indirect=True, ids=["one-rank", "two-ranks"])
def test_five_thousand_requests_over_handoffs_and_a_killed_peer_are_those_of_one_large_pool(peers: Peers) -> None:
    talks = [Talk(index) for index in range(CONVERSATIONS)]
    order, cancelled = random.Random(0), 0
    with ThreadPoolExecutor(16) as clients:
        for number in range(TURNS):
            order.shuffle(talks)
            kills_at = len(talks) // 2 if number == KILLED_IN else None
            turns = [
                clients.submit(talk.turn, number, peers, place == kills_at) for place, talk in enumerate(talks)
            ]  # fmt: skip
            cancelled += sum(turn.result() for turn in turns)
            if number == KILLED_IN:
                peers.prefill.shutdown()
                peers.prefill = tiered(peers.ranks)
    reads = peers.decode.handoff_stats()
    tiers = [row["hostKvCacheStats"] for one in (peers.prefill, peers.decode) for row in one.get_stats(2)[-1:]]
    print(
        f"{CONVERSATIONS * TURNS} requests, {cancelled} cancelled, {peers.handed} handed off, {reads.reads} reads, "
        f"{reads.recomputed} recomputed, {peers.alone} without a prefill engine; {tiers}"
    )
    assert cancelled and peers.alone and reads.reads and reads.recomputed
    assert len(tiers) == 2 and all(tier["storedBytes"] for tier in tiers) and any(tier["loadedBytes"] for tier in tiers)
    assert peers.handed + peers.alone == CONVERSATIONS * TURNS
