"""What differs between versions is asked of the package, here of the stand-in with the facts of three versions."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from trtx.engine.tensorrt_llm.versions import fatal_error, health_call, kv_capacity, llm_class, pipelines_prefill
from trtx.errors import UsageError

pytestmark = pytest.mark.slow

STANDIN = Path(__file__).parents[2] / "standin"
PROGRAM = """
import json
from tensorrt_llm import LLM
from trtx.engine.tensorrt_llm import versions
first, second = (versions.new_request_ids(worker_id) for worker_id in (2**63 + 1, 2**63 + 2))
print(json.dumps({
    "ids": [first(), first(), second()],
    "conversations": versions.conversation_params() is not None,
    "priority": versions.accepts(LLM.generate_async, "priority"),
    "capacity": hasattr(LLM, "get_kv_cache_capacity"),
    "backends": [versions.llm_class(name).__module__ for name in ("pytorch", "_autodeploy")],
}))
"""


def asked_of(version: str) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        env=os.environ | {"PYTHONPATH": str(STANDIN), "STANDIN_TRTLLM_VERSION": version},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer


@pytest.mark.slow
@pytest.mark.parametrize(("version", "is_new"), [("1.3.0rc7", False), ("1.3.0rc22", True)])
def test_each_version_gives_request_ids_of_its_own_layout(version: str, is_new: bool) -> None:
    answer = asked_of(version)
    assert len(set(answer["ids"])) == 3
    assert min(answer["ids"]) > 2**40, "ids below are an engine's own"
    assert [answer[name] for name in ("conversations", "priority", "capacity")] == [is_new] * 3
    assert answer["backends"][1].startswith("tensorrt_llm._torch.auto_deploy")


def test_the_stable_release_shares_no_ids() -> None:
    assert asked_of("1.2.1")["ids"] == [None] * 3


class Silent:
    """An LLM of a version without any of what came later."""


class Executor:
    _fatal_error = RuntimeError("rank 1 died")

    def check_health(self) -> bool:
        return False


class Wrapped:
    _executor = Executor()


def test_what_an_engine_does_not_have_is_unknown_and_not_healthy() -> None:
    assert health_call(Silent()) is None
    assert kv_capacity(Silent()) == {}
    assert fatal_error(Silent()) is None


def test_health_is_found_on_the_executor_too() -> None:
    check = health_call(Wrapped())
    assert check is not None
    assert check() is False
    assert str(fatal_error(Wrapped())) == "rank 1 died"


@pytest.mark.parametrize(
    ("version", "can"),
    [("1.2.1", False), ("1.3.0rc9", False), ("1.3.0rc10", True), ("1.3.0rc22+cpu", True), ("unknown", True)],
)
def test_pipeline_stages_on_prefill_need_the_fix(version: str, can: bool) -> None:
    assert pipelines_prefill(version) is can


def test_the_backend_that_is_gone_is_named_with_those_that_are_there() -> None:
    with pytest.raises(UsageError, match="'tensorrt' \\(removed after 1.2.*expected one of pytorch, _autodeploy"):
        llm_class("tensorrt")
