"""More clients than a topology can serve: the requests that it takes end whole, and the others are refused at once."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from served_records import check_queue
from topology_clients import ServeCommand, post, trtx_serve, wait_until

SLOTS = 8
QUEUED = 16
QUEUE_S = 3
TIMEOUT_S = 6
TOKENS = 40
BOUNDED = (
    *("--engine", "paced", "--set", "paced_itl_ms=5", "--set", "paced_ttft_ms=20", "--workers", "2"),
    *("--set", f"max_batch_size={SLOTS // 2}", "--router-mode", "least-loaded"),
    *("--max-queued-requests", str(QUEUED), "--max-queue-s", str(QUEUE_S), "--max-request-s", str(TIMEOUT_S)),
)


CLIENTS = Path(__file__).parents[2] / "benchmarks" / "overload_clients.py"


@contextlib.contextmanager
def clients(url: str, count: int, seconds: float) -> Iterator[subprocess.Popen[str]]:
    """Closed-loop clients that come back after ``Retry-After``, in a process of their own."""
    command = [sys.executable, str(CLIENTS), "--url", url, "--model", "tiny-trained", "--tokens", str(TOKENS)]
    command += ["--clients", str(count), "--seconds", str(seconds)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


def results(process: subprocess.Popen[str]) -> dict[str, Any]:
    """What the clients saw, once all have ended."""
    output, _ = process.communicate(timeout=180)
    document: dict[str, Any] = json.loads(output)
    return document


def kill_worker(serve: ServeCommand, name: str) -> None:
    os.kill(serve.pid_of(name), signal.SIGKILL)


def resident_bytes(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def queue(url: str) -> str:
    with urllib.request.urlopen(f"{url}/trtx/queue", timeout=10) as answer:
        assert answer.headers["Content-Type"] == "text/plain; version=0.0.4"
        return str(answer.read().decode())


def held_up(seen: dict[str, Any]) -> None:
    assert not seen["problems"], seen["problems"]
    assert seen["ttft"]["count"] > SLOTS
    assert set(seen["statuses"]) == {"529"}
    assert all(sentence.startswith("the server is overloaded: ") for sentence in seen["messages"]), seen["messages"]


def test_clients_beyond_the_bounds_are_refused_and_the_others_are_served_whole() -> None:
    with trtx_serve(*BOUNDED) as serve:
        url = serve.wait_ready().url
        endless = {"model": "tiny-trained", "prompt": "a", "max_tokens": 8000, "ignore_eos": True}
        with ThreadPoolExecutor(1) as pool:
            asked = pool.submit(post, url, "/v1/completions", endless)
            wait_until(lambda: "trtx_frontend_running_requests 1" in queue(url), 10, "the endless request runs")
            with clients(url, 3 * (SLOTS + QUEUED), 4) as loading:
                held_up(results(loading))
            status, answer = asked.result()
        assert status == 504 and f"took longer than {TIMEOUT_S} s" in answer["message"]
        check_queue(queue(url))


@pytest.mark.proof  # two minutes of load
def test_400_clients_on_8_slots_also_with_a_worker_that_is_killed(capsys: pytest.CaptureFixture[str]) -> None:
    with trtx_serve(*BOUNDED) as serve:
        url = serve.wait_ready().url
        with clients(url, 400, 10) as warming:  # memory of connections and threads
            held_up(results(warming))
        before = resident_bytes(serve.pid_of("frontend"))
        with clients(url, 400, 60) as loading:
            steady = results(loading)
        after = resident_bytes(serve.pid_of("frontend"))
        held_up(steady)
        with clients(url, 400, 60) as loading:
            time.sleep(10)
            kill_worker(serve, "agg-0")
            killed = results(loading)
        held_up(killed)
        wait_until(lambda: serve.text().count("agg-0 started") == 2, 60, "the worker is started again")
        with capsys.disabled():
            print(f"\nsteady: {steady}\nmemory of the frontend: {before >> 20} MiB, then {after >> 20} MiB")
            print(f"with kill -9: {killed}")
        assert after - before < 64 << 20
