"""Prompts that the KV router leaves to a decode worker: their answers, their streams, their count, and a dead peer."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import pytest
from processes import HTTP
from topology_clients import ServeCommand, post, trtx_serve, wait_until

from trtx.topology import Plan

MODEL = ("--model", "synthetic:tiny-trained", "--engine", "torch", "--set", "dtype=float32")
BLOCK, THRESHOLD, LONGEST = 32, 64, 512
POLICY = f"isl_bounding,eff_isl_threshold={THRESHOLD},eff_isl_ratio_threshold=1"
SMALL = tuple(word for one in (f"max_seq_len={LONGEST}", "kv_cache_config.max_tokens=16384") for word in ("--set", one))
ANSWER_TOKENS = 24
WHOLE_AGAIN = "the topology is whole again: a request went through, and KV in its pair of workers"
dice = random.Random(5)


def new_tokens(count: int) -> list[int]:
    return [dice.randrange(300, 1000) for _ in range(count)]


@dataclass(frozen=True)
class Answer:
    text: str
    outcome: str
    prefill: str | None


def body(prompt: list[int], **more: Any) -> dict[str, Any]:
    fixed = {"model": "tiny-trained", "max_tokens": ANSWER_TOKENS, "temperature": 0.0, "ignore_eos": True}
    return {**fixed, "prompt": prompt, "nvext": {"extra_fields": ["engine_data"]}, **more}


def ask(url: str, prompt: list[int]) -> Answer:
    status, answer = post(url, "/v1/completions", body(prompt))
    assert status == 200, answer
    handoff = ((answer.get("nvext") or {}).get("engine_data") or {}).get("handoff") or {}
    return Answer(answer["choices"][0]["text"], handoff.get("outcome", ""), handoff.get("prefill"))


def lines_of_stream(url: str, prompt: list[int], max_tokens: int) -> list[str]:
    with HTTP.stream(
        "POST", f"{url}/v1/completions", json=body(prompt, stream=True, max_tokens=max_tokens), timeout=60
    ) as answer:
        assert answer.status_code == 200
        return [line for line in answer.iter_lines() if line]


def text_of(lines: list[str]) -> str:
    events = [json.loads(line.removeprefix("data: ")) for line in lines if line != "data: [DONE]"]
    return "".join(choice["text"] for event in events for choice in event["choices"])


def counts(plan: Plan) -> dict[str, int]:
    """What the decode workers count, by outcome. A client has its answer before its request is counted."""
    wait_until(lambda: open_on_decode(plan) == 0, 30, "every request is counted")
    texts = [
        HTTP.get(f"http://127.0.0.1:{one.system_port}/metrics").text for one in plan.workers if one.role == "decode"
    ]

    def total(pattern: str) -> int:
        return sum(int(float(found)) for text in texts for found in re.findall(rf"^{pattern} (\S+)$", text, re.M))

    pairs = {one: total(rf'trtx_pair_handoffs_total\{{.*outcome="{one}".*\}}') for one in ("read", "recomputed")}
    return pairs | {
        "local": total(r"trtx_local_prefills_total\{.*\}"),
        "whole": total(r"trtx_whole_requests_total\{.*\}"),
    }


def open_on_decode(plan: Plan) -> float:
    (worker,) = (one for one in plan.workers if one.role == "decode")
    text = HTTP.get(f"http://127.0.0.1:{worker.system_port}/metrics").text
    return sum(float(found) for found in re.findall(r"^trtx_open_requests\{.*\} (\S+)$", text, re.M))


@pytest.fixture(scope="module")
def conversations() -> list[list[int]]:
    """Prompts of several blocks, each at least as long as the threshold."""
    return [new_tokens(length) for length in (THRESHOLD, 3 * BLOCK + 1, 200, 257)]


@pytest.fixture(scope="module")
def turns(conversations: list[list[int]]) -> list[list[int]]:
    """The next turn of each, whose new part is shorter than the threshold."""
    return [prompt + new_tokens(1 + 7 * number) for number, prompt in enumerate(conversations)]


@pytest.fixture(scope="module")
def expected(conversations: list[list[int]], turns: list[list[int]]) -> dict[tuple[int, ...], str]:
    """The answers of an aggregated topology."""
    with trtx_serve(*MODEL, *SMALL) as serving:
        url = serving.wait_ready().url
        return {tuple(prompt): ask(url, prompt).text for prompt in (*conversations, *turns)}


@pytest.fixture(scope="module")
def serving(expected: dict[tuple[int, ...], str]) -> Iterator[ServeCommand]:
    with trtx_serve(*MODEL, *SMALL, "--mode", "disagg", "--router-mode", "kv", "--conditional-disagg", POLICY) as made:
        made.wait_ready()
        yield made


def until_local(url: str, prompt: list[int]) -> Answer:
    """The first answer for which the router knew what the decode worker caches: its events arrive a moment later."""
    found: list[Answer] = []

    def is_local() -> bool:
        found.append(ask(url, prompt))
        return found[-1].outcome == "local"

    wait_until(is_local, 20, "the router leaves the prompt to the decode worker")
    return found[-1]


def test_answers_equal_aggregated_ones_and_each_way_has_its_own_count(
    serving: ServeCommand,
    conversations: list[list[int]],
    turns: list[list[int]],
    expected: dict[tuple[int, ...], str],
) -> None:
    plan = serving.plan()
    assert "and KV in its pair of workers" in serving.text(), "a proof must not be left to the decode worker"
    before = counts(plan)
    assert before["read"] >= 1 and before["whole"] == before["recomputed"] == 0
    for prompt in conversations:
        assert ask(plan.url, prompt) == Answer(expected[tuple(prompt)], "read", "prefill-0")
    for prompt in turns:
        assert until_local(plan.url, prompt) == Answer(expected[tuple(prompt)], "local", None)
    after = counts(plan)
    assert after["local"] - before["local"] >= len(turns) and after["whole"] == after["recomputed"] == 0
    assert after["read"] - before["read"] >= len(conversations)

    long_again = conversations[3] + new_tokens(THRESHOLD)  # of which as much is new as the threshold
    assert ask(plan.url, long_again).outcome == "read"
    (status,) = [worker.status_file for worker in plan.workers if worker.role == "decode"]
    assert status is not None
    wait_until(lambda: json.loads(status.read_text())["handoffs"]["local"] >= after["local"], 20, "in the status file")


def test_a_stream_of_such_a_prompt_has_events_with_data_alone(
    serving: ServeCommand, turns: list[list[int]], expected: dict[tuple[int, ...], str]
) -> None:
    """Dynamo 1.6.1 marks the stream with an event that has none."""
    plan, prompt = serving.plan(), turns[2]
    until_local(plan.url, prompt)
    before = counts(plan)["local"]
    lines = lines_of_stream(plan.url, prompt, ANSWER_TOKENS)
    assert counts(plan)["local"] == before + 1
    assert [line for line in lines if not line.startswith("data: ")] == [] and lines[-1] == "data: [DONE]"
    assert text_of(lines) == expected[tuple(prompt)]


@pytest.mark.proof
def test_a_dead_prefill_worker_cuts_no_such_stream_and_its_pair_is_proved_again(
    serving: ServeCommand, turns: list[list[int]]
) -> None:
    """Late: prefill-0 is another process afterwards."""
    plan, prompt = serving.plan(), turns[1]
    until_local(plan.url, prompt)
    before, known = counts(plan), serving.text().count(WHOLE_AGAIN)
    length = LONGEST - len(prompt) - 1
    with ThreadPoolExecutor() as pool:
        streams = [pool.submit(lines_of_stream, plan.url, prompt, length) for _ in range(4)]
        wait_until(lambda: open_on_decode(plan) >= 4, 20, "four streams are open")
        os.kill(serving.pid_of("prefill-0"), signal.SIGKILL)
        texts = [text_of(stream.result(timeout=120)) for stream in streams]
    assert len(set(texts)) == 1 and texts[0]
    wait_until(lambda: serving.text().count(WHOLE_AGAIN) > known, 60, "whole again")
    after = counts(plan)
    assert after["local"] - before["local"] == 4 and after["whole"] == after["recomputed"] == 0
    fresh = ask(plan.url, new_tokens(100))
    assert (fresh.outcome, fresh.prefill) == ("read", "prefill-0")
    assert until_local(plan.url, prompt).text


@pytest.mark.proof
def test_requests_without_a_decode_worker_are_503s_until_it_has_started_again(serving: ServeCommand) -> None:
    """The last one: decode-0 is another process afterwards. Dynamo 1.6.1 answers 500s at first, and then 404s."""
    url, ended, known = serving.plan().url, threading.Event(), serving.text().count(WHOLE_AGAIN)
    answers: list[list[tuple[int, Any]]] = [[] for _ in range(8)]

    def ask_on(its_answers: list[tuple[int, Any]]) -> None:
        prompt = new_tokens(8)
        while not ended.wait(0.01):
            its_answers.append(post(url, "/v1/completions", body(prompt, max_tokens=2)))

    with ThreadPoolExecutor(len(answers)) as pool:
        clients = [pool.submit(ask_on, one) for one in answers]
        try:
            wait_until(lambda: all(answers), 20, "each client has an answer")
            os.kill(serving.pid_of("decode-0"), signal.SIGKILL)
            wait_until(lambda: serving.text().count(WHOLE_AGAIN) > known, 60, "whole again")
        finally:
            ended.set()
    for client in clients:
        client.result()
    found = [answer for one in answers for answer in one]
    assert {status for status, _ in found} == {200, 503}
    sentences = [document["message"] for status, document in found if status == 503]
    assert any("no worker of the model is ready now" in sentence for sentence in sentences)
    assert ask(url, new_tokens(8)).text
