"""Several frontends of one topology: each by itself, so that one that dies takes its own streams along and no more."""

from __future__ import annotations

import os
import secrets
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from processes import HTTP, freeze
from topology_clients import PACED, ServeCommand, open_streams, post, stream_once, trtx_serve, wait_until

from trtx.bench.body_ranges import RANGES

WHOLE = "the topology is whole again"
_PREDICTED_S = 0.3
_BLOCK = "one two three four five six seven eight nine ten eleven twelve "


@pytest.fixture(scope="module")
def two_frontends() -> Iterator[ServeCommand]:
    with trtx_serve(*PACED, "--workers", "2", "--frontends", "2", "--router-mode", "kv") as serve:
        serve.wait_ready()
        yield serve


def test_both_answer_and_each_counts_every_worker(two_frontends: ServeCommand) -> None:
    plan = two_frontends.wait_ready()
    assert len(plan.urls) == 2 and len(set(plan.urls)) == 2
    for url in plan.urls:
        assert stream_once(url, plan.model, "hello", 3).is_good
        ready = HTTP.get(f"{url}/v1/models/{plan.model}/ready").json()
        counts = ready["namespaces"][plan.namespace]["worker_types"]
        assert counts["aggregated"]["workers"] == 2


@pytest.mark.parametrize("name", RANGES)
def test_the_frontend_takes_what_is_within_a_range_and_refuses_what_is_beyond(
    two_frontends: ServeCommand, name: str
) -> None:
    """``trtx bench`` checks the body of a load against these ranges."""
    asked, plan = RANGES[name], two_frontends.wait_ready()

    def status(value: object) -> int:
        body = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 2, name: value}
        return post(plan.url, "/v1/chat/completions", {"model": plan.model, **body})[0]

    step = 1 if asked.is_whole else 1e-3
    low, high = (int(asked.low), int(asked.high)) if asked.is_whole else (asked.low, asked.high)
    lowest = low + 0.01 if asked.is_open else low
    for value in (lowest, high):
        assert asked.holds(value) and status(value) == 200, value
    for value in (low if asked.is_open else low - step, high + step, True, "x", *([1.5] if asked.is_whole else [])):
        assert not asked.holds(value) and status(value) == 400, value
    assert status(None) == 200


def test_a_killed_one_loses_its_own_streams_alone_and_comes_again_while_the_other_serves(
    two_frontends: ServeCommand,
) -> None:
    serve, plan = two_frontends, two_frontends.wait_ready()
    lost, kept = plan.urls
    before = serve.text().count(WHOLE)
    with ThreadPoolExecutor(12) as clients:
        # At 20 ms a token all are open for longer than a frontend needs to come again.
        dying = [clients.submit(stream_once, lost, plan.model, f"lost {n}", 250) for n in range(4)]
        living = [clients.submit(stream_once, kept, plan.model, f"kept {n}", 250) for n in range(4)]
        wait_until(lambda: open_streams(lost) == open_streams(kept) == 4, 20, "four open streams at each")
        pid = serve.pid_of("frontend-0")
        os.kill(pid, signal.SIGKILL)
        while serve.text().count(WHOLE) == before:  # what begins meanwhile at the other is answered
            assert stream_once(kept, plan.model, f"meanwhile {time.monotonic()}", 2).is_good
        assert [stream.result().is_good for stream in dying] == [False] * 4
        assert [str(stream.result()) for stream in living if not stream.result().is_good] == []
    assert serve.pid_of("frontend-0") != pid
    for url in plan.urls:
        assert stream_once(url, plan.model, "hello again", 3).is_good
    assert [name for name in ("frontend-1", "agg-0", "agg-1") if serve.text().count(f"{name} started, pid") > 1] == []


def cached_tokens(url: str, model: str, prompt: str) -> int:
    body = {"model": model, "prompt": prompt, "max_tokens": 2, "ignore_eos": True, "temperature": 0.0}
    code, answer = post(url, "/v1/completions", body)
    assert code == 200, answer
    details = answer["usage"].get("prompt_tokens_details") or {}
    return int(details.get("cached_tokens") or 0)


@pytest.mark.proof
def test_what_either_router_knows_of_caches_it_knows_without_the_others_broker() -> None:
    # A router that predicted for long where a prefix is would find it without any event.
    shortly = ("--router-args", f"--router-predicted-ttl-secs {_PREDICTED_S}")
    with trtx_serve("--workers", "4", "--frontends", "2", "--router-mode", "kv", *shortly) as serve:
        plan = serve.wait_ready(120)

        def are_found(asked: str, found_by: str) -> bool:
            """Of prompts that one frontend saw first, the other sends each to the worker that has it: one of four."""
            prompts = [f"{secrets.token_hex(8)} {_BLOCK * 12}" for _ in range(6)]
            for prompt in prompts:
                cached_tokens(asked, plan.model, prompt)
            time.sleep(2 * _PREDICTED_S)  # longer than the router predicts, and events are on their way meanwhile
            return all(cached_tokens(found_by, plan.model, prompt) > 0 for prompt in prompts)

        first, second = plan.urls
        wait_until(lambda: are_found(first, second), 20, "found across")
        wait_until(lambda: are_found(second, first), 20, "found across, the other way")
        freeze(serve.pid_of("frontend-0"))  # its broker hands on nothing, and holds every connection
        try:
            wait_until(lambda: are_found(second, second), 8, "found with the other broker gone")
        finally:
            os.kill(serve.pid_of("frontend-0"), signal.SIGCONT)
