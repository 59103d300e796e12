"""Faults while streaming: workers and launcher die, freeze and loop; what clients see, and what is left."""

from __future__ import annotations

import functools
import os
import random
import re
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest
from processes import HTTP, freeze
from topology_clients import PACED, Load, ServeCommand, Stream, nothing_left, stream_once, trtx_serve, wait_until

from trtx.topology import Plan

WHOLE = "the topology is whole again"


def bad_ones(streams: list[Stream]) -> list[str]:
    return [str(stream) for stream in streams if not stream.is_good]


@pytest.fixture(scope="module")
def two_of_each() -> Iterator[ServeCommand]:
    with trtx_serve(*PACED, "--mode", "disagg", "--prefill", "2", "--decode", "2") as serve:
        serve.wait_ready()
        yield serve


@pytest.fixture(scope="module")
def one_of_each() -> Iterator[ServeCommand]:
    with trtx_serve(*PACED, "--mode", "disagg") as serve:
        serve.wait_ready()
        yield serve


@pytest.fixture(scope="module")
def two_aggregated() -> Iterator[ServeCommand]:
    with trtx_serve(*PACED, "--workers", "2") as serve:
        serve.wait_ready()
        yield serve


def open_requests(plan: Plan) -> float:
    """Of all workers together, as they say themselves."""
    texts = [HTTP.get(f"http://127.0.0.1:{worker.system_port}/metrics").text for worker in plan.workers]
    return sum(float(found) for text in texts for found in re.findall(r"^trtx_open_requests\{.*\} (\S+)$", text, re.M))


@contextmanager
def until_whole_again(serve: ServeCommand) -> Iterator[None]:
    """What is done to a topology, which then is whole again by itself."""
    before = serve.text().count(WHOLE)
    yield
    wait_until(lambda: serve.text().count(WHOLE) > before, 40, "whole again")


@pytest.mark.parametrize("victim", ["decode-0", "prefill-1"])
def test_with_two_of_each_role_a_kill_cuts_no_stream_and_it_heals_by_itself(
    two_of_each: ServeCommand, victim: str
) -> None:
    serve, plan = two_of_each, two_of_each.wait_ready()
    with Load(plan.url, plan.model, 16, 40) as load:
        wait_until(lambda: len(load.streams) >= 16, 20, "16 streams ended")
        pid = serve.pid_of(victim)
        with until_whole_again(serve):
            deaths = serve.text().count(f"{victim} was killed by SIGKILL")
            os.kill(pid, signal.SIGKILL)
            wait_until(lambda: serve.text().count(f"{victim} was killed by SIGKILL") > deaths, 20, "the death noticed")
            noticed = time.monotonic()
        count = len(load.streams)
        wait_until(lambda: len(load.streams) >= count + 32, 30, "32 more streams ended")
        load.stop()
    bad = [stream for stream in load.streams if not stream.is_good]
    # Its records go when the launcher notices: what is routed there before that has nowhere to go (Dynamo 1.4.2 does
    # not try again where it can't connect). Nothing that had begun is lost, and nothing that came later fails.
    assert [str(stream) for stream in bad if stream.chunks or stream.began > noticed] == []
    assert len(bad) <= 2
    assert serve.pid_of(victim) != pid


@pytest.mark.parametrize("victim", ["decode-1", "prefill-0"])
def test_requests_right_after_an_idle_workers_death_find_the_other_one(two_of_each: ServeCommand, victim: str) -> None:
    serve, plan = two_of_each, two_of_each.wait_ready()
    with ThreadPoolExecutor(64) as clients, until_whole_again(serve):
        waiting = []
        os.kill(serve.pid_of(victim), signal.SIGKILL)
        for number in range(40):
            waiting.append(clients.submit(stream_once, plan.url, plan.model, f"request {number}", 5))
            time.sleep(0.01)
        # Records go some milliseconds after the death; a request routed in between has nowhere to go.
        assert len(bad_ones([stream.result() for stream in waiting])) <= 1


@pytest.mark.proof  # a third topology; the pair above does it too
def test_an_agg_worker_of_two_dies_and_its_streams_go_on_at_the_other(two_aggregated: ServeCommand) -> None:
    serve, plan = two_aggregated, two_aggregated.wait_ready()
    with Load(plan.url, plan.model, 16, 60) as load:
        wait_until(lambda: open_requests(plan) == 16, 30, "16 streams are open")
        with until_whole_again(serve):
            os.kill(serve.pid_of("agg-0"), signal.SIGKILL)
        load.stop()
    assert bad_ones(load.streams) == []


@pytest.mark.proof  # a second topology
@pytest.mark.parametrize("victim", ["frontend", "decode-0", "prefill-0"])
def test_with_one_of_each_role_it_serves_again_after_a_kill(one_of_each: ServeCommand, victim: str) -> None:
    plan = one_of_each.wait_ready()
    with until_whole_again(one_of_each):
        os.kill(one_of_each.pid_of(victim), signal.SIGKILL)
    wait_until(lambda: stream_once(plan.url, plan.model, "hello again", 3).is_good, 15, "a good request")


@pytest.mark.proof  # it takes a deadline's seconds
def test_a_worker_frozen_past_the_discovery_deadline_is_restarted(two_aggregated: ServeCommand) -> None:
    serve, plan = two_aggregated, two_aggregated.wait_ready()
    pid = serve.pid_of("agg-1")
    with until_whole_again(serve):
        freeze(pid)
        wait_until(lambda: "its discovery records are gone" in serve.text(), 40, "the frozen worker noticed")
    assert serve.pid_of("agg-1") != pid
    assert all(stream_once(plan.url, plan.model, f"request {n}", 3).is_good for n in range(4))


def test_a_crash_loop_stops_the_topology_with_exit_4(two_of_each: ServeCommand) -> None:
    """Last of this topology. Its decode-1 has died at most once before, in this minute or earlier."""
    serve, plan = two_of_each, two_of_each.wait_ready()
    killed: set[int] = set()

    def kill_the_next() -> bool:
        if (pid := serve.pid_of("decode-1")) not in killed:
            killed.add(pid)
            os.kill(pid, signal.SIGKILL)
        return serve.process.poll() is not None

    wait_until(kill_the_next, 60, "the crash loop noticed")
    assert serve.wait(1) == 4
    assert 4 <= len(killed) <= 5
    assert "decode-1 died 5 times" in serve.text()
    assert nothing_left(plan)


def test_a_worker_that_cannot_start_is_reported_with_its_log_and_exit_4() -> None:
    # Valid as a field, refused by the engine alone.
    with trtx_serve("--engine", "paced", "--set", "paced_itl_ms=-3") as serve:
        assert serve.wait(90) == 4, serve.text()
        assert "before it was up; log: " in serve.text()


@pytest.mark.proof
def test_two_minutes_of_random_kills_fail_no_request() -> None:
    seed = 20261121
    dice = random.Random(seed)
    with trtx_serve(*PACED, "--mode", "disagg", "--prefill", "2", "--decode", "2") as serve:
        plan = serve.wait_ready()
        kills = 0
        end = time.monotonic() + 120
        with Load(plan.url, plan.model, 64, 40) as load:
            while time.monotonic() < end:
                time.sleep(dice.uniform(1.0, 3.0))
                victim = dice.choice(("prefill-0", "prefill-1", "decode-0", "decode-1"))
                os.kill(serve.pid_of(victim), signal.SIGKILL)
                kills += 1
                is_whole = functools.partial(lambda count: serve.text().count("whole again") >= count, kills)
                wait_until(is_whole, 30, f"whole after kill {kills}")
                time.sleep(dice.uniform(10.0, 16.0))  # five deaths of one process in a minute are a crash loop
            load.stop()
        bad = bad_ones(load.streams)
        assert kills >= 6
        assert not bad, f"seed {seed}, {kills} kills, {len(bad)} of {len(load.streams)} streams failed: {bad[:5]}"
