"""``trtx bench --url`` against another make's server that wants a key: it is measured, and the key stays unwritten."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from called import Done, call
from other_server import CHAT, VLLM, dynamo, other_server

KEY = "sk-trtx-5d0c6f1e9a"
LOAD = ["--concurrency", "2", "--isl", "32", "--osl", "8", "--request-count", "6", "--warmup-request-count", "2"]
LOAD += ["--prompt-corpus", "random"]  # which aiperf makes in less time


def bench(url: str, parent: Path, key: str | None) -> Done:
    arguments = ["bench", "--url", url, "--tokenizer", "synthetic:tiny", *LOAD, "-o", str(parent)]
    return call(*arguments, variables={"OPENAI_API_KEY": key})


def command_lines() -> list[bytes]:
    """Of every process that runs now."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            found.append(path.read_bytes())
        except OSError:  # ended since the listing
            continue
    return found


@pytest.mark.parametrize("key", [None, "sk-wrong"])
def test_a_server_that_wants_another_key_costs_one_sentence_and_no_run(key: str | None, tmp_path: Path) -> None:
    with other_server(VLLM, key=KEY) as server:
        done = bench(server.url, tmp_path / "runs", key)
    (said,) = done.err.splitlines()
    assert done.code == 2 and "API key" in said and "OPENAI_API_KEY" in said
    assert not (tmp_path / "runs").exists()


def test_a_body_is_held_against_what_dynamos_frontend_takes_where_that_answers(tmp_path: Path) -> None:
    hot = ["--url", "URL", "--tokenizer", "synthetic:tiny", "--temperature", "5", "--concurrency", "1", "--isl", "64"]
    for documents, dry, code in ((dynamo("cpu", aggregated=1), [], 2), (VLLM, ["--dry-run"], 0)):
        with other_server(documents) as server:
            url_for = [server.url if word == "URL" else word for word in hot]
            done = call("bench", *url_for, *dry, "-o", str(tmp_path / "runs"))
        assert done.code == code, done.err
        assert ("temperature is 5.0, but Dynamo's frontend" in done.err) is (code == 2)
    assert not (tmp_path / "runs").exists()


def test_prompts_shorter_than_the_template_of_the_served_model_are_refused_whoever_serves_it(tmp_path: Path) -> None:
    with other_server(VLLM) as server:
        done = call("bench", "--url", server.url, "--tokenizer", "synthetic:tiny", "--isl", "12", "-o", str(tmp_path))
    assert done.code == 2 and "isl 12 is shorter than any request of tiny" in done.err
    assert not any(tmp_path.iterdir())


def test_another_makers_server_is_measured_and_its_key_is_written_nowhere(tmp_path: Path) -> None:
    """Not where one answer has the key in it either: the last of 2 for warm-up and 6 that are measured."""
    seen: list[bytes] = []
    with other_server(VLLM, key=KEY, on_chat=lambda: seen.extend(command_lines()), gives_back=8) as server:
        done = bench(server.url, tmp_path / "runs", KEY)
    assert done.code == 1, done.err
    assert "1 of 6 failed: HTTP 401 Incorrect API key provided: Bearer [redacted]" in done.err
    assert KEY not in done.out + done.err
    chats = [authorization for path, authorization in server.seen if path == CHAT and authorization is not None]
    assert len(chats) >= 8 and set(chats) == {f"Bearer {KEY}"}
    assert any(b"aiperf" in line for line in seen), "looked at while the load was made"
    assert not [line for line in seen if KEY.encode() in line]

    (run_dir,) = (tmp_path / "runs").iterdir()
    files = [path for path in run_dir.rglob("*") if path.is_file()]
    assert len(files) > 10
    assert not [path for path in files if KEY.encode() in path.read_bytes()]

    summary: dict[str, Any] = json.loads((run_dir / "summary.json").read_text())
    (row,) = summary["rows"]
    assert (row["request_count"], row["error_request_count"]) == (5, 1) and row["output_token_throughput"] > 0
    assert row["output_token_throughput_per_worker"] is None, "nobody said how many workers there are"
    assert "model" not in row["not_checked"], "each answer names the one that was asked"
    told = {name: summary["conditions"][name] for name in ("Server", "Server's workers", "Server's GPUs", "API key")}
    assert told == {
        "Server": "vLLM 0.19.1", "Server's workers": "not known", "Server's GPUs": "not known",
        "API key": "asked for and sent",
    }  # fmt: skip
    lock = yaml.safe_load((run_dir / "run.lock.yaml").read_text())
    deployment = lock["provenance"]["environment"]["deployment"]
    assert (deployment["url"], deployment["workers"], deployment["gpu_count"]) == (server.url, None, None)
    assert deployment["api_key_from"] == "OPENAI_API_KEY"


@pytest.mark.proof  # a run of its own
def test_answers_that_name_another_model_are_told_in_each_form(tmp_path: Path) -> None:
    with other_server(VLLM, names="tiny-2-\x1b[2J" + "x" * 5000) as server:
        done = bench(server.url, tmp_path / "runs", None)
    assert done.code == 0, done.err
    assert "answers name model 'tiny-2- [2Jxxx" in " ".join(done.out.split()) and "\x1b" not in done.out
    (run_dir,) = (tmp_path / "runs").iterdir()
    (validity,) = json.loads((run_dir / "summary.json").read_text())["validity"].values()
    (reason,) = [one for one in validity["reasons"] if one["name"] == "model"]
    assert reason["level"] == "SUSPECT" and len(reason["sentence"]) < 150
    assert reason["sentence"].endswith("', but 'tiny' was requested")
    for form in ("summary.md", "report.html", "junit.xml"):
        assert "tiny-2- [2J" in (run_dir / form).read_text(), form


@pytest.mark.proof  # a run of its own
def test_a_server_that_sends_its_requests_on_is_refused_and_nobody_is_measured_in_its_place(tmp_path: Path) -> None:
    """Neither where it does so only once it is measured, to a server that would answer all."""
    with other_server(VLLM, key=KEY) as elsewhere:
        sends_on = {CHAT: (307, f"{elsewhere.url}{CHAT}?token=secret")}
        with other_server(VLLM, sends_on=sends_on) as server:
            done = bench(server.url, tmp_path / "runs", KEY)
        (said,) = done.err.splitlines()
        assert done.code == 2 and f"answers with HTTP 307: it redirects to {elsewhere.url}{CHAT}, and trtx" in said
        assert "secret" not in said and not (tmp_path / "runs").exists()
        with other_server(VLLM, key=KEY, sends_on=sends_on, sends_on_probes=False) as server:
            done = bench(server.url, tmp_path / "runs", KEY)
        assert done.code == 1
        assert f"6 of 6 failed: HTTP 307 it redirects to {elsewhere.url}{CHAT}, and trtx follows no r" in done.err
        assert not elsewhere.seen
