"""``trtx sleep``, ``wake`` and ``update`` on a served topology: prefill and decode workers on the torch engine."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from called import call
from processes import HTTP, until
from safetensors.torch import load_file, save_file
from topology_clients import ServeCommand, nothing_left, post, stream_once, trtx_serve, wait_until

from trtx.checkpoint import resolve_checkpoint
from trtx.topology import Plan

OPTIONS = (
    "--model", "synthetic:tiny", "--engine", "torch", "--mode", "disagg", "--router-mode", "kv",
    "--set", "sleep_config={}", "--set", "max_seq_len=512", "--set", "max_batch_size=8",
    "--set", "kv_cache_config={tokens_per_block: 16, max_tokens: 8192}",
)  # fmt: skip


@pytest.fixture(scope="module")
def served() -> Iterator[tuple[ServeCommand, Plan]]:
    with trtx_serve(*OPTIONS) as serve:
        yield serve, serve.wait_ready(90)


@pytest.fixture
def plan(served: tuple[ServeCommand, Plan]) -> Plan:
    return served[1]


def answer(plan: Plan) -> dict[str, Any]:
    body = {"model": plan.model, "prompt": "the quick brown fox " * 12, "max_tokens": 8, "temperature": 0}
    code, document = post(plan.url, "/v1/completions", body)
    assert code == 200, document
    return document


def trtx(verb: str, plan: Plan, *arguments: str) -> tuple[int, str]:
    """Exit code of ``trtx VERB RUN ARGUMENTS``, and what it printed."""
    done = call(verb, str(plan.run_dir), *arguments, columns=1000)
    return done.code, done.out + done.err


def text(plan: Plan) -> str:
    return str(answer(plan)["choices"][0]["text"])


def is_routed(plan: Plan) -> bool:
    return post(plan.url, "/v1/completions", {"model": plan.model, "prompt": "x", "max_tokens": 1})[0] == 200


def states(plan: Plan) -> list[str]:
    return [json.loads(worker.status_file.read_text())["state"] for worker in plan.workers if worker.status_file]


def test_a_topology_sleeps_after_its_open_requests_answers_503_and_wakes_with_the_same_answers(plan: Plan) -> None:
    expected = text(plan)
    code, printed = trtx("wake", plan)
    assert code == 2 and "the engine is not asleep, so there is nothing to wake" in printed
    streams: list[Any] = []
    threads = [
        threading.Thread(target=lambda n=n: streams.append(stream_once(plan.url, plan.model, f"stream {n}", 60)))
        for n in range(4)
    ]
    for thread in threads:
        thread.start()
    (decode,) = [worker for worker in plan.workers if worker.role == "decode"]
    open_requests = re.compile(r"^trtx_open_requests\{.*\} (\d+)", re.MULTILINE)

    def num_decoding() -> int:
        found = open_requests.search(HTTP.get(f"http://127.0.0.1:{decode.system_port}/metrics").text)
        return int(found[1]) if found is not None else 0

    # A request that has not reached its workers when they leave routing is answered with 503.
    until("all decode, or have ended", lambda: num_decoding() + len(streams) >= len(threads))
    code, printed = trtx("sleep", plan)
    assert code == 0, printed
    assert printed.splitlines() == [
        f"{worker.name} sleeps: kv_cache, model_weights released" for worker in plan.workers
    ]
    for thread in threads:
        thread.join(timeout=30)
    assert [stream.problem for stream in streams] == [None] * 4
    assert states(plan) == ["asleep", "asleep"]
    code, refused = post(plan.url, "/v1/completions", {"model": plan.model, "prompt": "x", "max_tokens": 1})
    assert code == 503 and f"run trtx wake with the run directory {plan.run_dir.name}" in refused["message"]
    assert trtx("sleep", plan)[0] == 0
    code, printed = trtx("wake", plan)
    assert code == 0, printed
    assert sorted(printed.splitlines()) == [
        f"{worker.name} is awake" for worker in sorted(plan.workers, key=lambda one: one.name)
    ]
    wait_until(lambda: is_routed(plan), 30, "routing")
    document = answer(plan)
    assert document["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    assert document["choices"][0]["text"] == expected
    assert states(plan) == ["serving", "serving"]


def test_new_weights_answer_after_an_update_and_other_shapes_are_refused(plan: Plan, tmp_path: Path) -> None:
    expected = text(plan)
    model = resolve_checkpoint("synthetic:tiny").path
    other = Path(shutil.copytree(model, tmp_path / "other"))
    weights = load_file(other / "model.safetensors")
    save_file({name: value.flip(0).contiguous() for name, value in weights.items()}, other / "model.safetensors")
    code, printed = trtx("update", plan, str(other))
    assert code == 0, printed
    assert printed.splitlines() == [f"{worker.name} has the weights of {other}" for worker in plan.workers]
    assert text(plan) != expected
    code, printed = trtx("update", plan, "synthetic:tiny-trained")
    assert code == 2 and "differ from the loaded model's: its vocab_size is" in printed
    assert states(plan) == ["serving", "serving"]
    assert trtx("update", plan, str(model))[0] == 0
    assert text(plan) == expected


def test_a_worker_of_two_ranks_sleeps_wakes_and_refuses_weights_that_are_bad_for_one_of_them(tmp_path: Path) -> None:
    sizes = ("--set", "kv_cache_config={tokens_per_block: 16, max_tokens: 8192}", "--set", "max_seq_len=512")
    with trtx_serve("--model", "synthetic:tiny", "--tp", "2", "--set", "sleep_config={}", *sizes) as serve:
        plan = serve.wait_ready(120)
        expected = text(plan)
        assert trtx("sleep", plan) == (0, "agg-0 sleeps: kv_cache, model_weights released\n")
        assert trtx("wake", plan) == (0, "agg-0 is awake\n")
        wait_until(lambda: is_routed(plan), 30, "routing")
        assert text(plan) == expected
        model = resolve_checkpoint("synthetic:tiny").path
        other = Path(shutil.copytree(model, tmp_path / "other"))
        weights = {name: value.flip(0).contiguous() for name, value in load_file(model / "model.safetensors").items()}
        weights["model.layers.0.mlp.down_proj.weight"][0, -1] = float("nan")  # the last columns are rank 1's
        save_file(weights, other / "model.safetensors")
        code, printed = trtx("update", plan, str(other))
        assert code == 2 and "rank 1: the weights of" in printed and "infinite or not a number" in printed
        assert text(plan) == expected
        weights["model.layers.0.mlp.down_proj.weight"][0, -1] = 0.5
        save_file(weights, other / "model.safetensors")
        assert trtx("update", plan, str(other)) == (0, f"agg-0 has the weights of {other}\n")
        assert text(plan) != expected
        assert states(plan) == ["serving"]


def test_the_launcher_keeps_a_sleeping_topology_and_leaves_nothing_when_it_is_killed(
    served: tuple[ServeCommand, Plan],
) -> None:
    serve, plan = served
    assert trtx("sleep", plan, "--tags", "kv_cache")[0] == 0
    until("the launcher says so", lambda: serve.text().count("has left routing") >= len(plan.workers))
    assert "vanished" not in serve.text() and "started again" not in serve.text()
    engines = [
        json.loads(worker.status_file.read_text())["engine_pid"] for worker in plan.workers if worker.status_file
    ]
    os.kill(serve.process.pid, signal.SIGKILL)
    serve.wait(10)
    wait_until(lambda: nothing_left(plan), 20, "nothing left")
    assert not any(psutil.pid_exists(pid) for pid in engines)
