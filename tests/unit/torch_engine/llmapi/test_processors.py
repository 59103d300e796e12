"""Logits processors and several choices of the LLM API, with an engine in a process of its own."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from trtx import LLM, BatchedLogitsProcessor, LogitsProcessor, RequestError, RequestFailed, SamplingParams

pytestmark = pytest.mark.slow

PROMPT = [5, 9, 13]
LONG_PROMPT = [7 + at % 50 for at in range(100)]
TOKENS_PER_BLOCK = 32


class Only(LogitsProcessor):
    def __init__(self, *allowed: int) -> None:
        self.allowed = list(allowed)

    def __call__(
        self, req_id: int, logits: torch.Tensor, token_ids: list[list[int]], stream_ptr: int | None, client_id: Any
    ) -> None:
        kept = logits[:, :, self.allowed].clone()
        logits.fill_(-torch.inf)
        logits[:, :, self.allowed] = kept


class Counting(LogitsProcessor):
    """Its state is a copy for each choice."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(
        self, req_id: int, logits: torch.Tensor, token_ids: list[list[int]], stream_ptr: int | None, client_id: Any
    ) -> None:
        assert len(token_ids[0]) == len(PROMPT) + self.calls
        Only(20 + self.calls)(req_id, logits, token_ids, stream_ptr, client_id)
        self.calls += 1


class OnlyBatched(BatchedLogitsProcessor):
    def __init__(self, token: int) -> None:
        self.token = token

    def __call__(
        self,
        req_ids: list[int],
        logits: list[torch.Tensor],
        token_ids: list[list[list[int]]],
        stream_ptr: int | None,
        client_ids: list[Any],
    ) -> None:
        for request, row, tokens in zip(req_ids, logits, token_ids, strict=True):
            Only(self.token)(request, row, tokens, stream_ptr, None)


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with pytest.MonkeyPatch.context() as one_thread:
        one_thread.setenv("OMP_NUM_THREADS", "1")  # more threads than idle cores make each step wait
        with LLM(
            "synthetic:tiny",
            batched_logits_processor=OnlyBatched(42),
            max_batch_size=8,
            max_num_tokens=128,
            kv_cache_config={"max_tokens": 4096, "tokens_per_block": TOKENS_PER_BLOCK},
        ) as made:
            yield made


def params(**changes: Any) -> SamplingParams:
    return SamplingParams(**({"max_tokens": 5, "end_id": -1} | changes))


def tokens(llm: LLM, **changes: Any) -> list[int]:
    return list(llm.generate_async(PROMPT, params(**changes)).result(60).outputs[0].token_ids)


def test_a_processor_edits_the_logits_of_its_request_alone(llm: LLM) -> None:
    free = tokens(llm)
    outputs = llm.generate([PROMPT, PROMPT, PROMPT], [params(), params(logits_processor=Only(11)), params()])
    assert isinstance(outputs, list)
    assert [list(one.outputs[0].token_ids) for one in outputs] == [free, [11] * 5, free]


def test_a_list_of_processors_applies_in_its_order(llm: LLM) -> None:
    assert tokens(llm, logits_processor=[Only(11, 12), Only(12, 13)]) == [12] * 5


def test_code_that_no_module_holds_travels_by_value(llm: LLM) -> None:
    wanted = 17

    def local(req_id: int, logits: torch.Tensor, token_ids: Any, stream_ptr: Any, client_id: Any) -> None:
        Only(wanted)(req_id, logits, token_ids, stream_ptr, client_id)

    assert tokens(llm, logits_processor=local) == [17] * 5


def test_each_choice_has_a_processor_of_its_own(llm: LLM) -> None:
    outputs = llm.generate_async(PROMPT, params(n=3, temperature=1.0, logits_processor=Counting())).result(60).outputs
    assert [list(one.token_ids) for one in outputs] == [[20, 21, 22, 23, 24]] * 3


def test_what_cannot_be_pickled_is_refused_with_its_reason(llm: LLM) -> None:
    processor = Only(3)
    processor.lock = threading.Lock()  # type: ignore[attr-defined]
    with pytest.raises(RequestError, match="logits_processor can't be sent to the engine's process: TypeError"):
        tokens(llm, logits_processor=processor)
    with pytest.raises(ValueError, match="batched_logits_processor can't be sent"):
        LLM("synthetic:tiny", batched_logits_processor=processor)
    with pytest.raises(ValueError, match="batched_logits_processor is 3; expected a callable with five parameters"):
        LLM("synthetic:tiny", batched_logits_processor=3)


def test_an_exception_and_spoiled_logits_end_their_own_request(llm: LLM) -> None:
    def raises(req_id: int, logits: torch.Tensor, token_ids: Any, stream_ptr: Any, client_id: Any) -> None:
        if len(token_ids[0]) > len(PROMPT) + 1:
            raise KeyError("missing state")

    def spoils(req_id: int, logits: torch.Tensor, token_ids: Any, stream_ptr: Any, client_id: Any) -> None:
        logits.fill_(-torch.inf)

    free = tokens(llm)
    running = [llm.generate_async(PROMPT, params(logits_processor=one)) for one in (raises, spoils, None)]
    with pytest.raises(RequestError, match="logits processor raises failed after 2 tokens: KeyError: 'missing state'"):
        running[0].result(60)
    with pytest.raises(RequestError, match="after its logits processors") as refused:
        running[1].result(60)
    assert not isinstance(refused.value, RequestFailed), "the request's own fault"
    assert list(running[2].result(60).outputs[0].token_ids) == free


def test_the_batched_processor_edits_the_requests_that_ask_for_it(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    assert tokens(llm, apply_batched_logits_processor=True) == [42] * 5
    assert tokens(llm, apply_batched_logits_processor=True, logits_processor=Only(42, 43)) == [42] * 5
    assert tokens(llm) != [42] * 5
    monkeypatch.setattr(llm, "_has_batched", False)
    with pytest.raises(RequestError, match="this LLM has no batched_logits_processor"):
        tokens(llm, apply_batched_logits_processor=True)


def test_best_of_returns_the_likeliest_choices_numbered_anew(llm: LLM) -> None:
    drawn = {"temperature": 1.5, "seed": 11, "max_tokens": 6}
    six = llm.generate_async(PROMPT, params(n=6, logprobs=0, **drawn)).result(60).outputs
    best = llm.generate_async(PROMPT, params(n=2, best_of=6, **drawn)).result(60).outputs
    ordered = sorted(six, key=lambda one: -(one.cumulative_logprob or 0.0))
    assert [one.token_ids for one in best] == [one.token_ids for one in ordered[:2]]
    assert [one.cumulative_logprob for one in best] == [one.cumulative_logprob for one in ordered[:2]]
    assert [one.index for one in best] == [0, 1]
    assert all(one.text and one.finish_reason == "length" and not one.logprobs for one in best)


def test_best_of_in_a_stream_is_refused(llm: LLM) -> None:
    with pytest.raises(RequestError, match="best_of is 3 and n is 1 in a streamed request"):
        llm.generate_async(PROMPT, params(best_of=3, temperature=1.0), streaming=True)


def test_choices_share_the_blocks_of_their_prompt(llm: LLM) -> None:
    drawn = params(n=4, temperature=1.0, seed=5)
    outputs = llm.generate_async(LONG_PROMPT, drawn).result(60).outputs
    found = [one.request_perf_metrics for one in outputs]
    assert [one.kv_cache_metrics.num_reused_blocks if one else 0 for one in found] == [0, 3, 3, 3]
    assert len({tuple(one.token_ids) for one in outputs}) == 4, "the choices have seeds of their own"
