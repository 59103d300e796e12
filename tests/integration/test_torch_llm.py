"""The embedded engine as its callers see it: a real process, a real model, real tokens."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from engine_protocol import check_engine
from tokenizers.processors import TemplateProcessing

from tests.unit.torch_engine.llmapi import sampling_probes
from trtx.engine import embedded
from trtx.errors import UsageError
from trtx.torch_engine.llmapi import LLM, DisaggregatedParams, MediaSpan, RequestError, SamplingParams
from trtx.torch_engine.llmapi.sampling import FIELDS, FieldUse

MODEL = "synthetic:tiny"
SMALL: dict[str, Any] = {
    "max_batch_size": 16,
    "max_seq_len": 512,
    "kv_cache_config": {"max_tokens": 8192, "event_buffer_max_size": 1000},
    "enable_iter_perf_stats": True,
}
GREEDY = SamplingParams(max_tokens=24, ignore_eos=True)


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(MODEL, batched_logits_processor=sampling_probes.batched_without_the_likeliest, **SMALL) as engine:
        yield engine


@pytest.fixture(scope="module")
def cramped() -> Iterator[LLM]:
    """An engine that has to chunk prompts and to preempt sequences."""
    small = {
        "max_num_tokens": 48,
        "max_seq_len": 256,
        "enable_chunked_prefill": True,
        "kv_cache_config": {"max_tokens": 640, "tokens_per_block": 16, "host_cache_size": 32 << 20},
    }
    with LLM(MODEL, **SMALL | small) as engine:
        yield engine


def prompts(count: int) -> list[list[int]]:
    """Mixed lengths, 1 to 200 tokens, some with common beginnings."""
    lengths = [1 + (index * 37) % 200 for index in range(count)]
    return [[(7 + (index % 3) * 11 + at * 13) % 1000 + 5 for at in range(n)] for index, n in enumerate(lengths)]


def tokens_of(engine: LLM, inputs: list[list[int]], params: SamplingParams = GREEDY) -> list[list[int]]:
    outputs = [engine.generate_async(prompt, params) for prompt in inputs]
    return [_finished(output).outputs[0].token_ids for output in outputs]


def _finished(output: Any) -> Any:
    return output.result(timeout=120)


def gone(pid: int, seconds: float = 10.0) -> bool:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE:
            return True
        time.sleep(0.02)
    return False


def test_greedy_tokens_do_not_depend_on_batching_chunking_or_preemption(llm: LLM, cramped: LLM) -> None:
    inputs = prompts(24)
    alone = [tokens_of(llm, [prompt])[0] for prompt in inputs]
    assert all(len(tokens) == GREEDY.max_tokens for tokens in alone)
    assert tokens_of(llm, inputs) == alone, "together, with prefix hits"
    assert tokens_of(cramped, inputs) == alone
    rows = cramped.get_stats(timeout=5)
    assert max(row["inflightBatchingStats"]["numPausedRequests"] for row in rows) > 0, "nothing was preempted"
    assert max(row["inflightBatchingStats"]["numCtxTokens"] for row in rows) <= 48


def test_streamed_steps_are_cumulative_and_add_up_to_the_whole(llm: LLM) -> None:
    async def stream() -> tuple[list[int], str, int]:
        seen: list[int] = []
        text = ""
        steps = 0
        output = llm.generate_async(prompts(5)[4], GREEDY, streaming=True)
        async for step in output:
            choice = step.outputs[0]
            assert choice.token_ids[: len(seen)] == seen
            seen += choice.token_ids_diff
            text += choice.text_diff
            assert seen == choice.token_ids
            steps += 1
        return seen, text, steps

    seen, text, steps = asyncio.run(stream())
    whole = llm.generate(prompts(5)[4], GREEDY)
    assert not isinstance(whole, list)
    assert (seen, text) == (whole.outputs[0].token_ids, whole.outputs[0].text)
    assert 1 < steps <= len(seen)


def test_text_is_what_the_tokenizer_decodes(llm: LLM) -> None:
    output = llm.generate("The quick brown fox", GREEDY)
    assert not isinstance(output, list)
    assert output.prompt_token_ids == llm.tokenizer("The quick brown fox").input_ids
    choice = output.outputs[0]
    assert choice.text == llm.tokenizer.decode(choice.token_ids, skip_special_tokens=True)


def test_a_stop_string_cuts_text_and_tokens_and_frees_the_sequence(llm: LLM) -> None:
    prompt = prompts(8)[7]
    whole = _finished(llm.generate_async(prompt, replace(GREEDY, max_tokens=60))).outputs[0]
    middle = len(whole.text) // 2
    stop = whole.text[middle : middle + 5]
    cut = _finished(llm.generate_async(prompt, replace(GREEDY, max_tokens=400, stop=stop))).outputs[0]
    assert cut.text == whole.text[: whole.text.index(stop)]
    assert cut.token_ids == whole.token_ids[: len(cut.token_ids)]
    assert (cut.finish_reason, cut.stop_reason) == ("stop", stop)
    assert _idle(llm)


def _idle(llm: LLM) -> bool:
    """The last row of statistics says that nothing runs, within 10 s."""
    deadline = time.monotonic() + 10
    llm.get_stats(timeout=0.1)
    while time.monotonic() < deadline:
        llm.generate([5, 6], SamplingParams(max_tokens=1))
        if (rows := llm.get_stats(timeout=1)) and rows[-1]["numActiveRequests"] == 0:
            return True
    return False


def test_an_abort_ends_the_stream_as_cancelled(llm: LLM) -> None:
    async def run() -> tuple[str | None, int]:
        output = llm.generate_async([9, 8, 7], SamplingParams(max_tokens=450, ignore_eos=True), streaming=True)
        async for step in output:
            if len(step.outputs[0].token_ids) >= 3:
                output.abort()
        return output.outputs[0].finish_reason, len(output.outputs[0].token_ids)

    reason, length = asyncio.run(run())
    assert reason == "cancelled"
    assert 3 <= length < 450
    assert _idle(llm)


def test_a_bad_request_is_refused_alone(llm: LLM) -> None:
    good = llm.generate_async([5, 6, 7], GREEDY)
    too_long = llm.generate_async([5] * 600, GREEDY)
    outside = llm.generate_async([5, 10**6], GREEDY)
    with pytest.raises(RequestError, match="600 tokens; expected at most 511"):
        too_long.result(timeout=60)
    with pytest.raises(RequestError, match="token id 1000000"):
        outside.result(timeout=60)
    assert len(_finished(good).outputs[0].token_ids) == GREEDY.max_tokens


def test_max_tokens_past_the_context_is_clamped(llm: LLM) -> None:
    output = _finished(llm.generate_async([5] * 500, SamplingParams(max_tokens=5000, ignore_eos=True)))
    assert len(output.outputs[0].token_ids) == 12
    assert output.outputs[0].finish_reason == "length"


def test_choices_differ_and_a_seed_repeats_them(llm: LLM) -> None:
    params = SamplingParams(max_tokens=12, n=3, temperature=1.5, top_p=1.0, seed=11, ignore_eos=True, logprobs=1)
    first, second = (_finished(llm.generate_async([5, 9, 13], params)) for _ in range(2))
    choices = [choice.token_ids for choice in first.outputs]
    assert choices == [choice.token_ids for choice in second.outputs]
    assert len({tuple(tokens) for tokens in choices}) > 1
    for choice in first.outputs:
        assert all(token in row for token, row in zip(choice.token_ids, choice.logprobs, strict=True))
        assert choice.cumulative_logprob < 0


def test_prompt_logprobs_cover_every_prompt_token_but_the_first(llm: LLM) -> None:
    prompt = prompts(4)[3]
    for _ in range(2):  # the second time its prefix is cached
        output = _finished(llm.generate_async(prompt, replace(GREEDY, prompt_logprobs=0)))
        rows = output.outputs[0].prompt_logprobs
        assert [token in row for token, row in zip(prompt[1:], rows, strict=True)] == [True] * (len(prompt) - 1)


BOS = 1  # special, in the vocabulary of every synthetic model


@pytest.fixture(scope="module")
def with_special_tokens(llm: LLM) -> Iterator[None]:
    """The synthetic tokenizer adds none to a prompt; most others do."""
    tokenizer: Any = llm._tokenizer
    tokenizer.post_processor = TemplateProcessing(single="<|bos|> $A", special_tokens=[("<|bos|>", BOS)])
    yield
    tokenizer.post_processor = TemplateProcessing(single="$A")


@pytest.mark.parametrize("name", [name for name, field in FIELDS.items() if field.torch is not FieldUse.REFUSED])
def test_a_sampling_field_changes_answers_exactly_if_it_is_honoured(
    llm: LLM, with_special_tokens: None, name: str
) -> None:
    # Special tokens are rarely sampled: one comes from a prefill engine, which takes no choices.
    first = DisaggregatedParams(request_type="generation_only", first_gen_tokens=[BOS])
    handed = first if name == "skip_special_tokens" else None

    def answer(**sampling: Any) -> Any:
        return _finished(llm.generate_async("The quick", SamplingParams(**sampling), disaggregated_params=handed))

    sampling_probes.check(name, FIELDS[name].torch, answer)


def test_kv_events_and_capacity_agree_with_the_statistics(llm: LLM) -> None:
    llm.get_kv_cache_events(timeout=0.1)
    prompt = [(3 * at) % 900 + 50 for at in range(100)]
    first, second = (_finished(llm.generate_async(prompt, GREEDY)) for _ in range(2))
    events = llm.get_kv_cache_events(timeout=5)
    stored = [block for event in events if event["data"]["type"] == "stored" for block in event["data"]["blocks"]]
    assert [[t["token_id"] for t in block["tokens"]] for block in stored][:3] == [
        prompt[0:32],
        prompt[32:64],
        prompt[64:96],
    ]
    assert first.outputs[0].token_ids == second.outputs[0].token_ids
    assert second.outputs[0].request_perf_metrics.kv_cache_metrics.num_reused_blocks == 3
    assert llm.get_kv_cache_capacity() == {"maxNumBlocks": 256, "tokensPerBlock": 32, "maxNumTokens": 8192}
    assert llm.get_stats(timeout=1)[-1]["kvCacheStats"]["maxNumBlocks"] == 256


async def test_rows_end_by_timeout(llm: LLM) -> None:
    await llm.generate_async([5, 6], GREEDY).aresult()
    rows = [row async for row in llm.get_stats_async(timeout=0.05)]
    assert rows
    assert [row async for row in llm.get_stats_async(timeout=0)] == []


def test_a_terminals_signals_do_not_end_the_engine(llm: LLM) -> None:
    for number in (signal.SIGINT, signal.SIGTERM):
        os.kill(llm.engine_pid, number)
    assert _finished(llm.generate_async([5, 6], GREEDY)).finished
    assert llm._check_health()


def test_a_prompt_that_left_the_pool_comes_back_from_host_memory(cramped: LLM) -> None:
    returning = [(11 * at) % 900 + 50 for at in range(180)]
    before = cramped.generate(returning, GREEDY)
    for other in range(4):
        cramped.generate([(17 * at + other) % 900 + 50 for at in range(180)], GREEDY)
    cramped.get_stats(timeout=2)
    again = cramped.generate(returning, GREEDY)
    assert again.outputs[0].token_ids == before.outputs[0].token_ids
    assert again.outputs[0].request_perf_metrics.kv_cache_metrics.num_reused_blocks == 11
    rows = [row["hostKvCacheStats"] for row in cramped.get_stats(timeout=2)]
    assert rows[-1]["loadedBytes"] > 0 and rows[-1]["reusedBlocks"] > 0


def test_shutdown_ends_the_process_and_what_is_open(cramped: LLM) -> None:
    """Last of this engine."""
    output = cramped.generate_async([5, 6], SamplingParams(max_tokens=240, ignore_eos=True))
    cramped.shutdown()
    assert gone(cramped.engine_pid)
    with pytest.raises(RuntimeError, match="shutting down"):
        output.result(timeout=10)
    with pytest.raises(RuntimeError, match="shutting down"):
        cramped.generate([5, 6], GREEDY)
    cramped.shutdown()


def test_no_engine_outlives_its_parents_kill_9() -> None:
    program = (
        "from trtx.torch_engine.llmapi import LLM, SamplingParams\n"
        f"llm = LLM({MODEL!r}, max_batch_size=4, max_seq_len=512, kv_cache_config={{'max_tokens': 4096}})\n"
        "llm.generate_async([5, 6], SamplingParams(max_tokens=500, ignore_eos=True))\n"
        "print(llm.engine_pid, flush=True)\n"
        "import time; time.sleep(600)\n"
    )
    root = str(Path(__file__).resolve().parents[2])
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True, cwd=root) as parent:
        assert parent.stdout is not None
        engine_pid = int(parent.stdout.readline())
        assert psutil.pid_exists(engine_pid)
        parent.kill()
    assert gone(engine_pid)


def test_what_cannot_be_loaded_is_a_usage_error_and_leaves_no_process(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    children = {child.pid for child in psutil.Process().children()}
    with pytest.raises(UsageError):
        LLM(tmp_path, skip_tokenizer_init=True, **SMALL)
    with pytest.raises(UsageError, match="moe_tensor_parallel_size is 1, and this .* has no experts; leave it out"):
        LLM(MODEL, moe_tensor_parallel_size=1, **SMALL)
    assert {child.pid for child in psutil.Process().children()} <= children


@pytest.mark.parametrize(
    ("inputs", "fields"),
    [(["5", "6"], {}), ([5, 6.5], {}), ([5, 6], {"cache_salt": 3}), ([5, 6], {"priority": "high"})],
)
def test_a_value_of_the_wrong_type_is_refused_before_the_engine_sees_it(
    llm: LLM, inputs: list[Any], fields: dict[str, Any]
) -> None:
    with pytest.raises(RequestError, match="wrong type"):
        llm.generate_async(inputs, GREEDY, **fields)
    assert _finished(llm.generate_async([5, 6], GREEDY)).finished


def test_a_worker_finds_all_that_it_asks_of_an_engine(llm: LLM) -> None:
    engine = embedded.TorchEngine(llm)
    check_engine(embedded.load_api("torch"), engine, hands_off=False)
    assert engine.engine_pid is not None and psutil.pid_exists(engine.engine_pid)
    assert (engine.facts.num_blocks, engine.facts.context_length) == (llm.get_kv_cache_capacity()["maxNumBlocks"], 512)
    assert engine.handoff_stats() == llm.handoff_stats()


def test_a_text_model_refuses_media(llm: LLM) -> None:
    pictures = {"image": [torch.zeros(4, 64)]}
    with pytest.raises(RequestError, match="inputs have multi_modal_embeddings, and the model is a text model"):
        llm.generate_async({"prompt_token_ids": [5, 6, 7], "multi_modal_embeddings": pictures}, GREEDY)
    with pytest.raises(RequestError, match="the model is a text model"):
        llm.generate_async([5, 6, 7], GREEDY, media=[MediaSpan(1, 1, bytes(32))])
    without = {"prompt_token_ids": [5, 6], "multi_modal_data": None, "multi_modal_embeddings": {}}
    assert len(_finished(llm.generate_async(without, GREEDY)).outputs[0].token_ids) == GREEDY.max_tokens


def test_open_requests_end_with_an_error_when_the_engine_dies(llm: LLM) -> None:
    """Last of this engine."""
    open_request = llm.generate_async([5, 6], SamplingParams(max_tokens=500, ignore_eos=True), streaming=True)
    asyncio.run(_first_step(open_request))
    os.kill(llm.engine_pid, signal.SIGKILL)
    with pytest.raises(RuntimeError, match=rf"engine process died: pid {llm.engine_pid}, exit code -9"):
        open_request.result(timeout=30)
    assert not llm._check_health()
    with pytest.raises(RuntimeError, match="died"):
        llm.generate([5, 6], GREEDY)


async def _first_step(output: Any) -> None:
    await anext(output)


def test_more_host_memory_than_there_is_ends_the_start_with_a_sentence() -> None:
    with pytest.raises(UsageError, match=r"host_cache_size is .* has .* of memory; lower it|host_cache_size.*limit"):
        LLM(MODEL, **SMALL | {"kv_cache_config": {"host_cache_size": 1 << 50}})
