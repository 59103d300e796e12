"""``trtx serve`` with workers of several ranks: the model's answers, handed off between them, and a rank that dies."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator

import psutil
import pytest
import torch
from processes import HTTP
from prometheus_client.parser import text_string_to_metric_families
from topology_clients import Load, ServeCommand, post, trtx_serve, wait_until
from transformers import AutoModelForCausalLM

from trtx.checkpoint import resolve_checkpoint
from trtx.text import load_tokenizer

MODEL = "synthetic:tiny-moe"
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


def worker_values(serve: ServeCommand, worker: str) -> dict[str, float]:
    """The values of a worker's families, by name, with the label ``of`` if the family has it."""
    port = next(one.system_port for one in serve.plan().workers if one.name == worker)
    return {
        f"{sample.name}:{sample.labels['of']}" if "of" in sample.labels else sample.name: sample.value
        for family in text_string_to_metric_families(HTTP.get(f"http://127.0.0.1:{port}/metrics", timeout=10).text)
        for sample in family.samples
        if sample.name.startswith("trtx_")
    }


def kill_a_rank(serve: ServeCommand, worker: str) -> int:
    (pid,) = rank_pids(serve, worker)
    os.kill(pid, signal.SIGKILL)
    return pid


@pytest.fixture(scope="module")
def expected() -> str:
    """The model's own greedy text."""
    path = resolve_checkpoint(MODEL).path
    model = AutoModelForCausalLM.from_pretrained(str(path), dtype=torch.float32).eval()
    ids = torch.tensor([PROMPT])
    out = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=12, do_sample=False, eos_token_id=None
    )
    return load_tokenizer(path).decode(out[0, len(PROMPT) :].tolist())


@pytest.fixture(scope="module")
def served() -> Iterator[ServeCommand]:
    """A prefill worker of two ranks, which hold different experts, and a decode worker of one."""
    sizes = [f"prefill.{name}_parallel_size=2" for name in ("tensor", "moe_expert")]
    with trtx_serve("--model", MODEL, "--mode", "disagg", "--set", sizes[0], "--set", sizes[1]) as serve:
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
    assert all(address in ("127.0.0.1", "::1") for address in listening(served, "prefill-0"))
    worker, pid = served.pid_of("prefill-0"), kill_a_rank(served, "prefill-0")
    wait_until(lambda: WHOLE in served.text(), 120, "whole again")
    assert f"rank 1 ended: pid {pid}, exit code -9" in served.text()
    assert served.pid_of("prefill-0") != worker
    assert answer() == expected


def test_kv_goes_from_two_ranks_to_one_and_no_prompt_is_computed_again(served: ServeCommand) -> None:
    plan = served.plan()
    before = worker_values(served, "decode-0")
    body = {"model": plan.model, "prompt": [5, *PROMPT * 9], "max_tokens": 4, "temperature": 0, "ignore_eos": True}
    status, found = post(plan.url, "/v1/completions", body)
    assert status == 200, found
    after = worker_values(served, "decode-0")
    assert after["trtx_handoff_reads_total"] == before["trtx_handoff_reads_total"] + 1
    assert after["trtx_recomputed_prefixes_total"] == before["trtx_recomputed_prefixes_total"]


def test_a_worker_shows_the_load_of_its_experts_and_of_their_ranks(served: ServeCommand) -> None:
    plan = served.plan()
    body = {"model": plan.model, "prompt": PROMPT, "max_tokens": 1, "temperature": 0}

    def imbalances() -> list[float | None]:
        assert post(plan.url, "/v1/completions", body)[0] == 200
        values = worker_values(served, "prefill-0")
        return [values.get(f"trtx_expert_imbalance:{of}") for of in ("expert", "rank")]

    wait_until(lambda: None not in imbalances(), 30, "the load of experts")
    expert, rank = imbalances()
    assert expert is not None
    assert rank is not None
    assert 1 <= rank <= 2
    assert rank <= expert <= 8
    assert worker_values(served, "prefill-0")["trtx_expert_tokens_total"] >= len(PROMPT)


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
