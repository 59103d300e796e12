"""Workers on the torch engine: real tokens, real KV, and what happens when an engine dies."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import shutil
import signal
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from processes import HTTP, Child, Topology, freeze, topology, until
from safetensors.torch import load_file, save_file
from served_records import check_served
from test_worker import CHAT, events, metric, post

from trtx.checkpoint import resolve_checkpoint
from trtx.text import load_tokenizer

BLOCK = 16
TORCH: dict[str, Any] = {
    "max_seq_len": 512,
    "max_batch_size": 16,
    "kv_cache_config": {"tokens_per_block": BLOCK, "max_tokens": 8192},
}
PROMPT = "the quick brown fox jumps over the lazy dog " * 4
STREAMED = 120  # tokens of a stream that outlives an engine: a second at least


@pytest.fixture(scope="module")
def model() -> Path:
    return resolve_checkpoint("synthetic:tiny").path


@pytest.fixture(scope="module")
def agg(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Topology]:
    """Two workers behind the KV-aware router."""
    with topology(tmp_path_factory.mktemp("torch-agg"), model) as running:
        running.start_frontend("--router-mode", "kv", "--kv-cache-block-size", str(BLOCK), "--migration-limit", "3")
        running.extra_environment["DYN_FORWARDPASS_METRIC_PORT"] = "1"
        for name in ("agg-0", "agg-1"):
            running.start_worker(name, engine="torch", **TORCH)
        running.wait_ready(aggregated=2)
        yield running


@pytest.fixture(scope="module")
def disagg(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Topology]:
    with topology(tmp_path_factory.mktemp("torch-disagg"), model) as running:
        running.start_frontend("--migration-limit", "3")
        for role in ("prefill", "decode"):
            running.start_worker(f"{role}-0", role=role, engine="torch", **TORCH)
        running.wait_ready(prefill=1, decode=1)
        yield running


def test_a_stop_string_across_tokens_is_held_back_and_cut_exactly(agg: Topology) -> None:
    whole = post(agg, prompt=PROMPT, max_tokens=24, temperature=0).json()["choices"][0]["text"]
    middle = len(whole) // 2
    stop = whole[middle : middle + 3]
    streamed = events(agg, prompt=PROMPT, max_tokens=24, temperature=0, stop=[stop])
    choices = [choice for event in streamed for choice in event["choices"]]
    assert "".join(choice.get("text") or "" for choice in choices) == whole[: whole.index(stop)]
    assert choices[-1]["finish_reason"] == "stop"


def test_logprobs_cover_every_token_and_greedy_takes_the_likeliest(agg: Topology) -> None:
    body = {"max_tokens": 6, "temperature": 0, "logprobs": True, "top_logprobs": 3}
    content = post(agg, "chat/completions", **CHAT, **body).json()["choices"][0]["logprobs"]["content"]
    assert len(content) == 6
    for entry in content:
        assert len(entry["top_logprobs"]) >= 3
        assert entry["logprob"] == max(top["logprob"] for top in entry["top_logprobs"])
        assert entry["logprob"] <= 0


def test_a_seed_makes_a_sampled_answer_repeat(agg: Topology) -> None:
    body = {"prompt": PROMPT, "max_tokens": 12, "temperature": 1.0}
    texts = [post(agg, **body, seed=seed).json()["choices"][0]["text"] for seed in (7, 7, -8)]
    assert texts[0] == texts[1] != texts[2]


def test_the_kv_router_sends_a_known_prefix_to_the_worker_that_has_it(agg: Topology) -> None:
    """Each of ten prefixes is in the cache of one worker. The router is asked where it would send a prefix
    (``query_instance_id``) until it knows all of them, which sends nothing to a worker. Then the prefixes of one worker
    are sent, and those of the other: a router that takes turns, or always takes one worker, misses five. One that
    guesses misses none in one run of 1,024."""
    length, each = 4 * BLOCK, 5

    def ask(prompt: list[int], **nvext: Any) -> tuple[int, int]:
        """Returns the worker that the router took, and how many tokens of the prompt it had cached."""
        answer = post(agg, prompt=prompt, max_tokens=1, nvext=nvext).json()
        worker, usage = answer["nvext"]["worker_id"]["decode_worker_id"], answer["usage"]
        return worker, usage["prompt_tokens_details"]["cached_tokens"] if usage else 0

    held: dict[int, list[list[int]]] = {}
    for token in range(300, 400):
        worker, cached = ask(prompt := [token] * (length + 1), extra_fields=["worker_id"])
        assert cached == 0, "another prompt has the same beginning"
        held.setdefault(worker, []).append(prompt)
        if len(held) == 2 and all(len(prompts) >= each for prompts in held.values()):
            break
    else:
        pytest.fail(f"of 100 unknown prompts, {[len(prompts) for prompts in held.values()]} went to each worker")
    known = [(worker, prompt) for worker, prompts in held.items() for prompt in prompts[:each]]

    def is_known() -> bool:
        """Four times: a router that does not know a prefix yet may name the right worker by chance."""
        return all(
            ask(prompt, annotations=["query_instance_id:"])[0] == worker for _ in range(4) for worker, prompt in known
        )

    until("the router knows all prefixes", is_known, seconds=20)
    hits = [ask(prompt, extra_fields=["worker_id"])[1] for _, prompt in known]
    assert hits == [length] * len(known)


def test_kv_use_and_hit_rate_are_served_as_metrics(agg: Topology) -> None:
    workers = agg.children[1:]
    assert [metric(worker, "trtx_kv_blocks") for worker in workers] == [8192 // BLOCK] * 2
    post(agg, prompt=PROMPT, max_tokens=30)
    urls = [f"http://127.0.0.1:{worker.system_port}/metrics" for worker in workers]
    until("a hit rate", lambda: any("trtx_kv_hit_rate{" in HTTP.get(url).text for url in urls), seconds=10)


def test_each_process_serves_the_metric_families_of_its_record(agg: Topology, disagg: Topology) -> None:
    for running in (agg, disagg):
        numbers = itertools.count()
        for worker in running.children[1:]:
            role, url = worker.name.partition("-")[0], f"http://127.0.0.1:{worker.system_port}/metrics"

            def has_steps(running: Topology = running, url: str = url, numbers: Iterator[int] = numbers) -> bool:
                post(running, prompt=f"{next(numbers)} {PROMPT}", max_tokens=8)  # unknown: any worker may get it
                return "trtx_step_seconds" in HTTP.get(url).text

            until("steps are counted", has_steps, seconds=20, every=0.2)
            check_served(HTTP.get(url).text, role)
        check_served(HTTP.get(f"{running.url}/metrics").text, "frontend")


def test_a_worker_gives_its_iteration_stats_once(agg: Topology) -> None:
    urls = [f"http://127.0.0.1:{worker.system_port}/engine/control/iteration_stats" for worker in agg.children[1:]]

    def rows() -> list[dict[str, Any]]:
        return [row for url in urls for row in HTTP.post(url, json={}).json()["iteration_stats"]]

    tokens = post(agg, prompt=PROMPT, max_tokens=12, ignore_eos=True).json()["usage"]["completion_tokens"]
    seen: list[dict[str, Any]] = []

    def decodes() -> int:
        seen.extend(rows())
        return sum(row["inflightBatchingStats"]["numGenRequests"] for row in seen)

    until("every step", lambda: decodes() >= tokens - 1, seconds=10)
    assert {"iter", "iterLatencyMS", "numCompletedRequests", "kvCacheStats"} <= seen[-1].keys()
    until("a row is given once", lambda: rows() == [], seconds=10)


def test_dynamos_receiver_for_planners_gets_the_forward_passes_of_a_worker(agg: Topology, tmp_path: Path) -> None:
    output = tmp_path / "fpm.jsonl"
    receiver = ["-m", "dynamo.common.recv_forward_pass_metrics", "--output", str(output), "--flush-interval", "0.1"]
    child = agg.spawn("receiver", receiver)
    agg.children.remove(child)

    def passes() -> list[dict[str, Any]]:
        lines = output.read_text().splitlines() if output.exists() else []
        return [json.loads(line)["metrics"] for line in lines if line.endswith("}}")]

    try:
        until("idle records of both workers", lambda: len({one["worker_id"] for one in passes()}) == 2, seconds=20)
        usage = post(agg, prompt="forward " * 9, max_tokens=5, ignore_eos=True).json()["usage"]
        cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0

        def scheduled(name: str) -> int:
            return sum(one["scheduled_requests"][name] for one in passes())

        until("its decodes", lambda: scheduled("num_decode_requests") == usage["completion_tokens"] - 1, seconds=10)
        assert scheduled("sum_prefill_tokens") == usage["prompt_tokens"] - cached
        assert scheduled("num_prefill_requests") == 1
        (worker,) = {one["worker_id"] for one in passes() if one["wall_time"] > 0}
        assert worker in {str(child.status()["worker_id"]) for child in agg.children[1:]}
    finally:
        child.end()


def test_disagg_gives_the_greedy_text_of_agg_and_moves_kv(agg: Topology, disagg: Topology) -> None:
    decode = disagg.children[2]
    for prompt, count in ((PROMPT, 20), ("hello", 1), ("hello world", 2), (PROMPT + "again", 12)):
        body = {"prompt": prompt, "max_tokens": count, "temperature": 0}
        expected, seen = (post(t, **body).json() for t in (agg, disagg))
        assert seen["choices"][0]["text"] == expected["choices"][0]["text"]
        assert seen["usage"]["completion_tokens"] == count
    until("bytes were counted", lambda: metric(decode, "trtx_handoff_bytes_total") > 0, seconds=10)
    assert metric(decode, "trtx_recomputed_prefixes_total") == 0


def test_prompt_logprobs_of_disagg_are_those_of_agg(agg: Topology, disagg: Topology) -> None:
    """Prefill computes them, and they reach the client with decode's answer."""
    asked = {"prompt_logprobs": 1, "temperature": 0, "nvext": {"extra_fields": ["engine_data"]}}
    for prompt, count in ((PROMPT, 5), ([300, 301, 302, 303], 1)):
        expected, seen = (
            post(t, prompt=prompt, max_tokens=count, **asked).json()["nvext"]["engine_data"]["prompt_logprobs"]
            for t in (agg, disagg)
        )
        assert [row.keys() for row in seen] == [row.keys() for row in expected]
        for row, other in zip(seen, expected, strict=True):
            for token, entry in row.items():
                assert entry["rank"] == other[token]["rank"]
                assert entry["logprob"] == pytest.approx(other[token]["logprob"], abs=1e-3)


def test_clients_of_disagg_are_told_what_prefill_found_in_its_cache(disagg: Topology) -> None:
    body = {"prompt": "a prompt that only this test of prefill's cache sends, twice and then longer " * 2}
    seen = [post(disagg, **body, max_tokens=count).json()["usage"] for count in (3, 3)]
    body["prompt"] += "than before, by more than one block of sixteen tokens, whatever the tokenizer makes of it"
    seen.append(events(disagg, **body, max_tokens=3, stream_options={"include_usage": True})[-1]["usage"])
    cold, same, longer = (usage["prompt_tokens_details"]["cached_tokens"] for usage in seen)
    whole_blocks = (seen[0]["prompt_tokens"] - 1) // BLOCK * BLOCK
    assert whole_blocks >= 2 * BLOCK
    assert (cold, same) == (0, whole_blocks)
    assert 0 < longer <= whole_blocks


def test_every_lease_is_released_when_clients_leave(disagg: Topology) -> None:
    prefill, decode = disagg.children[1:]
    body = {"model": disagg.model_name, "prompt": PROMPT, "max_tokens": 200, "stream": True}
    for patience in (0.002, 0.01, 0.03, 5.0):  # before, during and after the handoff
        with (
            contextlib.suppress(httpx.ReadTimeout),
            HTTP.stream("POST", f"{disagg.url}/v1/completions", json=body, timeout=patience) as answer,
        ):
            next(answer.iter_lines())
    for worker in (prefill, decode):
        until(f"{worker.name} is idle", lambda w=worker: metric(w, "trtx_open_requests") == 0, seconds=30)
    until("no lease is left", lambda: metric(prefill, "trtx_leases") == 0, seconds=30)


def test_what_only_decode_can_refuse_leaves_no_lease(disagg: Topology) -> None:
    """Prefill is told max_tokens 1 whatever the client said, and has made the KV by then."""
    prefill, decode = disagg.children[1:]
    refused = metric(decode, 'trtx_requests_total{outcome="invalid"')
    body = {"min_tokens": 9, "max_tokens": 3}
    answer = post(disagg, "chat/completions", **CHAT, **body)
    assert answer.status_code == 400
    assert "min_tokens is 9, expected at most max_tokens, which is 3" in answer.json()["message"]
    assert post(disagg, prompt=PROMPT, **body).status_code in (400, 500)
    assert metric(decode, 'trtx_requests_total{outcome="invalid"') == refused + 2
    until("no lease is left", lambda: metric(prefill, "trtx_leases") == 0, seconds=30)
    until("decode is idle", lambda: metric(decode, "trtx_open_requests") == 0, seconds=30)


@contextlib.contextmanager
def one_lease_out(running: Topology, prefill: Child, decode: Child) -> Iterator[Future[httpx.Response]]:
    """The answer to a request whose KV prefill has made, while decode's engine is frozen and can't read it."""
    post(running, prompt="hello", max_tokens=2)
    freeze(decode.status()["engine_pid"])
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(post, running, prompt=PROMPT, max_tokens=5, temperature=0)
        until("a lease is out", lambda: metric(prefill, "trtx_leases") == 1, seconds=30)
        until("decode has the request", lambda: metric(decode, "trtx_open_requests") == 1, seconds=30)
        yield answer


@pytest.mark.proof  # a pair of its own; that it drains for a live one is below
def test_prefill_does_not_drain_for_the_leases_of_a_dead_decode_worker(model: Path, tmp_path: Path) -> None:
    with topology(tmp_path, model) as running:
        running.start_frontend()
        prefill, decode = (
            running.start_worker(f"{role}-0", role=role, engine="torch", **TORCH) for role in ("prefill", "decode")
        )
        running.wait_ready(prefill=1, decode=1)
        with one_lease_out(running, prefill, decode) as answer:
            os.killpg(decode.process.pid, signal.SIGKILL)
            decode.process.wait(10)
            assert prefill.end(seconds=15) == 0  # the lease's deadline is a minute away, the drain's bound half of one
            assert "1 leases end unread" in prefill.log()
            assert answer.result(60).status_code >= 400


@pytest.mark.proof  # a vision encoder's start for one file
def test_an_encode_worker_leaves_no_card_behind_for_dynamos_grace(tmp_path: Path) -> None:
    """All that time every request for its model would be a 503."""
    with topology(tmp_path, resolve_checkpoint("synthetic:tiny-vl").path) as running:
        running.extra_environment["DYN_GRACEFUL_SHUTDOWN_GRACE_PERIOD_SECS"] = "600"
        encode = running.start_worker("encode-0", role="encode", engine="torch")
        until("it is registered", lambda: any((tmp_path / "kv" / "v1" / "mdc").glob("*")), seconds=60)
        assert encode.end(seconds=60) == 0


@pytest.mark.proof  # a worker of its own
def test_what_the_model_can_not_answer_is_a_500_and_a_wrong_request_a_400(model: Path, tmp_path: Path) -> None:
    poisoned = tmp_path / "poisoned"
    shutil.copytree(model, poisoned)
    weights = load_file(model / "model.safetensors")
    embedding = weights["model.embed_tokens.weight"]
    weights.setdefault("lm_head.weight", embedding.clone())  # else every row of logits would have a NaN
    (token_id,) = load_tokenizer(model).encode("~").ids[-1:]
    embedding[token_id] = float("nan")
    save_file(weights, poisoned / "model.safetensors", {"format": "pt"})
    config = json.loads((model / "config.json").read_text()) | {"tie_word_embeddings": False}
    (poisoned / "config.json").write_text(json.dumps(config))
    with topology(tmp_path, poisoned) as running:
        running.start_frontend()
        worker = running.start_worker("agg-0", engine="torch", **TORCH)
        running.wait_ready(aggregated=1)
        with ThreadPoolExecutor() as pool:
            good = pool.submit(post, running, "chat/completions", **CHAT, max_tokens=40)
            failed = post(running, "chat/completions", messages=[{"role": "user", "content": "a ~"}], max_tokens=4)
            refused = post(running, "chat/completions", **CHAT, max_tokens=4, n=2)
        assert (failed.status_code, refused.status_code, good.result().status_code) == (500, 400, 200), failed.text
        assert "the model's logits for this request are not numbers" in worker.log()


@pytest.mark.proof  # of a pair, the next test asks the same
def test_a_dead_engine_ends_its_worker_and_its_streams_go_on_elsewhere(agg: Topology) -> None:
    """Last of this topology: one of its workers is gone afterwards. What is left of a stream is less than its
    ``min_tokens``."""
    agg.children.remove(streams_outlive_an_engine(agg, agg.children[1:]))


def test_streams_of_a_dead_decode_engine_go_on_elsewhere(disagg: Topology) -> None:
    """Through prefill once more, which sees in place of decode that they have moved."""
    second = disagg.start_worker("decode-1", role="decode", engine="torch", **TORCH)
    disagg.wait_ready(prefill=1, decode=2)
    disagg.children.remove(streams_outlive_an_engine(disagg, [second]))


def streams_outlive_an_engine(running: Topology, workers: list[Child]) -> Child:
    """Kills the engine of one of ``workers`` under streams whose ``min_tokens`` is more than what is left of them."""
    body = {
        "max_tokens": STREAMED,
        "min_tokens": STREAMED,
        "ignore_eos": True,
        "stream_options": {"include_usage": True},
    }
    before = {worker.name: metric(worker, "trtx_generated_tokens_total") for worker in workers}

    def is_busy(worker: Child) -> bool:
        has_some = metric(worker, "trtx_generated_tokens_total") > before[worker.name]
        return has_some and metric(worker, "trtx_open_requests") > 0

    with ThreadPoolExecutor(8) as pool:
        streams = [pool.submit(events, running, prompt=f"{i} {PROMPT}", **body) for i in range(8)]
        victim = until("streams have tokens", lambda: next(filter(is_busy, workers), None), seconds=30)
        os.kill(victim.status()["engine_pid"], signal.SIGKILL)
        assert victim.process.wait(15) == 4
        assert victim.status()["error"].startswith("the engine died")
        for stream in streams:
            last = stream.result(120)[-1]
            assert "usage" in last, last
            assert last["usage"]["completion_tokens"] == STREAMED
    return victim


@pytest.mark.proof
def test_a_dead_prefill_engine_ends_its_worker_too(disagg: Topology) -> None:
    prefill = disagg.children[1]
    os.kill(prefill.status()["engine_pid"], signal.SIGKILL)
    assert prefill.process.wait(15) == 4
    disagg.children.remove(prefill)


@pytest.mark.proof
def test_prefill_drains_until_a_live_decode_worker_has_read(disagg: Topology) -> None:
    """Last of this topology, whose first prefill worker is dead."""
    (decode,) = (child for child in disagg.children if child.name == "decode-0")
    prefill = disagg.start_worker("prefill-1", role="prefill", engine="torch", **TORCH)
    disagg.wait_ready(prefill=1, decode=1)
    recomputed = metric(decode, "trtx_recomputed_prefixes_total")
    with one_lease_out(disagg, prefill, decode) as answer:
        prefill.process.send_signal(signal.SIGTERM)
        until("draining", lambda: prefill.status()["state"] == "draining", seconds=10)
        os.kill(decode.status()["engine_pid"], signal.SIGCONT)
        assert answer.result(60).json()["usage"]["completion_tokens"] == 5
        assert metric(decode, "trtx_recomputed_prefixes_total") == recomputed
        assert prefill.process.wait(15) == 0
        assert "end unread" not in prefill.log()
    disagg.children.remove(prefill)
