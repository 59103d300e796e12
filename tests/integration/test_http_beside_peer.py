"""``benchmarks/http_beside_peer.py``: trtx, then a server that stands in vLLM's place, under the same loads."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from processes import free_port

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.proof

# Takes vLLM's command line, and answers as other_server.py's vLLM does. What it was started with goes to ``seen.json``.
_PEER = f"""
import argparse, json, os, sys
seen = {{"argv": sys.argv[1:], "pythonpath": os.environ["PYTHONPATH"], "path": list(sys.path), "pid": os.getpid()}}
open("seen.json", "w").write(json.dumps(seen))
sys.path[:0] = [{str(ROOT)!r}, {str(ROOT / "tests" / "integration")!r}]
import other_server
asked = argparse.ArgumentParser()
for flag in ("--load-format", "--host", "--port", "--served-model-name"):
    asked.add_argument(flag)
said, _ = asked.parse_known_args()
other_server.MODEL = said.served_model_name
server = other_server._Server.__new__(other_server._Server)
documents = {{**other_server.VLLM, other_server.MODELS: other_server.models("vllm", "peer")}}
server.described = other_server.OtherServer(documents=documents)
server._chats = other_server.itertools.count(1)
other_server.ThreadingHTTPServer.__init__(server, (said.host, int(said.port)), other_server._Handler)
server.serve_forever()
"""


def peer_folder(folder: Path, source: str) -> Path:
    package = folder / "vllm" / "entrypoints" / "cli"
    package.mkdir(parents=True)
    for directory in (folder / "vllm", folder / "vllm" / "entrypoints", package):
        (directory / "__init__.py").touch()
    (package / "main.py").write_text(source)
    return folder


def beside(out: Path, *words: str) -> tuple[subprocess.CompletedProcess[str], dict[str, Any]]:
    ours, theirs = free_port(), free_port()
    command = [
        sys.executable, str(ROOT / "benchmarks" / "http_beside_peer.py"), "--model", "synthetic:tiny",
        "--isl", "64", "--osl", "8", "--out", str(out), "--port", str(ours), "--peer-port", str(theirs), *words,
    ]  # fmt: skip
    ended = subprocess.run(command, capture_output=True, text=True, timeout=900, check=False)
    assert ended.stdout, ended.stderr
    return ended, json.loads(ended.stdout.splitlines()[-1])


def test_both_are_measured_alike_and_each_is_gone_before_the_next(tmp_path: Path) -> None:
    peer = peer_folder(tmp_path / "peer", _PEER)
    words = ("--concurrency", "2,1", "--request-count", "12", "--requests", "1=8", "--peer-path", str(peer))
    ended, document = beside(tmp_path / "runs", *words)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert [(row["server"], row["concurrency"], row["request_count"]) for row in document["rows"]] == [
        ("trtx", 2, 12), ("trtx", 1, 8), ("vllm", 2, 12), ("vllm", 1, 8),
    ]  # fmt: skip
    assert all(row["status"] == "ok" and row["output_token_throughput"] > 0 for row in document["rows"])
    assert document["start_s"].keys() == {"trtx", "vllm"} and document["problems"] == []
    seen = json.loads((tmp_path / "runs" / "seen.json").read_text())
    assert seen["argv"][:1] == ["serve"] and "--load-format" in seen["argv"]
    assert seen["pythonpath"] == str(peer) and str(ROOT) not in seen["path"]
    assert not Path(f"/proc/{seen['pid']}").exists()


def test_a_peer_that_fails_costs_its_own_cells_alone_and_a_second_call_adds_them(tmp_path: Path) -> None:
    broken = peer_folder(tmp_path / "broken", "raise SystemExit('no kernel for this GPU')")
    kept = tmp_path / "kept.json"
    words = ("--concurrency", "1", "--request-count", "8", "--results", str(kept))
    ended, document = beside(tmp_path / "runs", *words, "--peer-path", str(broken))
    assert ended.returncode == 1
    assert [row["server"] for row in document["rows"]] == ["trtx"]
    (problem,) = document["problems"]
    assert problem.startswith("vllm ended with 1 after") and "no kernel for this GPU" in problem
    assert json.loads(kept.read_text()) == document

    whole = peer_folder(tmp_path / "whole", _PEER)
    again, both = beside(tmp_path / "runs", *words, "--peer-path", str(whole), "--servers", "vllm")
    assert again.returncode == 0, again.stdout + again.stderr
    assert [row["server"] for row in both["rows"]] == ["trtx", "vllm"] and both["rows"][0] == document["rows"][0]
    (ours,) = [line for line in again.stdout.splitlines() if line.split()[:1] == ["trtx"]]
    rates = [row["output_token_throughput"] for row in both["rows"]]
    assert f"{rates[0] / rates[1]:.3f}" in ours.split()


def test_a_budget_ends_a_load_that_would_not_fit_and_the_server_with_it(tmp_path: Path) -> None:
    peer = peer_folder(tmp_path / "peer", _PEER)
    words = ("--servers", "vllm", "--concurrency", "2", "--request-count", "1000000", "--budget-s", "20")
    ended, document = beside(tmp_path / "runs", *words, "--peer-path", str(peer))
    assert ended.returncode == 1 and "no figures at concurrency 2: the budget was used up" in document["problems"][0]
    assert document["rows"] == [] and document["start_s"].keys() == {"vllm"}
    seen = json.loads((tmp_path / "runs" / "seen.json").read_text())
    assert not Path(f"/proc/{seen['pid']}").exists()
