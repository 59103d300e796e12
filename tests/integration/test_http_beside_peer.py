"""``benchmarks/http_beside_peer.py``: trtx, then servers that stand in its peers' place, under the same loads."""

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

# Takes a peer's command line, and answers as other_server.py's vLLM does. What it was started with goes to a file that
# is named as its package.
_PEER = f"""
import argparse, json, os, sys
seen = {{"argv": sys.argv[1:], "pythonpath": os.environ["PYTHONPATH"], "path": list(sys.path), "pid": os.getpid()}}
open(__spec__.name.split(".")[0] + ".json", "w").write(json.dumps(seen))
sys.path[:0] = [{str(ROOT)!r}, {str(ROOT / "tests")!r}, {str(ROOT / "tests" / "integration")!r}]
import http.server
import other_server
asked = argparse.ArgumentParser()
for flag in ("--load-format", "--host", "--port", "--served-model-name"):
    asked.add_argument(flag)
said, _ = asked.parse_known_args()
other_server.MODEL = said.served_model_name
documents = {{**other_server.VLLM, other_server.MODELS: other_server.models("vllm", "peer")}}
handler = other_server.handler_of(other_server.OtherServer(documents=documents))
http.server.ThreadingHTTPServer((said.host, int(said.port)), handler).serve_forever()
"""


MODULES = {"vllm": ("vllm", "entrypoints", "cli", "main"), "sglang": ("sglang", "launch_server")}


def peer_folder(folder: Path, source: str, package: str = "vllm", version: str = "9.8.7") -> Path:
    *packages, module = MODULES[package]
    directory = folder.joinpath(*packages)
    directory.mkdir(parents=True)
    for number in range(len(packages)):
        folder.joinpath(*packages[: number + 1], "__init__.py").touch()
    (directory / f"{module}.py").write_text(source)
    info = folder / f"{package}-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: {version}\n")
    return folder


def beside(out: Path, *words: str) -> tuple[subprocess.CompletedProcess[str], dict[str, Any]]:
    ours, theirs = free_port(), free_port()
    command = [
        sys.executable, str(ROOT / "benchmarks" / "http_beside_peer.py"), "--model", "synthetic:tiny",
        "--out", str(out), "--port", str(ours), "--peer-port", str(theirs), *words,
    ]  # fmt: skip
    ended = subprocess.run(command, capture_output=True, text=True, timeout=900, check=False)
    assert ended.stdout, ended.stderr
    return ended, json.loads(ended.stdout.splitlines()[-1])


SHORT = ("--isl", "64", "--osl", "8")


def test_all_are_measured_alike_and_each_is_gone_before_the_next(tmp_path: Path) -> None:
    vllm = peer_folder(tmp_path / "one", _PEER)
    sglang = peer_folder(tmp_path / "other", _PEER, "sglang", "0.0.1")
    words = ("--peer", f"vllm={vllm}", "--peer", f"sglang={sglang}", "--temperature", "0")
    loads = {
        "fixed": "fixed:concurrency=2,isl=64,osl=8,request-count=12",
        "arrivals": "arrivals:request-rate=8,isl=64,isl-stddev=8,osl=8,osl-stddev=1,request-count=12",
        "turns": "turns:concurrency=2,isl=32,osl=8,session-turns-mean=2,request-count=12",
    }
    ended, document = beside(tmp_path / "runs", *words, *(word for one in loads.values() for word in ("--load", one)))
    assert ended.returncode == 0, ended.stdout + ended.stderr
    versions = {"vllm": "9.8.7", "sglang": "0.0.1"}
    assert (
        document["versions"].items() >= versions.items() and document["start_s"].keys() == document["versions"].keys()
    )
    assert [(row["server"], row["load"]) for row in document["rows"]] == [
        (server, load) for server in ("trtx", "vllm", "sglang") for load in loads.values()
    ]
    assert document["problems"] == []
    for load in loads.values():
        rows = [row for row in document["rows"] if row["load"] == load]
        assert all(row["options"] == rows[0]["options"] and row["request_count"] == 12 for row in rows)
        assert all(row["status"] == "ok" and row["output_token_throughput"] > 0 for row in rows)
        assert all(row["time_to_first_token_p99"] > 0 for row in rows)
        assert rows[0]["options"]["temperature"] == "0"
    seeds = {row["options"]["seed"] for row in document["rows"]}
    assert len(seeds) == len(loads)  # no load finds the prompts of another in a prefix cache
    for package, peer in (("vllm", vllm), ("sglang", sglang)):
        seen = json.loads((tmp_path / "runs" / f"{package}.json").read_text())
        assert {"--load-format", "dummy"} <= set(seen["argv"])
        assert seen["pythonpath"] == str(peer) and str(ROOT) not in seen["path"]
        assert not Path(f"/proc/{seen['pid']}").exists()
        assert f"{package} {versions[package]}" in ended.stdout


def test_a_peer_that_fails_costs_its_own_cells_alone_and_a_second_call_adds_them(tmp_path: Path) -> None:
    broken = peer_folder(tmp_path / "broken", "raise SystemExit('no kernel for this GPU')")
    kept = tmp_path / "kept.json"
    words = (*SHORT, "--concurrency", "1", "--request-count", "8", "--results", str(kept))
    ended, document = beside(tmp_path / "runs", *words, "--peer", f"vllm={broken}")
    assert ended.returncode == 1
    assert [row["server"] for row in document["rows"]] == ["trtx"]
    (problem,) = document["problems"]
    assert problem.startswith("vllm ended with 1 after") and "no kernel for this GPU" in problem
    assert json.loads(kept.read_text()) == document

    whole = peer_folder(tmp_path / "whole", _PEER)
    again, both = beside(tmp_path / "runs", *words, "--peer", f"vllm={whole}", "--servers", "vllm")
    assert again.returncode == 0, again.stdout + again.stderr
    assert [row["server"] for row in both["rows"]] == ["trtx", "vllm"] and both["rows"][0] == document["rows"][0]
    (theirs,) = [line for line in again.stdout.splitlines() if line.split()[:1] == ["vllm"]]
    rates = [row["output_token_throughput"] for row in both["rows"]]
    assert f"{rates[0] / rates[1]:.3f}" in theirs.split()


def test_a_budget_ends_a_load_that_would_not_fit_and_the_server_with_it(tmp_path: Path) -> None:
    peer = peer_folder(tmp_path / "peer", _PEER)
    words = (*SHORT, "--servers", "vllm", "--concurrency", "2", "--request-count", "1000000", "--budget-s", "20")
    more = ("--tp", "2", "--peer-word", "vllm=--kv-offloading-size", "--peer-word", "vllm=20")
    ended, document = beside(tmp_path / "runs", *words, "--peer", f"vllm={peer}", *more)
    assert ended.returncode == 1 and "request-count=1000000: the budget was used up" in document["problems"][0]
    assert document["rows"] == [] and document["start_s"].keys() == {"vllm"}
    seen = json.loads((tmp_path / "runs" / "vllm.json").read_text())
    assert not Path(f"/proc/{seen['pid']}").exists()
    assert seen["argv"][-4:] == ["--tensor-parallel-size", "2", "--kv-offloading-size", "20"]
