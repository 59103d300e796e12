"""The calls of TensorRT-LLM's own examples: quickstart_advanced, async, streaming, logprobs, sampling, KV events.

Written after ``examples/llm-api`` of its public source: the arguments are theirs, name by name, the values fit a small
model. One LLM for all.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest

pytestmark = pytest.mark.trtllm

PROMPTS = ["Hello, my name is", "The capital of France is", "12 + 13 = "]
COMMON_PREFIX = "The quick brown fox jumps over the lazy dog and then goes on to say what it has seen. " * 2
TOKENS_PER_BLOCK = 32


@pytest.fixture(scope="module")
def llm(api: Any, model_directory: str, is_standin: bool) -> Iterator[Any]:
    """As quickstart_advanced makes it without a flag, with the KV events of the example of that name."""
    configs = api.llmapi
    with pytest.MonkeyPatch.context() as patch:
        if is_standin:
            patch.setenv("OMP_NUM_THREADS", "1")
        made = api.LLM(
            model=model_directory,
            backend="pytorch",
            disable_overlap_scheduler=False,
            kv_cache_config=configs.KvCacheConfig(
                enable_block_reuse=True,
                free_gpu_memory_fraction=0.2,
                dtype="auto",
                max_tokens=4096,
                tokens_per_block=TOKENS_PER_BLOCK,
                event_buffer_max_size=1024,
            ),
            attn_backend="TRTLLM",
            cuda_graph_config=None,
            load_format="auto",
            print_iter_log=False,
            enable_iter_perf_stats=False,
            torch_compile_config=None,
            moe_config=configs.MoeConfig(backend="CUTLASS", use_low_precision_moe_combine=False),
            sampler_type="auto",
            max_seq_len=None,
            max_batch_size=8,
            max_num_tokens=8192,
            enable_attention_dp=False,
            attention_dp_config=configs.AttentionDpConfig(enable_balance=False, timeout_iters=0, batching_wait_iters=0),
            tensor_parallel_size=1,
            pipeline_parallel_size=1,
            moe_expert_parallel_size=-1,
            moe_tensor_parallel_size=-1,
            moe_cluster_parallel_size=-1,
            enable_chunked_prefill=False,
            speculative_config=None,
            trust_remote_code=False,
            gather_generation_logits=False,
            max_beam_width=1,
        )
    yield made
    made.shutdown()


def quickstart(api: Any, **changed: Any) -> Any:
    """Its SamplingParams: every argument is given, most of them as argparse leaves them."""
    given = {
        "max_tokens": 8,
        "temperature": None,
        "top_k": None,
        "top_p": None,
        "return_context_logits": False,
        "return_generation_logits": False,
        "logprobs": False,
        "n": 1,
        "best_of": 1,
        "use_beam_search": False,
        "additional_model_outputs": None,
    }
    return api.SamplingParams(**given | changed)


def test_a_list_of_prompts_gives_a_list_of_results_with_their_prompts(api: Any, llm: Any) -> None:
    outputs = llm.generate(PROMPTS, quickstart(api))
    assert [output.prompt for output in outputs] == PROMPTS
    assert all(len(output.outputs) == 1 and output.outputs[0].text for output in outputs)
    assert all(not output.outputs[0].logprobs for output in outputs)
    assert all(output.context_logits is None and output.outputs[0].generation_logits is None for output in outputs)


def test_a_chat_template_is_the_tokenizers(api: Any, llm: Any) -> None:
    messages = [{"role": "user", "content": "What is 2 + 3?"}]
    prompt = llm.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    output = llm.generate(prompt, quickstart(api))
    assert output.prompt == prompt
    assert "5" in output.outputs[0].text


@pytest.mark.parametrize("logprobs", [True, 1])
def test_logprobs_as_a_flag_and_as_a_number(api: Any, llm: Any, logprobs: Any) -> None:
    output = llm.generate(PROMPTS[2], quickstart(api, temperature=0.7, top_p=0.95, logprobs=logprobs)).outputs[0]
    assert len(output.logprobs) == len(output.token_ids)
    for token_id, position in zip(output.token_ids, output.logprobs, strict=True):
        assert position[token_id].logprob <= 0
        assert position[token_id].rank >= 1
        assert llm.tokenizer.decode([token_id]) is not None


@pytest.mark.parametrize(
    "sampling",
    [
        {"temperature": 0.0},
        {"temperature": 1.5},
        {"temperature": 0.8, "top_k": 1},
        {"temperature": 0.8, "top_k": 40, "top_p": 0.9},
        {"temperature": 0.001, "top_p": 0.001},
    ],
)
def test_ways_to_sample(api: Any, llm: Any, sampling: dict[str, Any]) -> None:
    greedy = llm.generate(PROMPTS[2], api.SamplingParams(max_tokens=8, temperature=0.0)).outputs[0].token_ids
    sampled = llm.generate(PROMPTS[2], api.SamplingParams(max_tokens=8, **sampling)).outputs[0].token_ids
    assert sampled
    if sampling["temperature"] < 0.01 or sampling.get("top_k") == 1:
        assert sampled == greedy


def test_several_answers_to_one_prompt(api: Any, llm: Any) -> None:
    params = api.SamplingParams(max_tokens=8, temperature=0.8, top_k=50, top_p=0.95, n=3)
    output = llm.generate(PROMPTS[0], params)
    assert [choice.index for choice in output.outputs] == [0, 1, 2]
    assert all(choice.text for choice in output.outputs)


async def test_requests_awaited_side_by_side(api: Any, llm: Any) -> None:
    params = api.SamplingParams(temperature=0.8, top_p=0.95)  # one object for all of them

    async def ask(prompt: str) -> tuple[str, str]:
        output = await llm.generate_async(prompt, params)
        return output.prompt, output.outputs[0].text

    answers = dict(await asyncio.gather(*(ask(prompt) for prompt in PROMPTS)))
    assert set(answers) == set(PROMPTS)
    assert all(answers.values())


async def test_streams_side_by_side_grow(api: Any, llm: Any) -> None:
    params = api.SamplingParams(temperature=0.8, top_p=0.95, ignore_eos=True)

    async def stream(prompt: str) -> list[str]:
        steps = llm.generate_async(prompt, params, streaming=True)
        return [output.outputs[0].text async for output in steps]

    for texts in await asyncio.gather(*(stream(prompt) for prompt in PROMPTS)):
        assert len(texts[-1]) > 0
        assert texts[-1].startswith(texts[0])


def test_a_stream_may_be_read_without_an_event_loop(api: Any, llm: Any) -> None:
    params = api.SamplingParams(max_tokens=8, ignore_eos=True)
    seen = [list(output.outputs[0].token_ids) for output in llm.generate_async(PROMPTS[2], params, streaming=True)]
    assert seen[-1] == llm.generate(PROMPTS[2], params).outputs[0].token_ids
    assert all(seen[-1][: len(step)] == step for step in seen)


def test_kv_events_of_prompts_with_a_common_prefix(api: Any, llm: Any) -> None:
    params = api.SamplingParams(temperature=0.001, top_p=0.001, max_tokens=5)
    for output in llm.generate([COMMON_PREFIX, COMMON_PREFIX + "It ends."], sampling_params=params):
        assert output.finished
    blocks = [
        block
        for event in llm.get_kv_cache_events(10)
        if event["data"]["type"] == "stored"
        for block in event["data"]["blocks"]
    ]
    prefix = llm.tokenizer.encode(COMMON_PREFIX)[:TOKENS_PER_BLOCK]
    stored = [[token["token_id"] for token in block["tokens"]] for block in blocks]
    assert stored.count(prefix) == 1, "the second prompt found it"
