"""``trtx serve --engine tensorrt-llm`` end to end: real frontend, workers and requests, the package under test inside.

What is asserted holds for the real package too. Tests of faults need the stand-in's switches and run with it alone.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import re
import signal
import socket
import threading
import urllib.request
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from processes import Topology, topology, until
from topology_clients import ServeCommand, nothing_left, post, stream_once, trtx_serve, wait_until

from trtx.cli.app import run
from trtx.engine.ranks import Rank, end
from trtx.evals.parity import read_parity
from trtx.topology import Plan
from trtx.torch_engine.llmapi import LLM, SamplingParams
from trtx.worker.served_families.trtllm_families import FAMILIES

pytestmark = pytest.mark.trtllm

# Left by a Slurm job and by mpirun: a start that inherits them fails, in the stand-in as in the real package.
JOB = {"SLURM_JOB_ID": "7", "PMIX_RANK": "0", "PMI_RANK": "0", "OMPI_COMM_WORLD_RANK": "0"}
SMALL = ("--set", "max_batch_size=8", "--set", "max_seq_len=512", "--set", "kv_cache_config.max_tokens=8192")
PROMPTS = ("12 + 13 = ", "1 2 3 4 5", "The quick brown", "Copy: alpha beta ->")
LONGEST_PROMPT = 128
TOKENS = 24


@contextlib.contextmanager
def serving(environment: Mapping[str, str], *arguments: str) -> Iterator[tuple[ServeCommand, Plan]]:
    with pytest.MonkeyPatch.context() as patch:
        for name, value in environment.items():
            patch.setenv(name, value)
        with trtx_serve("--engine", "tensorrt-llm", *SMALL, *arguments) as serve:
            yield serve, serve.wait_ready(120)


@pytest.fixture(scope="module", params=[pytest.param("agg", marks=pytest.mark.proof), "disagg"])
def served(request: pytest.FixtureRequest, trtllm_environment: Mapping[str, str]) -> Iterator[Plan]:
    """A topology of each mode, started from within what looks like a Slurm job. Prompts past 128 tokens are refused."""
    limits = ("--set", f"max_num_tokens={LONGEST_PROMPT}", "--set", "enable_chunked_prefill=false")
    with serving({**trtllm_environment, **JOB}, "--mode", request.param, *limits) as (_, plan):
        yield plan


@dataclass(frozen=True)
class Expected:
    text: str
    token_ids: list[int]
    tokens: list[str]


@pytest.fixture(scope="module")
def expected(model_directory: str) -> dict[str, Expected]:
    """The torch engine's own greedy answers."""
    with LLM(model_directory, max_batch_size=8, max_seq_len=512, max_num_tokens=512) as llm:
        sampling = SamplingParams(max_tokens=TOKENS, temperature=0.0, ignore_eos=True)
        outputs = llm.generate(list(PROMPTS), sampling)
        assert isinstance(outputs, list)
        return {
            prompt: Expected(
                output.outputs[0].text,
                output.outputs[0].token_ids,
                [llm.tokenizer.decode(token_id, skip_special_tokens=True) for token_id in output.outputs[0].token_ids],
            )
            for prompt, output in zip(PROMPTS, outputs, strict=True)
        }


def complete(plan: Plan, prompt: str, **more: Any) -> dict[str, Any]:
    body = {"model": plan.model, "prompt": prompt, "max_tokens": TOKENS, "temperature": 0, "ignore_eos": True} | more
    code, answer = post(plan.url, "/v1/completions", body)
    assert code == 200, answer
    return answer


def streamed(plan: Plan, prompt: str, **more: Any) -> list[dict[str, Any]]:
    """The choices of a streamed completion, in order."""
    body = {"model": plan.model, "prompt": prompt, "max_tokens": TOKENS, "temperature": 0, "ignore_eos": True} | more
    request = urllib.request.Request(
        f"{plan.url}/v1/completions",
        json.dumps(body | {"stream": True}).encode(),
        {"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=30) as response:
        events = [line[6:] for line in response if line.startswith(b"data: ") and b"[DONE]" not in line]
    return [choice for event in events for choice in json.loads(event)["choices"]]


def metric(plan: Plan, role: str, name: str) -> float:
    """Of the first worker of ``role``; 0 while it has none by that name."""
    worker = next(worker for worker in plan.workers if worker.role in (role, "agg"))
    with urllib.request.urlopen(f"http://127.0.0.1:{worker.system_port}/metrics", timeout=10) as response:
        found = re.findall(rf"^{name}(?:{{[^}}]*}})? ([0-9.e+-]+)$", response.read().decode(), re.MULTILINE)
    return float(found[0]) if found else 0.0


# --- metrics ---


def test_workers_serve_tensorrt_llms_own_metric_names(served: Plan) -> None:
    complete(served, PROMPTS[3])
    for worker in served.workers:
        url = f"http://127.0.0.1:{worker.system_port}/metrics"

        def text(url: str = url) -> str:
            with urllib.request.urlopen(url, timeout=10) as response:
                return str(response.read().decode())

        until("statistics", lambda text=text: "trtllm_prefill_batch_tokens_count" in text(), seconds=10)  # type: ignore[misc]
        lines = text().splitlines()
        own = {line.split(" ")[2] for line in lines if line.startswith("# TYPE trtllm_")}
        records = {name for name, family in FAMILIES.items() if worker.role in family.by}
        assert own <= records
        # what depends on the engine: no draft model, no GPU memory on the stand-in's CPU, pinned memory
        assert {name for name in records - own if "spec_decode" not in name and "memory" not in name} == set()
        assert all('engine_type="trtllm"' in line for line in lines if line.startswith("trtllm_"))


# --- tokens ---


@pytest.mark.parametrize("prompt", PROMPTS)
def test_an_answer_has_the_torch_engines_exact_tokens(served: Plan, expected: dict[str, Expected], prompt: str) -> None:
    answer = complete(served, prompt)
    assert answer["choices"][0]["text"] == expected[prompt].text
    assert answer["choices"][0]["finish_reason"] == "length"
    assert answer["usage"]["completion_tokens"] == TOKENS


def test_streams_side_by_side_join_to_the_same_text(served: Plan, expected: dict[str, Expected]) -> None:
    answers: dict[str, list[dict[str, Any]]] = {}
    threads = [
        threading.Thread(target=lambda prompt=prompt: answers.update({prompt: streamed(served, prompt)}))
        for prompt in PROMPTS
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    for prompt in PROMPTS:
        assert "".join(choice["text"] for choice in answers[prompt]) == expected[prompt].text
        assert [choice.get("finish_reason") for choice in answers[prompt]][-1] == "length"


def test_chat_goes_through_the_models_template(served: Plan) -> None:
    body = {"model": served.model, "messages": [{"role": "user", "content": "What is 2 + 3?"}], "temperature": 0}
    code, answer = post(served.url, "/v1/chat/completions", body)
    assert (code, answer["choices"][0]["message"]["content"], answer["choices"][0]["finish_reason"]) == (
        200,
        "5",
        "stop",
    )


def test_each_token_has_its_logprob_the_first_from_prefill_too(served: Plan, expected: dict[str, Expected]) -> None:
    logprobs = complete(served, PROMPTS[0], logprobs=2)["choices"][0]["logprobs"]
    assert logprobs["tokens"] == expected[PROMPTS[0]].tokens
    assert len(logprobs["token_logprobs"]) == len(logprobs["top_logprobs"]) == TOKENS
    assert all(logprob <= 0 for logprob in logprobs["token_logprobs"])
    # by text: the two likeliest tokens may have the same
    assert all(1 <= len(top) <= 2 and max(top.values()) <= 0 for top in logprobs["top_logprobs"])


# --- stop strings ---


def test_a_stop_string_across_tokens_cuts_the_text_and_none_of_it_is_streamed(
    served: Plan, expected: dict[str, Expected]
) -> None:
    tokens = expected[PROMPTS[1]].tokens
    whole = expected[PROMPTS[1]].text
    # The end of one token and the beginning of the next, as no tokenizer would spell it.
    at = next(n for n in range(8, TOKENS - 1) if tokens[n].strip() and tokens[n + 1].strip())
    stop = tokens[at][-1:] + tokens[at + 1][:1]
    kept = whole[: whole.index(stop)]
    # Beside ignore_eos the frontend sends no stop strings.
    answer = complete(served, PROMPTS[1], stop=[stop], ignore_eos=False)["choices"][0]
    assert (answer["text"], answer["finish_reason"]) == (kept, "stop")
    logprobs = complete(served, PROMPTS[1], stop=[stop], ignore_eos=False, logprobs=1)["choices"][0]["logprobs"]
    assert "".join(logprobs["tokens"]) == kept
    assert [next(iter(top)) for top in logprobs["top_logprobs"]] == logprobs["tokens"]
    choices = streamed(served, PROMPTS[1], stop=[stop], ignore_eos=False)
    assert "".join(choice["text"] for choice in choices) == kept
    assert choices[-1]["finish_reason"] == "stop"


def test_what_only_looks_like_a_stop_string_is_given_out_in_the_end(
    served: Plan, expected: dict[str, Expected]
) -> None:
    whole = expected[PROMPTS[1]].text.partition("user")[0]  # up to its end of sequence
    stops = [whole[4:9] + "\0", whole[-3:] + "\0"]
    choices = streamed(served, PROMPTS[1], stop=stops, ignore_eos=False)
    assert "".join(choice["text"] for choice in choices) == whole


# --- requests that end early ---


def test_a_client_that_goes_away_frees_its_request(served: Plan) -> None:
    address = urlsplit(served.url)
    connection = http.client.HTTPConnection(address.hostname or "", address.port, timeout=30)
    body = {"model": served.model, "prompt": "count", "max_tokens": 400, "stream": True, "ignore_eos": True}
    before = metric(served, "decode", "trtx_generated_tokens_total")
    connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
    response = connection.getresponse()
    assert response.readline().startswith(b"data: ")
    assert connection.sock is not None
    connection.sock.shutdown(socket.SHUT_RDWR)
    connection.close()
    wait_until(lambda: metric(served, "decode", "trtx_open_requests") == 0, 15, "the request closed")
    assert metric(served, "decode", "trtx_generated_tokens_total") - before < 400
    # The engine counts at its steps: what it still ran beside this one would be seen after it.
    assert complete(served, PROMPTS[0])["usage"]["completion_tokens"] == TOKENS
    wait_until(lambda: metric(served, "decode", "trtx_running_requests") == 0, 15, "the engine idle")


def test_a_request_that_the_engine_refuses_is_a_400_and_harms_no_other(
    served: Plan, expected: dict[str, Expected]
) -> None:
    others: list[str] = []
    stream = threading.Thread(
        target=lambda: others.append("".join(choice["text"] for choice in streamed(served, PROMPTS[2])))
    )
    stream.start()
    body = {"model": served.model, "messages": [{"role": "user", "content": "7 " * LONGEST_PROMPT}]}
    code, answer = post(served.url, "/v1/chat/completions", body)
    stream.join(60)
    assert code == 400, answer
    assert "max_num_tokens" in json.dumps(answer)
    assert others == [expected[PROMPTS[2]].text]
    assert complete(served, PROMPTS[2])["choices"][0]["text"] == expected[PROMPTS[2]].text


@pytest.mark.proof
def test_the_stable_release_is_served_without_what_came_later(
    only_standin: None, trtllm_environment: Mapping[str, str], expected: dict[str, Expected]
) -> None:
    """1.2.1 has no global request ids, no KV capacity, no priority and no health call."""
    with serving({**trtllm_environment, "STANDIN_TRTLLM_VERSION": "1.2.1"}, "--mode", "disagg") as (_, plan):
        assert complete(plan, PROMPTS[0])["choices"][0]["text"] == expected[PROMPTS[0]].text
        assert metric(plan, "prefill", "trtx_generated_tokens_total") > 0
        assert "this engine has no health call" in plan.workers[0].log_path.read_text()


# --- faults ---


def test_an_engine_that_fails_ends_its_worker_with_its_ranks_and_a_new_one_serves(
    only_standin: None, trtllm_environment: Mapping[str, str]
) -> None:
    faults = {"STANDIN_TRTLLM_FAULT": "fatal-after:9,leave-rank"}
    with serving({**trtllm_environment, **faults}, "--mode", "agg") as (serve, plan):
        recorded = json.loads((plan.workers[0].status_file or Path()).read_text())
        first_life = [Rank(**rank) for rank in recorded["ranks"]]
        assert len(first_life) == 2, "the engine's process, and the rank that would stay"
        assert recorded["load_seconds"] > 0
        streams = [stream_once(plan.url, plan.model, f"request {number}", 5) for number in range(10)]
        bad = [stream for stream in streams if not stream.is_good]
        assert bad, "the ninth request met a dead engine"
        wait_until(lambda: "the topology is whole again" in serve.text(), 60, "whole again")
        assert "agg-0 exited 4" in serve.text()
        assert "processes of its engine outlived it, and trtx ended them: pid" in serve.text()
        assert not any(rank.is_alive for rank in first_life)
        assert stream_once(plan.url, plan.model, "afterwards", 5).is_good
        log = plan.workers[0].log_path.read_text()
        assert "the engine died" in log
        second_life = [
            Rank(**rank) for rank in json.loads((plan.workers[0].status_file or Path()).read_text())["ranks"]
        ]
        serve.process.send_signal(signal.SIGINT)
        assert serve.wait(45) == 130
        assert nothing_left(plan)
        assert not any(rank.is_alive for rank in second_life)


@pytest.fixture
def workers(tmp_path: Path, trtllm_environment: Mapping[str, str], model_directory: str) -> Iterator[Topology]:
    with topology(tmp_path, Path(model_directory)) as running:
        running.extra_environment |= dict(trtllm_environment) | {"DYN_NAMESPACE": "trtllm-test", "DYN_LOG": "info"}
        running.extra_environment |= {"CUDA_VISIBLE_DEVICES": ""}
        yield running


@pytest.mark.proof  # a topology of its own
def test_a_shutdown_that_hangs_is_given_up_and_the_rank_it_leaves_is_on_record(
    only_standin: None, workers: Topology
) -> None:
    workers.extra_environment["STANDIN_TRTLLM_FAULT"] = "hang-on-shutdown"
    worker = workers.start_worker("agg-0", engine="tensorrt-llm", max_seq_len=64, flags=("--shutdown-seconds", "1"))
    until("it serves", lambda: worker.status().get("state") == "serving" or worker.process.poll())
    ranks = [Rank(**rank) for rank in worker.status()["ranks"]]
    assert any(rank.is_alive for rank in ranks)
    assert worker.end() == 4, worker.log()
    assert "the engine did not end in 1 s" in worker.log()
    until("its engine is gone", lambda: not any(rank.is_alive for rank in ranks), seconds=10)


@pytest.mark.proof  # a topology of its own; an engine that fails is above
def test_an_engine_that_takes_no_step_is_dead_whatever_it_says(only_standin: None, workers: Topology) -> None:
    workers.start_frontend("--namespace", "trtllm-test")
    worker = workers.start_worker(engine="tensorrt-llm", max_seq_len=512, flags=("--stall-seconds", "4"))
    workers.wait_ready(aggregated=1)
    (engine,) = [Rank(**rank) for rank in worker.status()["ranks"]]
    body = {"model": workers.model_name, "prompt": PROMPTS[0], "max_tokens": 4}
    assert post(workers.url, "/v1/completions", body)[0] == 200
    os.kill(engine.pid, signal.SIGSTOP)
    try:
        code, _ = post(workers.url, "/v1/completions", body)
        assert code >= 500
        assert worker.process.wait(30) == 4
        assert "no step in 4 s with 1 requests open" in worker.status()["error"]
    finally:
        end([engine])  # which a launcher would do


@pytest.mark.proof
def test_each_attention_dp_rank_is_a_target_of_its_own_for_the_router(only_standin: None, workers: Topology) -> None:
    """Two ranks on two GPUs, which the stand-in counts and does not touch."""
    workers.extra_environment["CUDA_VISIBLE_DEVICES"] = "0,1"
    workers.start_frontend("--router-mode", "kv", "--namespace", "trtllm-test")
    worker = workers.start_worker(
        engine="tensorrt-llm", tensor_parallel_size=2, enable_attention_dp=True, max_seq_len=512, max_batch_size=4
    )
    workers.wait_ready(aggregated=1)
    for number in range(4):
        body = {"model": workers.model_name, "prompt": f"{number} {PROMPTS[0]}" * 9, "max_tokens": 4}
        assert post(workers.url, "/v1/completions", body)[0] == 200

    def ranks_of(name: str) -> list[str]:
        with urllib.request.urlopen(f"http://127.0.0.1:{worker.system_port}/metrics", timeout=10) as response:
            return sorted(re.findall(rf'^{name}\{{.*dp_rank="(\d)"', response.read().decode(), re.MULTILINE))

    both = ["0", "1"]
    until("stats of both ranks", lambda: ranks_of("trtx_running_requests") == both, seconds=10)
    until("the router's view of both", lambda: ranks_of("dynamo_component_total_blocks") == both, seconds=10)
    cards = [path.read_text() for path in (workers.directory / "kv" / "v1" / "mdc").rglob("*") if path.is_file()]
    assert all('"data_parallel_size":2' in card.replace(" ", "") for card in cards), cards
    assert cards


@pytest.mark.proof
def test_parity_has_a_verdict_on_handoffs_that_the_engine_counts_by_its_requests(
    trtllm_environment: Mapping[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in trtllm_environment.items():
        monkeypatch.setenv(name, value)
    argv = ["eval", "parity", "--engine", "tensorrt-llm", *SMALL, "--routes", "disagg", "--isl", "64", "--osl", "6"]
    code = run([*argv, "--prompts", "12", "-o", str(tmp_path)])
    (run_dir,) = tmp_path.iterdir()
    found = read_parity(run_dir)
    assert found is not None
    counts = {one.what: one.value for one in found.routes[0].evidence.counts}
    handoffs = counts["handoffs"]
    assert handoffs is not None and 12 <= handoffs <= 15 and counts["prompts recomputed in place of one"] == 0
    assert found.routes[0].evidence.missing is None and code == 0
