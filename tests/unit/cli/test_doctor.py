"""``trtx doctor`` as typed, on the machine that the tests run on."""

from __future__ import annotations

import importlib.util
import json
import os
import resource
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.slow

# Another test of this machine may be killing a launcher and its guardian at this moment.
NOT_OURS = {"leftover processes"}


def doctor(*arguments: str, **options: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "trtx", "doctor", *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, "COLUMNS": "80", "CUDA_VISIBLE_DEVICES": ""},
        **options,
    )


def rows(*arguments: str, **options: Any) -> tuple[int, dict[str, dict[str, str]]]:
    done = doctor("--json", *arguments, **options)
    document = json.loads(done.stdout)
    assert document["schema_version"] == 1
    statuses = [check["status"] for check in document["checks"]]
    assert (document["failed"], document["warnings"]) == (statuses.count("failed"), statuses.count("warning"))
    return done.returncode, {check["name"]: check for check in document["checks"]}


def test_this_machine_serves_with_the_torch_engine_on_its_cpu() -> None:
    code, found = rows("--port", "0")
    broken = {name for name, check in found.items() if check["status"] == "failed"}
    assert broken <= NOT_OURS
    assert code == (4 if broken else 0)
    assert found["engine"]["seen"] == "torch (auto), on the CPU: no GPU"
    assert found["ai-dynamo"]["seen"] == "1.6.1"


def test_the_table_fits_80_columns_and_says_each_status_in_a_word() -> None:
    done = doctor("--port", "0")
    lines = done.stdout.splitlines()
    assert max(map(len, lines)) <= 80
    assert any(line.startswith("✓ ok       python") for line in lines)
    assert lines[-1].endswith("warnings")
    assert "\x1b" not in done.stdout


def test_a_taken_port_fails_with_a_fix_beneath(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        done = doctor("--port", str(port))
    assert done.returncode == 4
    lines = done.stdout.splitlines()
    at = next(number for number, line in enumerate(lines) if line.startswith(f"✗ failed   port {port}"))
    assert any("→ choose another with --port" in line for line in lines[at : at + 5])
    assert done.stderr.startswith("trtx: ") and f"port {port}" in done.stderr
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize(("limit", "status"), [(128, "failed"), (1024, "warning")])
def test_a_low_limit_of_open_files_is_seen(limit: int, status: str) -> None:
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    code, found = rows("--port", "0", preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard)))
    assert found["open files"]["status"] == status
    assert code == 4 if status == "failed" else code in (0, 4)


@pytest.mark.skipif(importlib.util.find_spec("tensorrt_llm") is not None, reason="it is installed here")
def test_tensorrt_llm_asked_for_where_it_is_not_installed_fails() -> None:
    code, found = rows("--engine", "tensorrt-llm", "--port", "0")
    assert code == 4
    assert found["engine"]["status"] == found["tensorrt_llm"]["status"] == "failed"


def test_an_unknown_engine_is_refused() -> None:
    done = doctor("--engine", "turbo")
    assert done.returncode == 2
    assert "turbo" in done.stderr and "tensorrt-llm" in done.stderr


def test_the_doctor_leaves_nothing_behind(tmp_path: Path) -> None:
    doctor("--port", "0", "-o", str(tmp_path / "runs"))
    assert list(tmp_path.iterdir()) == []
