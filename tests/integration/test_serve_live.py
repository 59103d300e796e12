"""``trtx serve`` as a person runs it: real frontend, real workers of the paced engine, real signals."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import threading
import time
from pathlib import Path

import psutil
import pytest
from processes import HTTP, TRTX
from topology_clients import (
    PACED,
    Load,
    ServeCommand,
    nothing_left,
    open_streams,
    post,
    stream_once,
    trtx_serve,
    wait_until,
)

from trtx.launch.processes import members
from trtx.topology import Plan


def run_trtx(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [*TRTX, *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def listeners(plan: Plan) -> set[str]:
    """Addresses on which any process of the topology listens, TCP and UDP."""
    found = set()
    for pid in members(plan.marker, ()):
        for connection in psutil.Process(pid).net_connections("inet"):
            if connection.status == psutil.CONN_LISTEN or (connection.type == socket.SOCK_DGRAM and connection.laddr):
                found.add(connection.laddr.ip)
    return found


def assert_its_curl_works(serve: ServeCommand) -> None:
    """The command that the ready line shows, as a person pastes it."""
    curl = re.search(r"^curl .*?'$\n\n", serve.text(), re.DOTALL | re.MULTILINE)
    assert curl is not None, serve.text()
    answer = subprocess.run(curl.group(), shell=True, capture_output=True, text=True, timeout=30, check=True)
    assert json.loads(answer.stdout)["usage"]["completion_tokens"] > 0


def test_it_is_healthy_answers_its_curl_and_at_sigint_lets_every_stream_end_and_leaves_nothing() -> None:
    with trtx_serve(*PACED, "--mode", "disagg") as serve:
        plan = serve.wait_ready()
        assert_its_curl_works(serve)
        for worker in plan.workers:
            url = f"http://127.0.0.1:{worker.system_port}/health"
            wait_until(lambda url=url: HTTP.get(url, timeout=5).status_code == 200, 30, f"{worker.name} healthy")
        assert json.loads((plan.run_dir / "plan.json").read_text())["mode"] == "disagg"
        assert all(process.log_path.exists() for process in plan.processes)

        streams = []
        threads = [
            threading.Thread(target=lambda n=n: streams.append(stream_once(plan.url, plan.model, f"stream {n}", 100)))
            for n in range(8)
        ]
        for thread in threads:
            thread.start()
        wait_until(lambda: open_streams(plan.url) + len(streams) >= 8, 30, "the frontend has taken all of them")
        serve.process.send_signal(signal.SIGINT)
        for thread in threads:
            thread.join(timeout=30)
        assert serve.wait(40) == 130
        assert [stream.problem for stream in streams] == [None] * 8
        assert {stream.finish_reason for stream in streams} == {"length"}
        assert nothing_left(plan)


@pytest.mark.proof
def test_two_topologies_of_one_model_name_run_side_by_side_and_each_listens_where_it_was_told() -> None:
    """One is open to the network, with its HTTP port alone, the other on loopback, with what KV routing talks over."""
    opened = trtx_serve(*PACED, "--host", "0.0.0.0")
    with opened as first, trtx_serve(*PACED, "--mode", "disagg", "--router-mode", "kv") as second:
        plans = first.wait_ready(), second.wait_ready()
        assert stream_once(plans[1].url, plans[1].model, "hello", 4).is_good
        assert {"127.0.0.1"} <= listeners(plans[1]) <= {"127.0.0.1", "::1"}
        assert listeners(plans[0]) <= {"127.0.0.1", "::1", "0.0.0.0"}
        open_ports = [
            connection.laddr.port
            for pid in members(plans[0].marker, ())
            for connection in psutil.Process(pid).net_connections("tcp")
            if connection.status == psutil.CONN_LISTEN and connection.laddr.ip == "0.0.0.0"
        ]
        assert open_ports == [plans[0].port]
        assert "warning: HTTP listens on 0.0.0.0" in first.text()
        assert "warning: HTTP listens" not in second.text()

        first.process.send_signal(signal.SIGTERM)
        assert first.wait(30) == 143
        assert nothing_left(plans[0])
        assert stream_once(plans[1].url, plans[1].model, "still there", 5).is_good
        assert len(members(plans[1].marker, ())) >= 3


def test_a_second_sigint_kills_at_once() -> None:
    with trtx_serve(*PACED, "--set", "paced_itl_ms=150") as serve:
        plan = serve.wait_ready()
        assert_its_curl_works(serve)
        assert json.loads((plan.run_dir / "plan.json").read_text())["mode"] == "agg"
        with Load(plan.url, plan.model, 2, 400) as load:
            wait_until(lambda: open_streams(plan.url) == 2, 30, "two streams are open")
            load._stop.set()
            serve.process.send_signal(signal.SIGINT)
            wait_until(lambda: "stopping" in serve.text(), 30, "stopping")
            time.sleep(0.5)  # closer together, two would be one Ctrl-C that arrived twice
            assert serve.process.poll() is None
            serve.process.send_signal(signal.SIGINT)
            assert serve.wait(30) == 130  # the streams take a minute
            assert nothing_left(plan)


def test_kill_9_of_the_launcher_while_streaming_leaves_nothing() -> None:
    with trtx_serve(*PACED, "--mode", "disagg", "--prefill", "2") as serve:
        plan = serve.wait_ready()
        with Load(plan.url, plan.model, 8, 1000) as load:
            wait_until(lambda: open_streams(plan.url) == 8, 30, "eight streams are open")
            load._stop.set()
            os.killpg(serve.process.pid, signal.SIGKILL)
            wait_until(lambda: nothing_left(plan), 30, "no process and no file left")


def test_a_port_in_use_is_refused_before_anything_starts(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        refused = run_trtx("serve", "--engine", "paced", "--port", port, "-o", str(tmp_path))
    assert refused.returncode == 2
    assert f"port {port} on 127.0.0.1 is in use" in refused.stderr
    assert f"pid {os.getpid()}" in refused.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.proof  # its engines take 8 s of CPU to start
def test_dynamos_mocker_is_served_like_any_engine() -> None:
    with trtx_serve("--engine", "simulated", "--mode", "disagg", "--set", "speedup_ratio=1000") as serve:
        plan = serve.wait_ready()
        code, answer = post(plan.url, "/v1/completions", {"model": plan.model, "prompt": "hello", "max_tokens": 3})
        assert (code, answer["usage"]["completion_tokens"]) == (200, 3)
        assert plan.model == "tiny"
        assert answer["choices"][0]["text"].strip(), "ids of the mocker are not in the vocabulary"
        assert listeners(plan) <= {"127.0.0.1", "::1"}
        serve.process.send_signal(signal.SIGINT)
        assert serve.wait(40) == 130
