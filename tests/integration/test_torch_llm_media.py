"""Embeddings of images through the LLM API: real processes, a random LLaVA, prompts as TensorRT-LLM takes them."""

from __future__ import annotations

import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from trtx.checkpoint import resolve_checkpoint
from trtx.checkpoint.vision import VisionConfig, read_vision_config
from trtx.engine import embedded
from trtx.ipc.shared_tensor import SharedTensor, share
from trtx.torch_engine.channel import Channel
from trtx.torch_engine.llm_args import KvCacheConfig, LlmArgs
from trtx.torch_engine.llmapi import LLM, DisaggregatedParams, MediaNeeded, MediaSpan, RequestError, SamplingParams
from trtx.torch_engine.messages import EmbeddingTaken, FromEngine, PutEmbedding, Ready, Start

pytestmark = pytest.mark.proof  # three engines; make test has test_images.py
MODEL = "synthetic:tiny-vl"
ARGS: dict[str, Any] = {
    "max_batch_size": 8,
    "max_seq_len": 512,
    "max_num_tokens": 48,
    "enable_chunked_prefill": True,
    "kv_cache_config": {"max_tokens": 4096, "tokens_per_block": 8, "event_buffer_max_size": 1000},
    "cache_transceiver_config": {"backend": "NIXL", "kv_transfer_timeout_ms": 20_000},
}
GREEDY = SamplingParams(max_tokens=10, ignore_eos=True)
TEXT = [11, 12, 13]


@pytest.fixture(scope="module")
def engines() -> Iterator[tuple[LLM, LLM]]:
    with pytest.MonkeyPatch.context() as patch, ThreadPoolExecutor() as pool:
        patch.setenv("UCX_NET_DEVICES", "lo")
        loading = [pool.submit(LLM, MODEL, **ARGS) for _ in range(2)]
        found = loading[0].result(), loading[1].result()
    yield found
    for engine in found:
        engine.shutdown()


@pytest.fixture(scope="module")
def llm(engines: tuple[LLM, LLM]) -> LLM:
    return engines[0]


@pytest.fixture(scope="module")
def vision() -> VisionConfig:
    found = read_vision_config(resolve_checkpoint(MODEL).path)
    assert found is not None
    return found


def picture(vision: VisionConfig, seed: int, rows: int | None = None) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows or vision.tokens_per_image or 1, vision.hidden_size, generator=generator)


def prompt(vision: VisionConfig, *seeds: int, **more: Any) -> dict[str, Any]:
    """A placeholder each, text around them."""
    ids = [token for _ in seeds for token in (*TEXT, vision.image_token_id)] + TEXT
    images = [picture(vision, seed) for seed in seeds]
    return {"prompt_token_ids": ids, "multi_modal_embeddings": {"image": images}} | more


def ask(llm: LLM, inputs: Any, params: SamplingParams = GREEDY, **more: Any) -> list[int]:
    return llm.generate_async(inputs, params, **more).result(timeout=60).outputs[0].token_ids


def test_placeholders_are_expanded_and_the_answer_depends_on_the_images_and_their_order(
    llm: LLM, vision: VisionConfig
) -> None:
    rows = vision.tokens_per_image or 0
    result = llm.generate_async(prompt(vision, 1, 2), GREEDY).result(timeout=60)
    image = [vision.image_token_id] * rows
    assert result.prompt_token_ids == [*TEXT, *image, *TEXT, *image, *TEXT]
    answers = [ask(llm, prompt(vision, *seeds)) for seeds in ((1, 2), (2, 1), (1, 3), (1, 1))]
    assert answers[0] == result.outputs[0].token_ids
    assert len({tuple(answer) for answer in answers}) == 4
    expanded = prompt(vision, 1, 2) | {"prompt_token_ids": result.prompt_token_ids}
    assert ask(llm, expanded, cache_salt="again") == answers[0]
    assert ask(llm, result.prompt_token_ids) not in answers, "the same ids as text"


def test_spans_and_embeddings_that_were_put_are_the_same_request(
    llm: LLM, vision: VisionConfig, tmp_path: Path
) -> None:
    rows, keys = vision.tokens_per_image or 0, [bytes([seed]) * 32 for seed in (1, 2)]
    wanted = ask(llm, prompt(vision, 1, 2))
    shared = [share(picture(vision, seed), tmp_path) for seed in (1, 2)]
    for key, one in zip(keys, shared, strict=True):
        llm.put_embedding(key, one).result(timeout=60)
        Path(one.path).unlink()
    image = [vision.image_token_id] * rows
    ids = [*TEXT, *image, *TEXT, *image, *TEXT]
    spans = [MediaSpan(3, rows, keys[0]), MediaSpan(6 + rows, rows, keys[1])]
    llm.get_kv_cache_events(0)
    routing = [1_000_000 + at for at in range(len(ids))]
    assert ask(llm, ids, media=spans, cache_salt="told", routing_token_ids=routing) == wanted
    events = [event["data"] for event in llm.get_kv_cache_events(5) if event["data"]["type"] == "stored"]
    told = [token["token_id"] for data in events for block in data["blocks"] for token in block["tokens"]]
    assert told[: len(ids)] == routing[: len(told)] and len(told) >= len(ids) // 8 * 8
    llm.drop_embeddings(keys)
    with pytest.raises(MediaNeeded, match="neither embedding nor KV for 2 of the prompt's 2 media items") as error:
        ask(llm, ids, media=spans, cache_salt="not in the cache")
    assert error.value.keys == tuple(keys)
    assert embedded.load_api("torch").missing_media(error.value) == tuple(keys)  # type: ignore[misc]


def test_what_a_prompt_brought_is_dropped_with_its_last_choice(llm: LLM, vision: VisionConfig) -> None:
    several = replace(GREEDY, n=2, best_of=None, temperature=1.0, seed=3)
    asked = [llm.generate_async(prompt(vision, seed), several) for seed in (5, 5, 6)]
    results = [one.result(timeout=60) for one in asked]
    assert all(len(output.token_ids) == 10 for result in results for output in result.outputs)
    assert not llm._embeddings._uses
    aborted = llm.generate_async(prompt(vision, 7), replace(GREEDY, max_tokens=400))
    aborted.abort()
    aborted.result(timeout=60)
    assert not llm._embeddings._uses


def test_decode_needs_ids_and_what_prefill_answers(engines: tuple[LLM, LLM], vision: VisionConfig) -> None:
    prefill, decode = engines
    wanted = ask(prefill, prompt(vision, 8, 9))
    context = DisaggregatedParams(request_type="context_only", disagg_request_id=1 << 41)
    done = prefill.generate_async(prompt(vision, 8, 9), GREEDY, disaggregated_params=context).result(timeout=60)
    handed = done.outputs[0].disaggregated_params
    assert handed is not None and [span.start for span in handed.media or []] == [3, 6 + (vision.tokens_per_image or 0)]
    params = replace(handed, request_type="generation_only")
    inputs = {"prompt_token_ids": done.prompt_token_ids, "multi_modal_data": None}
    assert ask(decode, inputs, disaggregated_params=params) == wanted
    assert decode.handoff_stats().recomputed == 0
    gone = replace(params, opaque_state=None)
    assert ask(decode, inputs, disaggregated_params=gone) == wanted, "its own cache has it by now"
    with pytest.raises(MediaNeeded):
        ask(decode, inputs, disaggregated_params=gone, cache_salt="not in the cache")
    other = [MediaSpan(span.start, span.length, bytes(32)) for span in params.media or []]
    with pytest.raises(RequestError, match="differ from the media that prefill got"):
        ask(decode, inputs, disaggregated_params=params, media=other)


def test_an_embedding_that_the_model_cannot_use_ends_its_own_request(
    llm: LLM, vision: VisionConfig, tmp_path: Path
) -> None:
    shared = share(picture(vision, 1), tmp_path)
    rows, hidden = vision.tokens_per_image or 0, vision.hidden_size
    nan = picture(vision, 1)
    nan[0, 0] = float("inf")
    for bad, says in (
        (torch.zeros(rows, hidden + 1), rf"expected float32 of shape \[rows, {hidden}\]"),
        (picture(vision, 1).half(), "it is float16"),
        (nan, "NaN or infinite"),
    ):
        inputs = prompt(vision, 1) | {"multi_modal_embeddings": {"image": [bad]}}
        with pytest.raises(RequestError, match=says):
            ask(llm, inputs)
    with pytest.raises(ValueError, match="is gone"):
        llm.put_embedding(bytes(32), SharedTensor("/nowhere/x.tensor", "float32", (rows, hidden))).result(timeout=60)
    wrong: Any = SharedTensor("/nowhere/x.tensor", "float32", (2**70, 1))
    for key, tensor in (("no bytes", shared), (bytes(32), "no tensor"), (bytes(32), wrong)):
        with pytest.raises(RequestError):
            llm.put_embedding(key, tensor)  # type: ignore[arg-type]
    with pytest.raises(RequestError):
        llm.drop_embeddings(5)  # type: ignore[arg-type]
    llm.put_embedding(bytes(32), shared).result(timeout=60)  # the answers are still those of their questions
    llm.drop_embeddings([bytes(32)])
    assert len(ask(llm, prompt(vision, 1))) == 10


def test_what_is_not_honoured_is_refused_in_a_sentence(llm: LLM, vision: VisionConfig) -> None:
    image = picture(vision, 1)
    ids = [vision.image_token_id]
    for more, says in (
        ({"multi_modal_data": {"image": [image]}}, "send images to trtx serve, or pass their embeddings"),
        (
            {"multi_modal_embeddings": {"image": [image]}, "mm_processor_kwargs": {"size": 3}},
            "which has no effect on images that are given as",
        ),
        ({"multi_modal_embeddings": {"video": [image]}}, r"is \['video'\]; expected a dict with 'image'"),
        ({"multi_modal_embeddings": [image]}, "expected a dict with 'image'"),
        ({"multi_modal_embeddings": {"image": image}}, "expected a list of tensors"),
        ({"multi_modal_embeddings": {"image": [image[0]]}}, r"a tensor of shape \[128\]"),
        ({"multi_modal_embeddings": {"image": [image, None]}}, "None; expected a list of tensors"),
        ({"multi_modal_embeddings": {"image": []}}, "expected a list of tensors"),
        ({"multi_modal_embeddings": {"image": [image, image]}}, "1 placeholders of an image .* and 2 images of"),
        (
            {"multi_modal_embeddings": {"image": [image]}, "multi_modal_uuids": {"image": ["a", "b"]}},
            "a text or None",
        ),
        ({"multi_modal_embeddings": {"image": [image], "image_grid_thw": [[1, 2, 2]]}}, "1 x 2 x 2 for an embedding"),
        ({"query": "what"}, "inputs have query, not supported"),
    ):
        with pytest.raises(RequestError, match=says):
            llm.generate_async({"prompt_token_ids": ids} | more, GREEDY)
    with pytest.raises(RequestError, match="truncate_prompt_tokens is set for a prompt with media"):
        llm.generate_async(prompt(vision, 1), replace(GREEDY, truncate_prompt_tokens=4))
    cut = [vision.image_token_id, *TEXT, *ids * (image.shape[0] - 1)]
    with pytest.raises(RequestError, match="do not follow each other"):
        llm.generate_async({"prompt_token_ids": cut, "multi_modal_embeddings": {"image": [image]}}, GREEDY)


def test_uuids_keep_equal_images_apart_in_the_cache(llm: LLM, vision: VisionConfig) -> None:
    found = []
    for name in ("a", "b", "a"):
        inputs = prompt(vision, 20, multi_modal_uuids={"image": [name]})
        result = llm.generate_async(inputs, replace(GREEDY, return_perf_metrics=True)).result(timeout=60)
        metrics = result.outputs[0].request_perf_metrics
        found.append(metrics.kv_cache_metrics.num_reused_blocks if metrics is not None else 0)
    assert found[0] == found[1] == 0 and found[2] > 2


def test_grids_are_those_of_the_patches_and_decide_the_positions() -> None:
    """Qwen2.5-VL: the same rows as a tall and as a wide picture."""
    sees = read_vision_config(resolve_checkpoint("synthetic:tiny-qwen2.5-vl").path)
    assert sees is not None and sees.tokens_per_image is None
    rows = picture(sees, 1, 6)
    params = SamplingParams(max_tokens=2, ignore_eos=True, prompt_logprobs=1)

    def inputs(**more: Any) -> dict[str, Any]:
        ids = [*TEXT, sees.image_token_id, *TEXT]
        return {"prompt_token_ids": ids, "multi_modal_embeddings": {"image": [rows]} | more}

    def said(llm: LLM, grid: list[int]) -> list[float]:
        found = llm.generate_async(inputs(image_grid_thw=torch.tensor([grid])), params).result(timeout=60).outputs[0]
        return [value.logprob for entry in found.prompt_logprobs for value in entry.values()]

    args: dict[str, Any] = {"max_batch_size": 2, "max_seq_len": 64, "kv_cache_config": {"max_tokens": 256}}
    with LLM("synthetic:tiny-qwen2.5-vl", **args) as llm:
        tall, wide = said(llm, [1, 6, 4]), said(llm, [1, 4, 6])
        assert tall == said(llm, [1, 6, 4]) != wide
        assert tall[:3] == wide[:3], "the text before it"
        for grids, says in (
            ({}, "lacks image_grid_thw"),
            ({"image_grid_thw": [[1, 6, 4]] * 2}, "image_grid_thw has 2 entries for 1 images"),
            ({"image_grid_thw": [[1, 3, 8]]}, "1 x 3 x 8 for an embedding of 6 rows"),
            ({"image_grid_thw": [[1, 6, 6]]}, "where 2 x 2 patches make one row"),
            ({"image_grid_thw": "tall"}, "wrong type"),
        ):
            with pytest.raises(RequestError, match=says):
                llm.generate_async(inputs(**grids), params)


def test_an_engine_that_nobody_reads_takes_everything_that_is_sent() -> None:
    """The parent may be writing to it with a lock held that its reader waits for: both would wait for ever."""
    ours, theirs = socket.socketpair()
    command = [sys.executable, "-m", "trtx.torch_engine.core.process", str(theirs.fileno())]
    process = subprocess.Popen(command, pass_fds=(theirs.fileno(),))
    theirs.close()
    channel: Channel[FromEngine] = Channel(ours, FromEngine)
    try:
        model = str(resolve_checkpoint(MODEL).path)
        cache = KvCacheConfig(max_tokens=256)
        channel.send(Start(LlmArgs(model=model, max_batch_size=2, max_seq_len=64, kv_cache_config=cache)))
        while not isinstance(channel.receive(), Ready):
            pass
        misshapen = SharedTensor("/nowhere", "float32", (1,))
        count = 8000

        def send() -> None:
            for number in range(count):
                channel.send(PutEmbedding(number.to_bytes(32, "little"), misshapen))

        sender = threading.Thread(target=send, daemon=True)
        sender.start()
        sender.join(60)
        assert not sender.is_alive(), "it waits for its reports to be read before it reads on"
        for number in range(count):
            answer = channel.receive()
            assert isinstance(answer, EmbeddingTaken) and answer.key == number.to_bytes(32, "little") and answer.error
    finally:
        channel.close()
        process.wait(30)
