"""``make bench-gpu``: sections that are resumed, and a table that says nothing of what was not measured."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.slow


def bench_gpu(out: Path, *words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "benchmarks" / "bench_gpu.py"), "--out", str(out), *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)


@pytest.mark.proof  # measures three sections
def test_a_section_is_measured_once_and_again_where_it_is_another_devices(tmp_path: Path) -> None:
    words = ("--models", "tiny=synthetic:tiny", "--batch", "1", "--sections", "runner-tiny,handoff")
    first = bench_gpu(tmp_path, *words, "--docs", str(tmp_path / "page.md"))
    assert first.returncode == 0, first.stderr
    assert "handoff: not run, it takes 2 GPUs and 0 are here" in first.stdout
    kept = tmp_path / "runner-tiny.json"
    result = json.loads(kept.read_text())
    (row,) = result["documents"]["trtx"]["rows"]
    page = (tmp_path / "page.md").read_text()
    assert "python benchmarks/engine_decode.py --model synthetic:tiny --batch 1" in page
    (line,) = [line for line in page.splitlines() if line.startswith("| batch 1 |")]
    cells = [cell.strip() for cell in line.strip("|").split("|")]
    assert cells[2] == f"{row['decode_tokens_per_s']:.4g}" or cells[2] == f"{row['decode_tokens_per_s']:,.0f}"
    assert cells[3] == cells[4] == "" and float(cells[6]) > 0  # no peer was asked; a limit was measured

    second = bench_gpu(tmp_path, *words)
    assert json.loads(kept.read_text()) == result and "runner-tiny:\n" not in second.stdout

    kept.write_text(json.dumps(result | {"device": "8 x another"}))
    third = bench_gpu(tmp_path, *words)
    assert "runner-tiny:\n" in third.stdout and json.loads(kept.read_text())["device"] == result["device"]


@pytest.mark.proof
def test_what_fails_is_named_and_leaves_no_figure(tmp_path: Path) -> None:
    asked = bench_gpu(tmp_path, "--models", f"none={tmp_path}", "--batch", "1", "--sections", "runner-none")
    assert asked.returncode == 1 and "not measured, see above: runner-none" in asked.stderr
    assert not list(tmp_path.glob("*.json"))
    unknown = bench_gpu(tmp_path, "--sections", "runner")
    assert unknown.returncode == 2 and "no section 'runner'; there are runner-0.6b, http-0.6b" in unknown.stderr


@pytest.mark.parametrize(
    ("docs", "why"), [("none/page.md", "does not exist"), pytest.param("", "is a directory", marks=pytest.mark.proof)]
)
def test_a_table_that_cannot_be_written_is_refused_before_anything_is_measured(
    tmp_path: Path, docs: str, why: str
) -> None:
    refused = bench_gpu(tmp_path / "out", "--docs", docs and str(tmp_path / docs))
    assert refused.returncode == 2 and "error: --docs '" in refused.stderr and why in refused.stderr
    assert "Traceback" not in refused.stderr and refused.stdout == "" and not (tmp_path / "out").exists()


@pytest.mark.proof
def test_a_stop_signal_ends_with_the_table_of_what_is_finished(tmp_path: Path) -> None:
    about = {"device": "CPU", "sources": "", "versions": "torch", "commit": "c", "started": "now", "seconds": 1.0,
             "commands": {}}  # fmt: skip
    documents = {"trtx": {"serve": [{"worker": 5.0}], "engine": [{"weights": 1.5}]}}
    (tmp_path / "start-tiny.json").write_text(json.dumps({"section": "start-tiny", "documents": documents, **about}))
    command = [sys.executable, str(ROOT / "benchmarks" / "bench_gpu.py"), "--out", str(tmp_path)]
    command += ["--models", "tiny=synthetic:tiny", "--batch", "1", "--sections", "runner-tiny"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stderr is not None
        assert process.stdout.readline() == "runner-tiny:\n"
        process.terminate()
        shown, told = process.communicate(timeout=120)
    assert process.returncode == 128 + signal.SIGTERM, told
    assert "## start-tiny" in shown and "Traceback" not in told


def test_the_way_to_the_client_stands_beside_the_engine_and_a_start_by_its_steps(tmp_path: Path) -> None:
    about = {"device": "CPU", "sources": "", "versions": "torch", "commit": "c", "started": "now", "seconds": 1.0,
             "commands": {}}  # fmt: skip
    engine = {"rows": [{"clients": 1, "tokens_per_s": 100.0}, {"clients": 64, "tokens_per_s": 4000.0}]}
    client = {"rows": [{"concurrency": 1, "steady_output_token_throughput": None},
                       {"concurrency": 64, "steady_output_token_throughput": 3900.0}]}  # fmt: skip
    start = {"serve": [{"worker": 5.0}, {"worker": 4.0}], "engine": [{"weights": 1.5}]}
    for section, documents in (("path-tiny", {"engine": engine, "client": client}), ("start-tiny", {"trtx": start})):
        (tmp_path / f"{section}.json").write_text(json.dumps({"section": section, "documents": documents, **about}))
    shown = bench_gpu(tmp_path, "--models", "tiny=synthetic:tiny", "--sections", "handoff")
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in shown.stdout.splitlines()]
    assert [row[2:] for row in rows if row[0] == "concurrency 64"] == [["3,900", "", "", "4,000", "0.975"]]
    assert [row[2:] for row in rows if row[0] == "concurrency 1"] == [["", "", "", "100", ""]]
    assert [row[2] for row in rows if row[0].startswith(("start", "engine alone"))] == ["5", "4", "1.5"]
