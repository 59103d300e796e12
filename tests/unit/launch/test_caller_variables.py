"""The caller's DYN_* variables: those that tune reach the processes that read them, the others are named."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from launch_builders import plan_of, process

from trtx.config import TopologySpec
from trtx.launch.caller_variables import INSTEAD, PASSED, options_given, passed_by, with_caller_variables
from trtx.topology import Plan

DOCUMENT = Path(__file__).parents[3] / "docs" / "reference" / "environment.md"


@pytest.fixture
def plan(tmp_path: Path) -> Plan:
    return plan_of(tmp_path, process(tmp_path, "frontend", role="frontend"), process(tmp_path, "agg-0"))


def passed_to(plan: Plan, **caller: str) -> Plan:
    return with_caller_variables(plan, {"PATH": "/bin", **caller})


def test_a_tuning_variable_reaches_the_processes_that_read_it(plan: Plan) -> None:
    plan = passed_to(plan, DYN_LOG="debug", DYN_ROUTER_TEMPERATURE="0.5", DYN_CANARY_WAIT_TIME="9")
    frontend, worker = plan.processes
    assert frontend.env["DYN_LOG"] == worker.env["DYN_LOG"] == "debug"
    assert frontend.env["DYN_ROUTER_TEMPERATURE"] == "0.5"
    assert "DYN_ROUTER_TEMPERATURE" not in worker.env
    assert worker.env["DYN_CANARY_WAIT_TIME"] == "9" and "DYN_CANARY_WAIT_TIME" not in frontend.env
    assert "DYN_LOG of your environment reaches all processes (levels of the logs, also by module)" in plan.reasons
    assert not plan.warnings


def test_all_others_are_named_in_one_line_with_what_to_use_instead(plan: Plan) -> None:
    plan = passed_to(plan, DYN_NAMESPACE="other", DYN_HTTP_PORT="1", DYN_FOO="x", DYN_ENGINE_REQUEST_LIMIT="8",
                     DYN_ROUTER_CONDITIONAL_DISAGG="true")  # fmt: skip
    assert plan.warnings == (
        "not passed on from your environment: DYN_ENGINE_REQUEST_LIMIT (Dynamo 1.6.1 ignores it; use "
        "--max-queued-requests), DYN_FOO, DYN_HTTP_PORT (use --port), DYN_NAMESPACE (trtx sets it), "
        "DYN_ROUTER_CONDITIONAL_DISAGG (use --conditional-disagg); "
        "docs/reference/environment.md lists what is",
    )
    assert all(not one.env.keys() & {"DYN_NAMESPACE", "DYN_HTTP_PORT", "DYN_FOO"} for one in plan.processes)


def test_an_option_decides_before_its_variable(plan: Plan) -> None:
    given = options_given(TopologySpec(log_level="warn"))
    plan = with_caller_variables(plan, {"DYN_LOG": "debug", "DYN_LOGGING_JSONL": "1"}, given)
    assert "DYN_LOG" not in plan.processes[0].env and plan.processes[0].env["DYN_LOGGING_JSONL"] == "1"
    assert "DYN_LOG (--log-level is given)" in plan.warnings[0]


def test_a_secret_is_neither_passed_on_nor_named(plan: Plan) -> None:
    plan = passed_to(plan, DYN_REQUEST_TRACE_S3_SECRET_KEY="hush", DYN_LOG_TOKEN="hush")
    assert "hush" not in str(plan) and not plan.warnings


def test_what_is_passed_on_is_no_address() -> None:
    owned = [name for name, hint in INSTEAD.items() if hint == "trtx sets it"]
    assert not [name for name in owned if passed_by(name.rstrip("*")) is not None]


# Dynamo reads these by their beginning and the name of a field.
BY_FIELD = ("DYN_RUNTIME_", "DYN_HEALTH_CHECK_", "DYN_CANARY_")


@pytest.mark.slow  # reads 220 MB of Dynamo
def test_dynamo_reads_each_passed_variable() -> None:
    import dynamo._core

    library = Path(dynamo._core.__file__ or "")
    texts = [library.read_bytes(), *(file.read_bytes() for file in library.parent.glob("frontend/*.py"))]
    texts += [file.read_bytes() for file in library.parent.glob("common/**/*.py")]
    names = {row.name.rstrip("*") for row in PASSED}
    asked = {next((start for start in BY_FIELD if name.startswith(start)), name) for name in names}
    missing = {name for name in asked if not any(name.encode() in text for text in texts)}
    assert not missing, f"Dynamo 1.6.1 has no {sorted(missing)}"


def test_the_document_lists_them() -> None:
    text = DOCUMENT.read_text(encoding="utf-8")
    assert {row.name for row in PASSED} <= set(re.findall(r"^\| `(DYN_[A-Z_*]+)` \|", text, re.MULTILINE))
