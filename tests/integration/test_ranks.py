"""``trtx serve --tp``: the answers of the model, and a rank that dies while requests stream."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator

import psutil
import pytest
import torch
from topology_clients import Load, ServeCommand, post, trtx_serve, wait_until
from transformers import AutoModelForCausalLM

from trtx.checkpoint import resolve_checkpoint
from trtx.text import load_tokenizer

PROMPT = [17, 900, 3, 4000, 256, 77, 1023]
WHOLE = "the topology is whole again"


def rank_pids(serve: ServeCommand, worker: str) -> list[int]:
    """Of the ranks besides rank 0."""
    below = psutil.Process(serve.pid_of(worker)).children(recursive=True)
    return [process.pid for process in below if "trtx.torch_engine.ranks.process" in process.cmdline()]


def listening(serve: ServeCommand, worker: str) -> list[str]:
    """The addresses at which the processes below a worker listen."""
    return [
        connection.laddr.ip
        for process in psutil.Process(serve.pid_of(worker)).children(recursive=True)
        for connection in process.net_connections("inet")
        if connection.status == psutil.CONN_LISTEN
    ]


def kill_a_rank(serve: ServeCommand, worker: str) -> int:
    (pid,) = rank_pids(serve, worker)
    os.kill(pid, signal.SIGKILL)
    return pid


@pytest.fixture(scope="module")
def expected() -> str:
    """The model's own greedy text."""
    path = resolve_checkpoint("synthetic:tiny").path
    model = AutoModelForCausalLM.from_pretrained(str(path), dtype=torch.float32).eval()
    ids = torch.tensor([PROMPT])
    out = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=12, do_sample=False, eos_token_id=None
    )
    return load_tokenizer(path).decode(out[0, len(PROMPT) :].tolist())


@pytest.fixture(scope="module")
def served() -> Iterator[ServeCommand]:
    with trtx_serve("--model", "synthetic:tiny", "--tp", "2") as serve:
        serve.wait_ready(120)
        yield serve


def test_two_ranks_answer_as_the_model_does_and_after_a_kill_of_one_again(served: ServeCommand, expected: str) -> None:
    plan = served.plan()
    body = {"model": plan.model, "prompt": PROMPT, "max_tokens": 12, "temperature": 0, "ignore_eos": True}

    def answer() -> str:
        status, found = post(plan.url, "/v1/completions", body)
        assert status == 200, found
        return str(found["choices"][0]["text"])

    assert answer() == expected
    assert all(address in ("127.0.0.1", "::1") for address in listening(served, "agg-0"))
    worker, pid = served.pid_of("agg-0"), kill_a_rank(served, "agg-0")
    wait_until(lambda: WHOLE in served.text(), 120, "whole again")
    assert f"rank 1 ended: pid {pid}, exit code -9" in served.text()
    assert served.pid_of("agg-0") != worker
    assert answer() == expected


@pytest.mark.proof
def test_a_killed_rank_of_one_of_two_workers_cuts_no_stream() -> None:
    with trtx_serve("--model", "synthetic:tiny", "--tp", "2", "--workers", "2") as serve:
        plan = serve.wait_ready(180)
        with Load(plan.url, plan.model, 6, 60) as load:
            wait_until(lambda: len(load.streams) >= 6, 60, "6 streams ended")
            kill_a_rank(serve, "agg-0")
            wait_until(lambda: "agg-0 exited" in serve.text(), 30, "the death noticed")
            noticed = time.monotonic()
            wait_until(lambda: WHOLE in serve.text(), 120, "whole again")
            count = len(load.streams)
            wait_until(lambda: len(load.streams) >= count + 12, 60, "12 more streams ended")
            load.stop()
        bad = [stream for stream in load.streams if not stream.is_good]
        assert [str(stream) for stream in bad if stream.chunks or stream.began > noticed] == []
