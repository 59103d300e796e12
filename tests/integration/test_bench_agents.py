"""``trtx bench`` as agents load a model: recorded tool conversations with schemas, and aiperf's agentic replay.

One topology answers both. A proxy in front of it breaks some documents, as a server without guided decoding would.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from called import call
from hostile_server import chunk, stream, usage
from parity_proxy import proxy
from topology_clients import trtx_serve

from trtx.bench.records import ANSWER_FORMAT
from trtx.topology import Plan

pytestmark = pytest.mark.proof
ROOT = Path(__file__).parents[2]
LOAD = ["--tokenizer", "synthetic:tiny-tools", "--concurrency"]


@pytest.fixture(scope="module")
def served() -> Iterator[Plan]:
    with trtx_serve("--engine", "torch", "--mode", "agg", "--model", "synthetic:tiny-tools") as serve:
        yield serve.wait_ready(120)


def broken(body: dict[str, Any]) -> bytes | None:
    """A document without its last property for each conversation about Oslo; all other requests reach the model."""
    if "response_format" not in body or "Oslo" not in json.dumps(body["messages"]):
        return None
    text = json.dumps({"city": "Oslo", "celsius": 4})
    return stream([chunk({"content": text}), chunk({}, "stop"), usage(6)])


def test_an_answer_that_breaks_its_schema_fails_with_its_reason_and_the_others_are_checked(
    served: Plan, tmp_path: Path
) -> None:
    conversations = ROOT / "sweeps" / "agents" / "conversations.jsonl"
    records = [json.loads(line) for line in conversations.read_text().splitlines()]
    first = records[:6]  # 24 requests
    oslo = sum("Oslo" in json.dumps([turn["messages"] for turn in record["turns"]]) for record in first)
    assert 0 < oslo < len(first), "the file has both"
    few = tmp_path / "few.jsonl"
    few.write_text("".join(json.dumps(record) + "\n" for record in first))
    with proxy(served.url, answers=broken) as front:
        words = ["--input-file", str(few), "--request-count", "24", "--warmup-request-count", "0"]
        # One conversation at a time: of two, the one that ends first begins the first of the file again, whose request
        # can be the 24th.
        done = call("bench", "--url", front.url, *LOAD, "1", *words, "-o", str(tmp_path / "runs"))
    assert done.code == 1, done.err
    assert f"{oslo} of 24 failed: the answer breaks its JSON schema at $: warm is missing" in done.err

    (run_dir,) = (tmp_path / "runs").iterdir()
    (row,) = json.loads((run_dir / "summary.json").read_text())["rows"]
    assert (row["request_count"], row["error_request_count"]) == (24 - oslo, oslo)
    assert (row["format_request_rate"], row["tools_request_rate"]) == (25, 75)
    assert "answer format" not in row["not_checked"]
    (trial,) = run_dir.glob("cells/*/trial-01/profile_export.jsonl")
    kept = [json.loads(line)["metadata"][ANSWER_FORMAT] for line in trial.read_text().splitlines()]
    outcomes = [one["outcome"] for one in kept]
    # Two of the four turns force a call, one may call a tool, and one asks for a document.
    assert outcomes.count("broken") == oslo and outcomes.count("unchecked") == 0
    assert outcomes.count("kept") + outcomes.count("cut") + outcomes.count("free") == 24 - oslo
    assert outcomes.count("kept") >= 12, "forced calls and documents end by themselves"
    assert "answer format, %" in (run_dir / "report.html").read_text()


def test_a_scenario_replays_the_sessions_of_a_local_trace(served: Plan, tmp_path: Path) -> None:
    words = ["--input-file", str(ROOT / "sweeps" / "agents" / "sessions"), "--scenario", "inferencex-agentx-mvp"]
    words += ["--request-count", "12", "-o", str(tmp_path / "runs")]
    done = call("bench", "--url", served.url, *LOAD, "2", *words)
    assert done.code == 0, done.err
    (run_dir,) = (tmp_path / "runs").iterdir()
    (row,) = json.loads((run_dir / "summary.json").read_text())["rows"]
    assert (row["request_count"], row["error_request_count"]) == (12, 0)
    assert (row["format_request_rate"], row["tools_request_rate"]) == (None, None), "no body was kept"
    (trial,) = run_dir.glob("cells/*/trial-01/profile_export.jsonl")
    about = [json.loads(line)["metadata"] for line in trial.read_text().splitlines()]
    measured = [one for one in about if one["benchmark_phase"] == "profiling"]
    assert len(measured) == 12 and all(one["source_trace_id"].startswith("session-") for one in measured)
    assert "agentic replay" in (run_dir / "summary.md").read_text()
