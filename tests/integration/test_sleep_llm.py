"""``LLM.release``, ``resume`` and ``update_weights`` under load, and what a killed engine says."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from typing import Any

import psutil
import pytest

from trtx.torch_engine.llmapi import LLM, DisaggregatedParams, RequestError, RequestFailed, SamplingParams

CONFIG: dict[str, Any] = {
    "max_seq_len": 256, "max_batch_size": 8, "sleep_config": {},
    "kv_cache_config": {"tokens_per_block": 16, "max_tokens": 4096},
}  # fmt: skip
GREEDY = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True)
PROMPTS = [[(at * 37 + number * 101) % 3000 + 5 for at in range(20 + number)] for number in range(4)]


def test_under_load_every_request_is_answered_as_before_or_refused_because_the_engine_sleeps() -> None:
    with LLM("synthetic:tiny", **CONFIG) as llm:
        expected = [llm.generate(prompt, GREEDY).outputs[0].token_ids for prompt in PROMPTS]
        is_over = threading.Event()
        right, asleep, wrong = [0], [0], []

        def ask(number: int) -> None:
            while not is_over.is_set():
                try:
                    found = llm.generate(PROMPTS[number], GREEDY).outputs[0].token_ids
                except RequestFailed as error:
                    asleep[0] += "the engine is asleep" in str(error)
                    continue
                right[0] += found == expected[number]
                if found != expected[number]:
                    wrong.append(found)

        threads = [threading.Thread(target=ask, args=(number,)) for number in range(len(PROMPTS))]
        for thread in threads:
            thread.start()
        for tags in (None, ["kv_cache"], ["model_weights"]):
            llm.release(tags, timeout_s=60)
            assert llm.get_memory_status()["state"] == "parked"
            llm.resume()
            before = right[0]
            while right[0] == before and not wrong:  # an answer came after the wake
                assert threads[0].is_alive()
                is_over.wait(0.01)
        is_over.set()
        for thread in threads:
            thread.join(60)
        assert not wrong and right[0] and asleep[0]
        assert llm.get_memory_status() == {"state": "running", "parked_tags": []}
        with pytest.raises(ValueError, match="expected a list of one or more of kv_cache, model_weights"):
            llm.release(["sampler"])
        with pytest.raises(RequestError, match="the engine is not asleep, so there is nothing to wake"):
            llm.resume()
        llm.update_weights("synthetic:tiny")  # a name, as for LLM
        assert llm.generate(PROMPTS[0], GREEDY).outputs[0].token_ids == expected[0]
        with pytest.raises(RequestError, match="'/no/model' is not a directory on this machine"):
            llm.update_weights("/no/model")
        llm.release()
        os.kill(llm.engine_pid, signal.SIGKILL)
        with pytest.raises(RuntimeError, match="engine process died"):
            llm.resume()


def test_a_head_above_host_memory_answers_and_guesses_as_before_after_each_sleep() -> None:
    """Each sleep is between two rounds of the same conversations, which return to a pool that is too small for them."""
    kv = {"tokens_per_block": 8, "max_tokens": 192, "host_cache_size": 1 << 24}
    spec = {"decoding_type": "Eagle3", "max_draft_len": 4, "speculative_model": "synthetic:tiny-eagle3"}
    engine: dict[str, Any] = {"max_seq_len": 160, "max_batch_size": 1, "deterministic": True}
    greedy = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)

    def answers(llm: LLM) -> list[list[int]]:
        histories = [[(at * 37 + talk * 101) % 900 + 5 for at in range(60 + talk)] for talk in range(4)]
        found = []
        for turn in range(3):
            for history in histories:
                found.append(list(llm.generate(history, greedy).outputs[0].token_ids))
                history += [*found[-1], 7 + turn]
        return found

    with LLM("synthetic:tiny-trained", **engine, kv_cache_config={"max_tokens": 4096}) as plain:
        expected = answers(plain)
    spec["draft_len_schedule"] = {1: 4}
    with LLM(
        "synthetic:tiny-trained", **engine, kv_cache_config=kv, speculative_config=spec, sleep_config={},
        enable_iter_perf_stats=True,
    ) as llm:  # fmt: skip
        rounds = []
        for tags in (None, ["kv_cache"], None):
            assert answers(llm) == expected
            stats = llm.get_stats(2)
            counts = [row["specDecodingStats"] for row in stats if "specDecodingStats" in row]
            rounds.append([sum(row[name] for row in counts) for name in ("numDraftTokens", "numAcceptedTokens")])
            assert stats[-1]["hostKvCacheStats"]["reusedBlocks"] > 0
            llm.release(tags)
            llm.resume()
        assert rounds[0] == rounds[1] == rounds[2]
        assert 0 < rounds[0][1] < rounds[0][0]


def test_engines_of_two_ranks_hand_off_their_kv_before_and_after_both_slept_and_end_with_a_rank() -> None:
    ranked = CONFIG | {"cache_transceiver_config": {"backend": "NIXL"}, "tensor_parallel_size": 2}
    asked = DisaggregatedParams(request_type="context_only")
    with LLM("synthetic:tiny", **ranked) as prefill, LLM("synthetic:tiny", **ranked) as decode:
        expected = prefill.generate(PROMPTS[0], GREEDY).outputs[0].token_ids

        def changes() -> Iterator[None]:
            yield
            for one in (prefill, decode):
                one.release()
            for one in (decode, prefill):
                one.resume()
            yield
            for one in (prefill, decode):
                one.update_weights("synthetic:tiny")
            yield

        for number, _ in enumerate(changes()):
            params = prefill.generate(PROMPTS[0], GREEDY, disaggregated_params=asked).disaggregated_params
            assert params is not None
            params.request_type = "generation_only"
            handed = decode.generate(PROMPTS[0], GREEDY, disaggregated_params=params).outputs[0].token_ids
            assert handed == expected
            stats = decode.handoff_stats()
            assert (stats.reads, stats.recomputed, stats.failed_reads) == (number + 1, 0, 0)
            decode.release(["kv_cache"])  # forget the blocks: the next handoff reads all of them
            decode.resume()
        decode.release()
        (rank,) = psutil.Process(decode.engine_pid).children()
        rank.kill()
        with pytest.raises(RuntimeError, match=f"rank 1 ended: pid {rank.pid}"):
            decode.resume()


def test_an_engine_does_not_sleep_in_the_middle_of_a_handoff() -> None:
    with_nixl = CONFIG | {"cache_transceiver_config": {"backend": "NIXL"}}
    with LLM("synthetic:tiny", **with_nixl) as prefill, LLM("synthetic:tiny", **with_nixl) as decode:
        asked = DisaggregatedParams(request_type="context_only")
        params = prefill.generate(PROMPTS[0], GREEDY, disaggregated_params=asked).disaggregated_params
        assert params is not None
        with pytest.raises(RequestError, match="the engine has 1 unread handoff, and did not finish in time"):
            prefill.release(timeout_s=0.2)
        params.request_type = "generation_only"
        handed = decode.generate(PROMPTS[0], GREEDY, disaggregated_params=params).outputs[0].token_ids
        assert decode.handoff_stats().reads == 1
        prefill.release()
        prefill.resume()
        assert prefill.generate(PROMPTS[0], GREEDY).outputs[0].token_ids == handed
