"""Dynamo's frontend in front of real workers on the paced engine: what clients see, and how workers end."""

from __future__ import annotations

import json
import re
import signal
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from processes import HTTP, Child, Topology, topology, until

from trtx.bench import Target
from trtx.checkpoint import resolve_checkpoint
from trtx.engine.worker_facts import PATH, of_body
from trtx.experiment import Attach
from trtx.experiment.deployment import ask_deployment
from trtx.experiment.server_readings import open_attached
from trtx.worker.requests.refusal_log import MOST_LINES

CONTEXT = 256
CHAT = {"messages": [{"role": "user", "content": "hello"}]}
SCHEMA_OF_NOTHING = {"type": "json_schema", "json_schema": {"name": "any", "schema": {"properties": {"a": {}}}}}


@pytest.fixture(scope="module")
def model() -> Path:
    return resolve_checkpoint("synthetic:tiny").path


@pytest.fixture(scope="module")
def agg(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Topology]:
    with topology(tmp_path_factory.mktemp("agg"), model) as running:
        running.start_frontend()
        running.start_worker("agg-0", max_seq_len=CONTEXT, paced_itl_ms=2)
        running.wait_ready(aggregated=1)
        yield running


@pytest.fixture(scope="module")
def disagg(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Topology]:
    with topology(tmp_path_factory.mktemp("disagg"), model) as running:
        running.start_frontend()
        running.start_worker("prefill-0", role="prefill", max_seq_len=CONTEXT, paced_ttft_ms=20)
        running.start_worker("decode-0", role="decode", max_seq_len=CONTEXT, paced_itl_ms=2)
        running.wait_ready(prefill=1, decode=1)
        yield running


def post(running: Topology, path: str = "completions", **body: Any) -> httpx.Response:
    return HTTP.post(f"{running.url}/v1/{path}", json={"model": running.model_name, **body}, timeout=60)


def events(running: Topology, path: str = "completions", **body: Any) -> list[dict[str, Any]]:
    """Every event of a stream, up to [DONE]."""
    found = []
    with HTTP.stream(
        "POST", f"{running.url}/v1/{path}", json={"model": running.model_name, "stream": True, **body}, timeout=60
    ) as answer:
        for line in answer.iter_lines():
            if line == "data: [DONE]":
                return found
            if line.startswith("data: "):
                found.append(json.loads(line.removeprefix("data: ")))
    raise AssertionError(f"no [DONE] after {found[-2:]}")


def metric(worker: Child, name: str) -> float:
    """The sum of the samples called ``name``, labels in it included as ``name{outcome="..."``."""
    text = HTTP.get(f"http://127.0.0.1:{worker.system_port}/metrics", timeout=10).text
    name, _, label = name.partition("{")
    lines = [line for line in text.splitlines() if line.startswith(name + "{") and label in line]
    assert lines, f"{name} is not served"
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines)


def test_what_workers_publish_is_what_an_attached_bench_knows_of_them(disagg: Topology) -> None:
    found = ask_deployment(Attach(url=disagg.url))
    assert (found.server, found.engine, found.workers) == ("NVIDIA Dynamo", "paced", {"prefill": 1, "decode": 1})
    assert (found.gpu_names, found.gpu_count) == ((), 0)
    assert found.versions is not None and found.versions["ai-dynamo"] == found.server_version
    shown = of_body(HTTP.get(f"{disagg.url}{PATH}", timeout=5).content) or ()
    assert [worker.facts.name for worker in shown] == ["decode-0", "prefill-0"]
    ids = {child.status()["worker_id"] for child in disagg.children if child.status_path}
    assert {worker.worker_id for worker in shown} == ids
    assert {worker.facts.context_length for worker in shown} == {CONTEXT}


def test_an_attached_bench_counts_with_each_worker_that_is_known_by_its_metrics(disagg: Topology) -> None:
    target = Target(disagg.url, disagg.model_name, Path(), "attached", worker_count=2)
    with open_attached(target) as read:
        assert read is not None
        first = read()
        assert first.ended_requests is not None and first.handoffs is not None
        assert set(first.ended_requests) == {"prefill", "decode"} and set(first.handoffs) == {"decode-0"}
        grown = {role: {name: count + 1 for name, count in one.items()} for role, one in first.ended_requests.items()}
        post(disagg, prompt="hello", max_tokens=4).raise_for_status()
        until("both have counted it", lambda: read().ended_requests == grown, seconds=10)


def test_a_unary_completion_has_text_usage_and_a_finish_reason(agg: Topology) -> None:
    answer = post(agg, prompt="hello world", max_tokens=8).json()
    assert answer["choices"][0]["finish_reason"] == "length"
    assert len(answer["choices"][0]["text"]) == 8
    assert answer["usage"]["completion_tokens"] == 8
    assert answer["usage"]["total_tokens"] == answer["usage"]["prompt_tokens"] + 8
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 0


def test_a_stream_carries_the_same_text_and_ends_with_one_finish_reason(agg: Topology) -> None:
    whole = post(agg, prompt="hello world", max_tokens=20).json()["choices"][0]["text"]
    streamed = events(agg, prompt="hello world", max_tokens=20, stream_options={"include_usage": True})
    choices = [choice for event in streamed for choice in event["choices"]]
    assert "".join(choice["text"] for choice in choices) == whole
    assert [c["finish_reason"] for c in choices if c.get("finish_reason")] == ["length"]
    assert streamed[-1]["usage"]["completion_tokens"] == 20


def test_a_worker_that_needs_no_torch_never_imports_it(agg: Topology) -> None:
    post(agg, prompt="hello", max_tokens=4).raise_for_status()
    (worker,) = (child for child in agg.children if child.name == "agg-0")
    loaded = Path(f"/proc/{worker.process.pid}/maps").read_text(encoding="utf-8")
    libraries = sorted({Path(line.split()[-1]).name for line in loaded.splitlines() if "/torch/" in line})
    assert not libraries, f"importing torch takes each worker 1.5 s of its start, and this one loaded {libraries}"


def test_chat_is_served(agg: Topology) -> None:
    answer = post(agg, "chat/completions", **CHAT, max_tokens=5)
    assert answer.status_code == 200
    assert answer.json()["choices"][0]["message"]["content"]


@pytest.mark.parametrize("max_tokens", [CONTEXT * 10, None])
def test_output_is_clamped_to_the_context(agg: Topology, max_tokens: int | None) -> None:
    usage = post(agg, prompt="hello world", max_tokens=max_tokens).json()["usage"]
    assert usage["total_tokens"] == CONTEXT


@pytest.mark.parametrize("penalty", [1e-45, 0.001, 2.0])
def test_a_repetition_penalty_that_the_frontend_takes_is_none_that_the_worker_refuses(
    agg: Topology, penalty: float
) -> None:
    assert post(agg, prompt="hello", max_tokens=2, repetition_penalty=penalty).status_code == 200


def test_no_part_of_a_stop_string_reaches_the_client(agg: Topology) -> None:
    whole = post(agg, prompt="hello world", max_tokens=40).json()["choices"][0]["text"]
    stop = whole[9:12]
    streamed = events(agg, prompt="hello world", max_tokens=40, stop=[stop])
    choices = [choice for event in streamed for choice in event["choices"]]
    assert "".join(choice.get("text") or "" for choice in choices) == whole[: whole.index(stop)]
    assert choices[-1]["finish_reason"] == "stop"


def test_several_prompts_in_one_request_are_answered_each(agg: Topology) -> None:
    answer = post(agg, prompt=["one", "two"], max_tokens=3).json()
    assert [choice["index"] for choice in answer["choices"]] == [0, 1]
    assert answer["usage"]["completion_tokens"] == 6


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (CHAT | {"n": 2}, "n is 2, expected 1"),
        (CHAT | {"response_format": {"type": "json_object"}}, "guided decoding"),
        (CHAT | {"response_format": SCHEMA_OF_NOTHING}, "guided decoding (json) is not served"),
        (CHAT | {"min_tokens": 9, "max_tokens": 3}, "min_tokens is 9, expected at most max_tokens, which is 3"),
        (CHAT | {"temperature": 3}, "Temperature must be between 0 and 2"),
        (CHAT | {"logprobs": True}, "logprobs"),
    ],
)
def test_what_is_not_served_is_a_400_that_says_why_and_harms_nobody(
    agg: Topology, body: dict[str, Any], said: str
) -> None:
    refused = post(agg, "chat/completions", **body)
    assert refused.status_code == 400
    assert said in refused.json()["message"]
    assert post(agg, prompt="hello", max_tokens=2).status_code == 200


PNG = "data:image/png;base64,iVBORw0KGgo="
MEDIA: list[tuple[str, dict[str, Any]]] = [
    ("image_url", {"type": "image_url", "image_url": {"url": PNG}}),
    ("image_url", {"type": "image_url", "image_url": {"url": "http://example.com/a.png"}}),
    ("video_url", {"type": "video_url", "video_url": {"url": "data:video/mp4;base64,AAAA"}}),
    ("audio_url", {"type": "audio_url", "audio_url": {"url": "data:audio/wav;base64,AAAA"}}),
]
INPUT_IMAGE = {"type": "input_image", "image_url": PNG, "detail": "auto"}


def chat_with(part: dict[str, Any]) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": [{"type": "text", "text": "What is this?"}, part]}]}


def response_with(part: dict[str, Any]) -> dict[str, Any]:
    text = {"type": "input_text", "text": "What is this?"}
    return {"input": [{"type": "message", "role": "user", "content": [text, part]}]}


@pytest.mark.parametrize(("kind", "part"), MEDIA)
def test_media_are_refused_and_not_answered_from_the_text_alone(agg: Topology, kind: str, part: dict[str, Any]) -> None:
    refused = post(agg, "chat/completions", **chat_with(part))
    assert refused.status_code == 400
    assert f"the request has media ({kind}), but this model" in refused.json()["message"]
    (event,) = events(agg, "chat/completions", **chat_with(part))
    assert set(event) == {"error"}


def test_an_image_in_a_response_is_refused(agg: Topology) -> None:
    refused = post(agg, "responses", **response_with(INPUT_IMAGE))
    assert refused.status_code == 400
    assert "the request has media (image_url)" in refused.json()["message"]
    streamed = [event["type"] for event in events(agg, "responses", **response_with(INPUT_IMAGE))]
    assert streamed[-1] == "response.failed"
    assert "response.output_text.delta" not in streamed


def test_a_refused_unary_completion_is_an_error_and_harms_nobody(agg: Topology) -> None:
    """500 without our text in Dynamo 1.4.2, whose completions route looks for no error before it folds the stream;
    400 once it does, as its chat route."""
    with ThreadPoolExecutor(1) as pool:
        stream = pool.submit(events, agg, prompt="hello", max_tokens=100)
        for body in ({"n": 2}, {"best_of": 2}, {"prompt": ["one", "two"], "n": 2}):
            refused = post(agg, **{"prompt": "hello", "max_tokens": 2, **body})
            assert refused.status_code in (400, 500)
            assert "choices" not in refused.json()
        assert stream.result(60)[-1]["choices"][0]["finish_reason"] == "length"
    assert post(agg, prompt="hello", max_tokens=2).status_code == 200


def test_what_is_refused_is_in_the_workers_log_whatever_the_client_sees(model: Path, tmp_path: Path) -> None:
    """And in the frontend's, but for streams."""
    routes = [("completions", {"prompt": "hello"}), ("chat/completions", CHAT), ("responses", {"input": "hello"})]
    with topology(tmp_path, model) as running:
        running.extra_environment["DYN_LOG"] = "warn"  # as trtx serve has it
        frontend, worker = running.start_frontend(), running.start_worker(max_seq_len=CONTEXT)
        running.wait_ready(aggregated=1)
        for count, (path, body) in enumerate(routes * 2):
            post(running, path, **body, nvext={"max_thinking_tokens": 1000 + count}, stream=count >= len(routes))
            said = f"max_thinking_tokens is {1000 + count}, expected none"
            told = (worker, frontend) if count < len(routes) else (worker,)
            for child in told:
                until(f"{child.name} says so of {path}", lambda c=child, s=said: s in c.log(), seconds=10)
        for _ in range(MOST_LINES):
            post(running, "chat/completions", **CHAT, n=2)
        assert worker.log().count(" refused: ") == MOST_LINES, "clients that are refused fill no disk"


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("chat/completions", CHAT | {"n": 2}),
        ("chat/completions", CHAT | {"response_format": {"type": "json_object"}}),
        ("completions", {"prompt": "hello", "n": 2}),
    ],
)
def test_a_refused_stream_is_one_error_event_and_other_streams_go_on(
    agg: Topology, path: str, body: dict[str, Any]
) -> None:
    whole = post(agg, prompt="hello", max_tokens=100).json()["choices"][0]["text"]
    with ThreadPoolExecutor(1) as pool:
        stream = pool.submit(events, agg, prompt="hello", max_tokens=100)
        (event,) = events(agg, path, **body)
        assert set(event) == {"error"}
        assert event["error"]["message"]
        assert event["error"]["code"] >= 400
        choices = [choice for other in stream.result(60) for choice in other["choices"]]
    assert "".join(choice["text"] for choice in choices) == whole
    assert choices[-1]["finish_reason"] == "length"


def test_malformed_json_is_a_400_while_a_stream_goes_on(agg: Topology) -> None:
    with ThreadPoolExecutor(1) as pool:
        stream = pool.submit(events, agg, prompt="hello", max_tokens=100)
        for _ in range(5):
            answer = HTTP.post(
                f"{agg.url}/v1/completions",
                content=b'{"model": ',
                headers={"Content-Type": "application/json"},
                timeout=10,
            )
            assert answer.status_code == 400
        assert stream.result(60)[-1]["choices"][0]["finish_reason"] == "length"


def test_a_client_that_leaves_ends_its_request_in_the_engine(agg: Topology) -> None:
    worker = agg.children[1]
    before = metric(worker, 'trtx_requests_total{outcome="cancelled"')
    body = {"model": agg.model_name, "prompt": "hello", "max_tokens": CONTEXT, "stream": True}
    with HTTP.stream("POST", f"{agg.url}/v1/completions", json=body, timeout=60) as answer:
        next(answer.iter_lines())
    until("cancelled", lambda: metric(worker, 'trtx_requests_total{outcome="cancelled"') == before + 1, seconds=10)
    until("nothing runs", lambda: metric(worker, "trtx_running_requests") == 0, seconds=10)


def test_the_system_port_serves_the_workers_metrics(agg: Topology) -> None:
    worker = agg.children[1]
    generated, first = (
        metric(worker, "trtx_generated_tokens_total"),
        metric(worker, "trtx_time_to_first_token_seconds_count"),
    )
    post(agg, prompt="hello", max_tokens=7)
    assert metric(worker, "trtx_generated_tokens_total") == generated + 7
    assert metric(worker, "trtx_time_to_first_token_seconds_count") == first + 1


def test_disagg_gives_the_text_of_agg(agg: Topology, disagg: Topology) -> None:
    for prompt, count in (("hello world", 1), ("hello world", 2), ("a much longer prompt than that", 40)):
        expected, seen = (post(t, prompt=prompt, max_tokens=count).json() for t in (agg, disagg))
        assert seen["choices"][0]["text"] == expected["choices"][0]["text"]
        assert seen["usage"]["completion_tokens"] == count


def test_disagg_sends_every_request_through_both_workers(disagg: Topology) -> None:
    prefill, decode = disagg.children[1:]
    before = [metric(worker, "trtx_generated_tokens_total") for worker in (prefill, decode)]
    post(disagg, prompt="hello world", max_tokens=10)
    after = [metric(worker, "trtx_generated_tokens_total") for worker in (prefill, decode)]
    assert [b - a for a, b in zip(before, after, strict=True)] == [1, 10]


def test_a_refusal_on_prefill_stays_a_400(disagg: Topology) -> None:
    for path, body in (("completions", {"prompt": "hello"}), ("chat/completions", CHAT)):
        for stream in (False, True):
            answer = post(disagg, path, **body, n=2, stream=stream)
            assert answer.status_code == 400
            assert "n is 2" in answer.json()["message"]


@pytest.mark.parametrize("stream", [False, True])
def test_media_are_a_400_where_prefill_and_decode_are_apart(disagg: Topology, stream: bool) -> None:
    bodies = [("chat/completions", chat_with(part)) for _, part in MEDIA]
    for path, body in [*bodies, ("responses", response_with(INPUT_IMAGE))]:
        refused = post(disagg, path, **body, stream=stream)
        assert refused.status_code == 400
        assert "the request has media" in refused.json()["message"]


def test_prompt_logprobs_that_the_frontend_would_lose_are_a_400(disagg: Topology) -> None:
    refused = post(disagg, prompt="hello", prompt_logprobs=1)
    assert refused.status_code == 400
    assert "the frontend would drop them" in refused.json()["message"]


def test_nothing_listens_beyond_loopback(agg: Topology, disagg: Topology) -> None:
    pids = {str(child.process.pid) for running in (agg, disagg) for child in running.children}
    listening = subprocess.run(["ss", "-Hltnp"], capture_output=True, text=True, check=True).stdout.splitlines()
    ours = [line.split() for line in listening if pids & set(re.findall(r"pid=(\d+)", line))]
    assert len(ours) >= len(pids)
    beyond = [columns[3] for columns in ours if not columns[3].startswith(("127.0.0.1:", "[::1]:"))]
    assert not beyond


def test_sigterm_lets_the_streams_finish_within_a_bound_and_then_ends_cleanly(model: Path, tmp_path: Path) -> None:
    with topology(tmp_path, model) as running:
        running.start_frontend()
        worker = running.start_worker("agg-0", paced_itl_ms=20)
        running.wait_ready(aggregated=1)
        with ThreadPoolExecutor(4) as pool:
            body = {"max_tokens": 60, "stream_options": {"include_usage": True}}
            streams = [pool.submit(events, running, prompt=f"hello {i}", **body) for i in range(4)]
            until("all run", lambda: metric(worker, "trtx_running_requests") == 4, seconds=20)
            worker.process.send_signal(signal.SIGTERM)
            until("draining", lambda: worker.status()["state"] == "draining", seconds=10)
            for stream in streams:
                *_, last, usage = stream.result(60)
                assert last["choices"][0]["finish_reason"] == "length"
                assert usage["usage"]["completion_tokens"] == 60
        assert worker.process.wait(20) == 0

        running.children.remove(worker)
        slow = running.start_worker("agg-1", paced_itl_ms=1000, flags=("--drain-seconds", "0.5"))
        running.wait_ready(aggregated=1)
        with ThreadPoolExecutor(1) as pool:
            stream = pool.submit(events, running, prompt="hello", max_tokens=100)
            until("runs", lambda: metric(slow, "trtx_running_requests") == 1, seconds=20)
            assert slow.end(seconds=15) == 0
            stream.result(30)


@pytest.mark.proof  # a pair of its own
def test_a_client_that_leaves_during_prefill_leaves_nothing_running_and_prefill_drains_within_its_bound(
    model: Path, tmp_path: Path
) -> None:
    with topology(tmp_path, model) as running:
        running.start_frontend()
        prefill = running.start_worker("prefill-0", role="prefill", paced_ttft_ms=1500)
        decode = running.start_worker("decode-0", role="decode")
        running.wait_ready(prefill=1, decode=1)
        body = {"model": running.model_name, "prompt": "hello", "max_tokens": 1000, "stream": True}
        with pytest.raises(httpx.ReadTimeout):
            HTTP.post(f"{running.url}/v1/completions", json=body, timeout=0.4)
        until("decode saw it", lambda: metric(decode, 'trtx_requests_total{outcome="cancelled"') == 1, seconds=20)
        assert metric(prefill, "trtx_open_requests") == metric(decode, "trtx_open_requests") == 0

        stuck = running.start_worker("prefill-1", role="prefill", paced_ttft_ms=600_000, flags=("--drain-seconds", "1"))
        running.wait_ready(prefill=2, decode=1)
        with ThreadPoolExecutor(2) as pool:  # round robin: one request for each
            answers = [pool.submit(post, running, prompt="hello", max_tokens=3) for _ in range(2)]
            for worker in (prefill, stuck):
                until(f"{worker.name} works", lambda w=worker: metric(w, "trtx_open_requests") == 1, seconds=20)
            prefill.process.send_signal(signal.SIGTERM)
            assert stuck.end(seconds=15) == 0
            assert prefill.end(seconds=15) == 0
            assert 200 in [answer.result(60).status_code for answer in answers]


def test_a_worker_that_can_not_start_says_why_and_exits_4(model: Path, tmp_path: Path) -> None:
    running = Topology(tmp_path, model)
    worker = running.start_worker("agg-0", paced_itl_ms=-3)
    assert worker.process.wait(60) == 4
    assert worker.log().splitlines()[-1].startswith("trtx.worker: agg-0 did not start: paced_itl_ms is -3")
    assert "paced_itl_ms is -3" in worker.status()["error"]


def test_a_wrong_command_line_exits_2_before_anything_is_loaded(model: Path, tmp_path: Path) -> None:
    running = Topology(tmp_path, tmp_path / "nowhere")
    worker = running.start_worker("agg-0")
    assert worker.process.wait(30) == 2
    assert "has no config.json" in worker.log()
    assert not (tmp_path / "kv").exists()
