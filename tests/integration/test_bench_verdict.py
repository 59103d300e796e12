"""What ``trtx bench`` says of answers that are not whole, with real aiperf: each with its reason, and exit 1."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import urllib.request
import xml.etree.ElementTree as ElementTree
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from called import Done, call
from hostile_server import ANSWERS, OSL, hostile_server
from processes import TRTX
from recomputed_run import assert_recomputed
from topology_clients import wait_until

from trtx.topology import Plan

COUNT = len(ANSWERS)
RANDOM = ["--prompt-corpus", "random"]  # which aiperf makes in less time
EXPECTED = Counter(answer.reason for answer in ANSWERS.values() if answer.reason is not None)


@pytest.fixture(scope="module")
def hostile(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, Done]]:
    parent = tmp_path_factory.mktemp("runs")
    load = ["--concurrency", "2", "--request-count", str(COUNT), "--warmup-request-count", "0", *RANDOM]
    attach = ["--tokenizer", "synthetic:tiny", "--isl", "64", "--osl", str(OSL)]
    with hostile_server() as url:
        done = call("bench", "--url", url, *attach, *load, "-o", str(parent), columns=80)
    (run_dir,) = parent.iterdir()
    yield run_dir, done


def test_a_failed_request_is_exit_1_with_the_reasons_in_one_sentence(
    hostile: tuple[Path, Done],
) -> None:
    done = hostile[1]
    assert done.code == 1, done.out + done.err
    verdict = next(line for line in done.err.splitlines() if line.startswith("trtx: "))
    most, count = EXPECTED.most_common(1)[0]
    assert verdict.startswith(f"trtx: {EXPECTED.total()} of {COUNT} failed: {count} × {most}; ")
    assert verdict.endswith("× other reasons (attached-c2); expected none") and len(verdict) < 1000
    assert "╭" not in done.err


def test_every_reason_is_told_with_its_count(hostile: tuple[Path, Done]) -> None:
    run_dir, done = hostile
    failures = json.loads((run_dir / "summary.json").read_text())["failures"]
    found = Counter[str]()
    for entry in failures["attached-c2"]:
        (reason,) = [reason for reason in EXPECTED if entry["reason"].startswith(reason)] or [entry["reason"]]
        found[reason] += entry["count"]
    others = found.pop("other reasons", 0)
    assert found.total() + others == EXPECTED.total() and not found - EXPECTED
    table = done.out[: done.out.rindex("\n", 0, -1)]  # without the report's path
    assert f"attached-c2: {EXPECTED.total()} of {COUNT} failed" in table and "1 × HTTP 404 model not found" in table
    assert all(len(line) <= 80 for line in table.splitlines())
    suite = ElementTree.parse(run_dir / "junit.xml").getroot()
    (row,) = json.loads((run_dir / "summary.json").read_text())["rows"]
    invalid = int(row["validity"] == "INVALID")  # as on a machine with too much else to do
    assert (suite.get("failures"), suite.get("errors")) == ("1", str(invalid))
    failure = suite.find("testcase/failure")
    assert failure is not None and "1 × HTTP 404 model not found" in (failure.get("message") or "")


def test_figures_come_from_whole_answers_alone_and_are_never_zero(
    hostile: tuple[Path, Done],
) -> None:
    run_dir = hostile[0]
    (broken,) = json.loads((run_dir / "summary.json").read_text())["rows"]
    assert broken["request_count"] == broken["time_to_first_token_count"] == COUNT - EXPECTED.total()
    assert broken["uncounted_request_count"] == 1
    assert broken["output_token_throughput"] is None  # one whole answer carries no usage
    theirs = json.loads((run_dir / "cells/attached-c2/trial-01/profile_export_aiperf.json").read_text())
    assert theirs["request_count"]["avg"] == broken["request_count"]
    assert "exact" not in json.loads((run_dir / "summary.json").read_text())["conditions"]["ISL / OSL"]
    assert_recomputed(run_dir)


def worker_of(parent: Path) -> dict[str, Any] | None:
    """The status of the run's one worker while it serves."""
    for path in parent.glob("*/agg/serve/status/agg-0*"):
        status: dict[str, Any] = json.loads(path.read_text())
        if status["state"] == "serving":
            return status
    return None


def counted(parent: Path, name: str) -> float:
    (path,) = parent.glob("*/plan.json")
    plan = Plan.from_json(json.loads(path.read_text())["topologies"]["agg"])
    with urllib.request.urlopen(f"http://127.0.0.1:{plan.workers[0].system_port}/metrics", timeout=10) as answer:
        found = re.findall(rf"^{name}(?:{{[^}}]*}})? ([\d.e+]+)$", answer.read().decode(), re.MULTILINE)
    return sum(map(float, found))


@pytest.mark.proof
def test_streams_cut_by_the_death_of_the_only_worker_are_failures(tmp_path: Path) -> None:
    load = ["--concurrency", "8", "--request-count", "8", "--warmup-request-count", "0", "--isl", "32", "--osl", "100"]
    load += RANDOM
    paced = ["--engine", "paced", "--set", "paced_ttft_ms=10", "--set", "paced_itl_ms=100"]
    bench = subprocess.Popen(
        [*TRTX, "bench", "--model", "synthetic:tiny", *paced, *load, "-o", str(tmp_path)],
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    try:
        wait_until(lambda: any(tmp_path.glob("*/cells/agg-c8/trial-01/logs")), 120, "aiperf runs")
        wait_until(lambda: counted(tmp_path, "trtx_open_requests") == 8, 60, "eight streams are open")
        before = counted(tmp_path, "trtx_generated_tokens_total")
        wait_until(lambda: counted(tmp_path, "trtx_generated_tokens_total") >= before + 80, 60, "each has some tokens")
        worker = worker_of(tmp_path)
        assert worker is not None
        os.kill(worker["pid"], signal.SIGKILL)
        said, complained = bench.communicate(timeout=120)
    finally:
        if bench.poll() is None:
            bench.send_signal(signal.SIGINT)
            bench.communicate(timeout=60)
    assert bench.returncode == 1, said + complained
    assert "8 of 8 failed: " in complained and "(agg-c8)" in complained
    (run_dir,) = tmp_path.iterdir()
    (row,) = json.loads((run_dir / "summary.json").read_text())["rows"]
    assert (row["request_count"], row["error_request_count"], row["status"]) == (0, 8, "errors")
    assert row["output_token_throughput"] is None and row["time_to_first_token_p50"] is None
    assert ElementTree.parse(run_dir / "junit.xml").getroot().get("failures") == "1"
