"""Dynamo's own TensorRT-LLM worker (``python -m dynamo.trtllm``, as installed) on the stand-in.

Its handlers are the LLM API's first consumer: what they read of it, and what the frontend makes of that, has to come
out as with trtx's worker. One frontend has trtx's, aggregated, and upstream's prefill and decode; for the proofs,
upstream's aggregated one too, with attention DP and KV events.
"""

from __future__ import annotations

import json
import re
import urllib.request
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml
from processes import Child, Topology, free_port, topology, until
from topology_clients import post

pytestmark = [pytest.mark.proof, pytest.mark.trtllm]

OURS, AGGREGATED, DISAGGREGATED = "ours", "theirs-agg", "theirs-disagg"  # model names, and Dynamo namespaces
PROMPTS = ("12 + 13 = ", "1 2 3 4 5", "The quick brown", "Copy: alpha beta ->")
TOKENS = 24
SMALL = {"kv_cache_config": {"max_tokens": 8192}}
WITH_TRANSCEIVER = {**SMALL, "cache_transceiver_config": {"backend": "NIXL"}}


def start_theirs(workers: Topology, name: str, model: str, *flags: str, gpus: str, engine: Mapping[str, Any]) -> Child:
    """``gpus`` are only counted: the stand-in computes on the CPU."""
    config = workers.directory / f"{name}.yaml"
    config.write_text(yaml.safe_dump(engine), encoding="utf-8")
    argv = ["-m", "dynamo.trtllm", "--model", str(workers.model), "--served-model-name", model, "--namespace", model]
    argv += ["--gpus-per-node", str(len(gpus.split(","))), "--max-seq-len", "512", "--max-batch-size", "8"]
    port = free_port()
    environment = {"DYN_SYSTEM_PORT": str(port), "CUDA_VISIBLE_DEVICES": gpus}
    child = workers.spawn(name, [*argv, "--extra-engine-args", str(config), *flags], environment)
    child.system_port = port
    return child


@pytest.fixture(scope="module")
def served(
    only_standin: None,
    tmp_path_factory: pytest.TempPathFactory,
    trtllm_environment: Mapping[str, str],
    model_directory: str,
) -> Iterator[Topology]:
    with topology(tmp_path_factory.mktemp("dynamo-worker"), Path(model_directory)) as running:
        running.extra_environment |= {"PYTHONPATH": trtllm_environment["PYTHONPATH"]}
        running.start_frontend("--router-mode", "kv")
        disaggregated = ("--disaggregation-mode",)
        prefill = start_theirs(
            running, "prefill", DISAGGREGATED, *disaggregated, "prefill", gpus="0", engine=WITH_TRANSCEIVER
        )
        start_theirs(running, "decode", DISAGGREGATED, *disaggregated, "decode", gpus="0", engine=WITH_TRANSCEIVER)
        running.model_name = OURS
        running.extra_environment |= {"DYN_NAMESPACE": OURS}
        running.start_worker(OURS, engine="tensorrt-llm", max_seq_len=512, max_batch_size=8, **SMALL)
        running.wait_ready(aggregated=1)
        running.model_name = DISAGGREGATED
        running.wait_ready(prefill=1, decode=1)
        yield running
        # At SIGTERM it waits 30 s for a row of statistics without requests, and an idle engine gives no row at all
        # (dynamo/trtllm/main.py, _make_drain_callback, 1.4.2). Its engine ends with it.
        prefill.process.kill()


@pytest.fixture(scope="module")
def aggregated(served: Topology) -> str:
    parallel = ("--tensor-parallel-size", "2", "--enable-attention-dp")
    published = ("--publish-kv-events", "--publish-metrics")
    start_theirs(served, AGGREGATED, AGGREGATED, *published, *parallel, gpus="0,1", engine=SMALL)
    served.model_name = AGGREGATED
    served.wait_ready(aggregated=1)
    return AGGREGATED


# A proof: the pair has the same handlers. What it has not is asked beside it: several choices in test_example_calls.py,
# KV events in test_llm_api.py, the router's view of attention DP ranks in test_serve.py.
@pytest.fixture(scope="module", params=[AGGREGATED, DISAGGREGATED])
def model(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return str(request.getfixturevalue("aggregated")) if name == AGGREGATED else name


def complete(served: Topology, model: str, prompt: str, **more: Any) -> dict[str, Any]:
    """The one choice of a completion, and its usage."""
    body = {"model": model, "prompt": prompt, "max_tokens": TOKENS, "temperature": 0, "ignore_eos": True} | more
    code, answer = post(served.url, "/v1/completions", body)
    assert code == 200, answer
    (choice,) = answer["choices"]
    return {**choice, "usage": answer["usage"]}


def streamed_text(served: Topology, model: str, prompt: str) -> str:
    body = {"model": model, "prompt": prompt, "max_tokens": TOKENS, "temperature": 0, "ignore_eos": True}
    request = urllib.request.Request(
        f"{served.url}/v1/completions",
        json.dumps(body | {"stream": True}).encode(),
        {"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=30) as response:
        events = [json.loads(line[6:]) for line in response if line.startswith(b"data: ") and b"[DONE]" not in line]
    return "".join(choice["text"] for event in events for choice in event["choices"])


def chat(served: Topology, model: str, **more: Any) -> list[dict[str, Any]]:
    body = {"model": model, "messages": [{"role": "user", "content": "What is 2 + 3?"}], "temperature": 0} | more
    code, answer = post(served.url, "/v1/chat/completions", body)
    assert code == 200, answer
    choices: list[dict[str, Any]] = answer["choices"]
    return choices


def metrics(port: int) -> str:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as response:
        text: str = response.read().decode()
        return text


def child(served: Topology, name: str) -> Child:
    return next(child for child in served.children if child.name == name)


@pytest.mark.parametrize("prompt", PROMPTS)
def test_tokens_and_logprobs_are_those_of_our_worker(served: Topology, model: str, prompt: str) -> None:
    ours, theirs = (complete(served, name, prompt, logprobs=2) for name in (OURS, model))
    assert theirs["logprobs"]["tokens"] == ours["logprobs"]["tokens"]
    assert theirs["logprobs"]["token_logprobs"] == ours["logprobs"]["token_logprobs"]
    assert len(ours["logprobs"]["tokens"]) == TOKENS
    assert (theirs["text"], theirs["finish_reason"]) == (ours["text"], "length")
    assert theirs["usage"]["completion_tokens"] == TOKENS


def test_a_stream_joins_to_the_same_text(served: Topology, model: str) -> None:
    assert streamed_text(served, model, PROMPTS[0]) == streamed_text(served, OURS, PROMPTS[0])


def test_chat_ends_where_the_model_ends(served: Topology, model: str) -> None:
    (ours,), (theirs,) = chat(served, OURS), chat(served, model)
    assert (theirs["message"]["content"], theirs["finish_reason"]) == (ours["message"]["content"], "stop")


def test_a_prompt_of_the_disaggregated_pair_goes_through_prefill(served: Topology) -> None:
    before = _requests(served, "prefill")
    complete(served, DISAGGREGATED, PROMPTS[2], max_tokens=4)
    assert _requests(served, "prefill") == before + 1


def _requests(served: Topology, name: str) -> float:
    found = re.findall(
        r'^dynamo_component_requests_total\{.*dynamo_endpoint="generate".*\} ([0-9.]+)$',
        metrics(child(served, name).system_port),
        re.MULTILINE,
    )
    return sum(map(float, found))


def test_two_choices_come_whole(served: Topology, aggregated: str) -> None:
    choices = chat(served, aggregated, n=2, temperature=0.8, max_tokens=8)
    assert sorted(choice["index"] for choice in choices) == [0, 1]
    assert all(choice["message"]["content"] and choice["finish_reason"] for choice in choices)


def test_kv_events_reach_the_router_and_each_attention_dp_rank_has_its_metrics(
    served: Topology, aggregated: str
) -> None:
    # The frontend counts the events of all its models together, under the labels of the first.
    stored = r'^dynamo_component_kv_cache_events_applied\{.*event_type="stored",status="ok".*\} ([0-9.]+)$'

    def applied() -> float:
        return sum(map(float, re.findall(stored, metrics(served.port), re.MULTILINE)))

    before = applied()
    prompt = "The quick brown fox jumps over the lazy dog and then goes on to say what it has seen. " * 2
    complete(served, aggregated, prompt, max_tokens=4)
    until("stored blocks in the router", lambda: applied() > before, seconds=10)
    of_ranks = r'^dynamo_component_total_blocks\{.*dp_rank="(\d)".*\} [1-9]'
    port = child(served, aggregated).system_port
    until(
        "both ranks' blocks",
        lambda: sorted(re.findall(of_ranks, metrics(port), re.MULTILINE)) == ["0", "1"],
        seconds=10,
    )
