"""``trtx eval parity`` end to end: real frontends and workers, and a fault that it has to find."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import pytest
from called import only
from processes import TRTX
from topology_clients import wait_until

from trtx.cli.app import run
from trtx.evals.parity import Parity, read_answers, read_parity
from trtx.evals.parity.forms import ComparedRoute
from trtx.launch.processes import members
from trtx.topology import Plan

MODEL, TRAINED = "synthetic:tiny", "synthetic:tiny-trained"
EXACT = ("--set", "dtype=float32")
"""In bfloat16, the default for TRAINED on some processors, rounding decides tokens of long answers."""


def compared(run_dir: Path) -> tuple[Parity, dict[str, ComparedRoute]]:
    found = read_parity(run_dir)
    assert found is not None
    return found, {one.route: one for one in found.routes}


def beyond(found: Parity, route: ComparedRoute) -> set[int]:
    """The requests with a log-probability farther off than is allowed."""
    assert found.tolerance is not None
    return {one.index for one in route.compared.worst if one.distance > found.tolerance.most}


def faults(run_dir: Path) -> list[int]:
    """Of each handoff that the decode worker says to have corrupted, how long its prompt was."""
    text = (run_dir / "disagg" / "serve" / "logs" / "decode-0.log").read_text()
    assert "KV IS CORRUPTED ON PURPOSE" in text
    return [int(count) for count in re.findall(r"of a prompt of (\d+) tokens, holds another request's KV", text)]


def judgements(run_dir: Path) -> dict[tuple[str, str], dict[str, Any]]:
    """By route and criterion, without its limit."""
    document = json.loads((run_dir / "verdict.json").read_text())
    return {(one["cell"], one["criterion"].partition(":le:")[0]): one for one in document["judgements"]}


def test_a_corrupted_block_is_found_and_all_other_requests_answer_as_the_reference_does(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRTX_FAULT", "swap-block:every=4,layer=0")
    argv = ["eval", "parity", "--model", MODEL, "--routes", "disagg", "--prompts", "16", "--isl", "64", "--osl", "8"]
    assert run([*argv, "--json", "-o", str(tmp_path)]) == 1
    told = json.loads(capfd.readouterr().out)
    run_dir = only(tmp_path)
    assert told["run_dir"] == str(run_dir) and told["conditions"]["fault"] == "swap-block:every=4,layer=0"
    assert told["notes"][0].startswith("KV WAS CORRUPTED ON PURPOSE in ") and told["notes"][0].endswith("the check")
    planted = len(faults(run_dir))
    parity, routes = compared(run_dir)
    assert parity.reference is not None and parity.reference.compared.identical == 16
    handoffs, recomputed, corrupted = (one.value for one in routes["disagg"].evidence.counts[1:])
    assert handoffs is not None and 16 <= handoffs <= 20 and recomputed == 0
    assert corrupted == routes["disagg"].evidence.corrupted and 0 < corrupted <= planted, "but for clients that left"
    found = judgements(run_dir)
    assert found["disagg", "planted_fault"]["verdict"] == "pass"
    assert found["agg", "yardstick"]["verdict"] == "pass" == found["disagg", "happened"]["verdict"]
    worst = routes["disagg"].compared.worst[0]
    far = found["disagg", "logprob_distance:max"]
    assert far["verdict"] == "missed"
    assert f"request {worst.index}, token {worst.position} of its answer" in far["reason"]
    lengths = {one.index: one.prompt_tokens for one in read_answers(run_dir, "disagg")}
    far_off = beyond(parity, routes["disagg"])
    assert {lengths[index] for index in far_off} & set(faults(run_dir))
    assert len(far_off) <= 8, "those four, and who found their blocks; all others answer as the reference does"
    report = (run_dir / "report.html").read_text()
    assert "KV WAS CORRUPTED ON PURPOSE" in report and "missed" in report
    suite = ElementTree.parse(run_dir / "junit.xml").getroot()
    open_ = [key for key, one in found.items() if one["verdict"] == "no verdict"]
    assert set(open_) <= {("disagg", "logprob_distance:mean")}, (
        "of few requests that are far off a mean may say nothing"
    )
    assert int(suite.get("failures", "0")) >= 1 and suite.get("errors") == str(len(open_))
    before = {path.name: path.read_bytes() for path in run_dir.iterdir() if path.is_file()}
    monkeypatch.delenv("TRTX_FAULT")
    assert run(["report", str(run_dir)]) == 0
    assert {path.name: path.read_bytes() for path in run_dir.iterdir() if path.is_file()} == before
    assert run(["bench", "--resume", str(run_dir)]) == 2
    assert (
        "is a run of trtx eval parity, not of trtx bench; resume it with trtx eval parity --resume"
        in capfd.readouterr().err
    )


@pytest.mark.proof  # four passes
def test_an_interrupted_run_says_what_is_kept_and_goes_on_with_the_passes_that_are_missing(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a fault that never fires, which is no verdict."""
    monkeypatch.setenv("TRTX_FAULT", "swap-block:every=1000,layer=0")
    argv = ["eval", "parity", "--model", MODEL, "--routes", "disagg", "--prompts", "16", "--isl", "64", "--osl", "8"]
    command = [*TRTX, *argv, "-o", str(tmp_path)]
    running = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        wait_until(lambda: bool(list(tmp_path.glob("*/eval/agg-again/answers.jsonl"))), 200, "the second pass")
        wait_until(lambda: bool(list(tmp_path.glob("*/eval/parity.json"))), 20, "what was counted on it")
    finally:
        running.send_signal(signal.SIGINT)
        _, said = running.communicate(timeout=60)
    run_dir = only(tmp_path)
    assert running.returncode == 130
    assert f"partial report: {run_dir / 'report.html'}" in said
    assert f"resume it with: trtx eval parity --resume {run_dir}" in said
    assert "was not counted" in json.loads((run_dir / "summary.json").read_text())["notes"][0]
    kept = {path: path.read_bytes() for path in (run_dir / "eval").rglob("*.jsonl")}
    assert {path.parent.name for path in kept} == {"eval", "agg", "agg-again"}
    monkeypatch.delenv("TRTX_FAULT")
    assert run(["eval", "parity", "--resume", str(run_dir)]) == 2
    assert "TRTX_FAULT was swap-block:every=1000,layer=0 and is not set" in capfd.readouterr().err
    monkeypatch.setenv("TRTX_FAULT", "swap-block:every=1000,layer=0")
    assert run(["eval", "parity", "--resume", str(run_dir), "--json"]) == 3
    told = json.loads(capfd.readouterr().out)
    assert {path: path.read_bytes() for path in kept} == kept, "passes that had ended are as they were"
    assert told["notes"] == ["TRTX_FAULT=swap-block:every=1000,layer=0 corrupted no handoff: this run tests nothing"]
    assert "KV WAS" not in (run_dir / "report.html").read_text() + (run_dir / "summary.md").read_text()
    found = judgements(run_dir)
    assert found["disagg", "planted_fault"]["verdict"] == "no verdict"
    assert {one["verdict"] for key, one in found.items() if key[1] != "planted_fault"} == {"pass"}
    _, routes = compared(run_dir)
    assert routes["disagg"].compared.requests == 16 and routes["disagg"].evidence.corrupted == 0
    events = [json.loads(line) for line in (run_dir / "journal.jsonl").read_text().splitlines()]
    (resumed,) = (one for one in events if one["event"] == "run_resumed")
    assert (resumed["kept"], resumed["missing"]) == (["agg", "agg-again"], ["disagg"])
    assert [one["topology"] for one in events if one["event"] == "topology_ready"][-1] == "disagg"
    lines = (run_dir / "eval" / "agg" / "answers.jsonl").read_text().splitlines()
    (run_dir / "eval" / "agg" / "answers.jsonl").write_text("\n".join(lines[:-1]) + "\n")
    assert run(["eval", "parity", "--resume", str(run_dir)]) == 2
    refusal = capfd.readouterr().err
    assert "answers.jsonl" in refusal and "so they may not be what was measured; restore them from a copy" in refusal


@pytest.mark.proof  # seven workers are started for it
@pytest.mark.parametrize("model", [MODEL, TRAINED])
def test_all_routes_answer_as_the_reference_does(model: str, tmp_path: Path) -> None:
    assert run(["eval", "parity", "--model", model, *EXACT, "-o", str(tmp_path)]) == 0
    run_dir = only(tmp_path)
    _, routes = compared(run_dir)
    assert set(routes) == {"disagg", "kv", "migrated", "chunked"}
    for route in routes.values():
        assert (route.compared.identical, route.failures) == (64, ())
        assert route.compared.answer_positions == 64 * 32 and route.compared.prompt_positions > 1000
        assert route.evidence.missing is None and route.cancelled > 0
    counts = {name: {one.what: one.value for one in route.evidence.counts} for name, route in routes.items()}
    assert (counts["disagg"]["handoffs"] or 0) >= 64 and counts["disagg"]["prompts recomputed in place of one"] == 0
    assert counts["kv"]["requests of agg-0"] and counts["kv"]["requests of agg-1"]
    assert counts["migrated"]["answers that went on elsewhere"]
    assert counts["chunked"]["prompts that took more than one step"]
    events = [json.loads(line) for line in (run_dir / "journal.jsonl").read_text().splitlines()]
    assert [one["event"] for one in events].count("worker_killed") == 1


@pytest.mark.proof  # eight workers, one of them killed, and all but the reference draft in every step that they can
@pytest.mark.parametrize(
    ("model", "recipe", "arithmetic"),
    [
        (MODEL, "tiny-ngram", EXACT),
        # A trained model's log-probabilities in float32 were once 6.7e-5 apart, where 6.1e-5 are allowed.
        (TRAINED, "tiny-draft", ("--deterministic",)),
        (TRAINED, "tiny-eagle3", ("--deterministic",)),
        (TRAINED, "tiny-eagle3", ("--deterministic", "--tp", "2")),
    ],
    ids=["tiny-ngram", "tiny-draft", "tiny-eagle3", "tiny-eagle3 on two ranks"],
)
def test_every_route_of_a_speculating_topology_answers_as_one_worker_without_speculation(
    model: str, recipe: str, arithmetic: tuple[str, ...], tmp_path: Path
) -> None:
    routes = "speculating,disagg,kv,migrated,chunked"
    drafts = "speculative_config.draft_len_schedule={64: 4}"
    argv = ["eval", "parity", "--model", model, "--recipe", recipe, "--routes", routes, "--set", drafts]
    assert run([*argv, *arithmetic, "-o", str(tmp_path)]) == 0
    _, found = compared(only(tmp_path))
    assert {*found} == {*routes.split(",")}
    assert all((one.compared.identical, one.failures, one.evidence.missing) == (64, (), None) for one in found.values())
    counts = {name: {one.what: one.value for one in route.evidence.counts} for name, route in found.items()}
    assert (counts["speculating"]["drafted tokens that were accepted"] or 0) > 50
    assert counts["migrated"]["answers that went on elsewhere"]


@pytest.mark.proof
@pytest.mark.parametrize("recipe", ["tiny-draft", "tiny-eagle3"])
@pytest.mark.parametrize("plain", ["prefill", "decode"])
def test_one_side_of_a_handoff_may_speculate_alone(recipe: str, plain: str, tmp_path: Path) -> None:
    sides = {"prefill": "decode", "decode": "prefill"}
    drafts = f"{sides[plain]}.speculative_config.draft_len_schedule={{64: 4}}"
    argv = ["eval", "parity", "--model", TRAINED, "--recipe", recipe, "--routes", "disagg", "--set", drafts]
    assert run([*argv, *EXACT, "--set", f"{plain}.speculative_config=null", "-o", str(tmp_path)]) == 0
    disagg = compared(only(tmp_path))[1]["disagg"]
    assert (disagg.compared.identical, disagg.failures, disagg.evidence.missing) == (64, (), None)


@pytest.mark.parametrize("side", ["prefill", "decode"])
def test_a_draft_model_that_does_not_fit_is_refused_on_either_side_before_anything_starts(
    side: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    argv = ["eval", "parity", "--model", MODEL, "--recipe", "tiny-eagle3", "--routes", "disagg", "-o", str(tmp_path)]
    kept = {"prefill": "decode", "decode": "prefill"}[side]
    assert run([*argv, "--set", f"{kept}.speculative_config=null", "--set", "agg.speculative_config=null"]) == 2
    assert "expected an EAGLE-3 head that was trained for this model" in capfd.readouterr().err
    assert not list(tmp_path.glob("*/journal.jsonl"))


@pytest.mark.proof
def test_one_corrupted_block_in_a_hundred_handoffs_fails_and_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRTX_FAULT", "swap-block:every=100,layer=1")
    argv = ["eval", "parity", "--model", MODEL, "--routes", "disagg", "--prompts", "320"]
    assert run([*argv, "-o", str(tmp_path)]) == 1
    run_dir = only(tmp_path)
    parity, routes = compared(run_dir)
    disagg = routes["disagg"]
    handoffs = next(one.value for one in disagg.evidence.counts if one.what == "handoffs")
    assert handoffs is not None and handoffs >= 300 and len(faults(run_dir)) >= handoffs // 100
    far = beyond(parity, disagg)
    assert 1 <= len(far) <= 30 and disagg.compared.requests == 320, "families share blocks, and all others are as were"
    reason = judgements(run_dir)["disagg", "logprob_distance:max"]["reason"]
    assert reason.startswith(f"request {disagg.compared.worst[0].index}, token ")


@pytest.mark.proof
def test_without_the_fault_the_same_requests_pass(tmp_path: Path) -> None:
    argv = ["eval", "parity", "--model", MODEL, "--routes", "disagg", "--prompts", "320"]
    assert run([*argv, "-o", str(tmp_path)]) == 0


@pytest.mark.proof
@pytest.mark.parametrize("signal_number", [signal.SIGINT, signal.SIGKILL])
def test_a_run_that_is_interrupted_leaves_nothing_running(signal_number: signal.Signals, tmp_path: Path) -> None:
    argv = ["eval", "parity", "--model", MODEL, "--routes", "disagg", "--prompts", "400", "-o", str(tmp_path)]
    command = [*TRTX, *argv]
    running = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=os.environ.copy())
    try:
        wait_until(lambda: bool(list(tmp_path.glob("*/eval/agg/answers.jsonl"))), 200, "the first pass")
    finally:
        running.send_signal(signal_number)
        code = running.wait(60)
    assert code == (130 if signal_number is signal.SIGINT else -signal.SIGKILL)
    run_dir = only(tmp_path)
    plans = json.loads((run_dir / "plan.json").read_text())["topologies"]
    for plan in (Plan.from_json(one) for one in plans.values()):
        wait_until(lambda plan=plan: not members(plan.marker, ()), 15, "every process gone")  # type: ignore[misc]
    if signal_number is signal.SIGINT:
        assert "The run ended early: interrupted" in (run_dir / "summary.md").read_text()
    answers = (run_dir / "eval" / "agg" / "answers.jsonl").read_bytes()
    assert run(["eval", "parity", "--resume", str(run_dir)]) == 0
    assert (run_dir / "eval" / "agg" / "answers.jsonl").read_bytes() == answers
    _, routes = compared(run_dir)
    assert routes["disagg"].compared.requests == 400


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["--routes", "agg,somewhere"], '--routes is "somewhere"; expected'),
        (["--routes", "kv,kv"], "names kv twice"),
        (["--isl", "20"], "--isl 20 is no longer than max_num_tokens 32"),
        (["--isl", "9000"], "but the context length of"),
        (["--prompts", "3"], "--prompts is 3; expected greater than or equal to 10"),
        (["--engine", "paced"], "computes no real answers, so there is nothing to compare"),
        (["--set", "disagg.x=1"], "disagg"),
        (["--routes", "speculating"], "the route speculating needs an engine config with speculative_config"),
        (["--routes", "agg,url"], '--routes is "url"; expected'),
        (["--resume", "no-such-run"], "--model has no effect with --resume"),
        (["--url", "http://127.0.0.1:9"], "--url has no effect without --against"),
        (
            ["--url", "http://127.0.0.1:9", "--against", "http://127.0.0.1:8", "--workers", "2"],
            "--workers has no effect",
        ),
        (["--url", "http://127.0.0.1:9", "--against", "http://127.0.0.1:8"], "did not answer as OpenAI's API does"),
    ],
)
def test_what_can_not_be_asked_is_one_sentence_and_leaves_nothing(
    argv: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["eval", "parity", "--model", MODEL, *argv, "-o", str(tmp_path / "runs")]) == 2
    told = capsys.readouterr().err
    assert said in told and told.count("\n") <= 2, told
    assert not (tmp_path / "runs").exists() or not list((tmp_path / "runs").iterdir())
