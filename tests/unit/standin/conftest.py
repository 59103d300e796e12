"""The stand-in as a package: found in this process while these tests run, and in children with a version or a fault."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from trtx.checkpoint import resolve_checkpoint

STANDIN = Path(__file__).parents[2] / "standin"
CHILD_SECONDS = 60


@pytest.fixture(scope="module", autouse=True)
def standin_on_the_path() -> Iterator[None]:
    sys.path.insert(0, str(STANDIN))
    yield
    sys.path.remove(str(STANDIN))
    for name in [name for name in sys.modules if name.split(".")[0] == "tensorrt_llm"]:
        del sys.modules[name]


@pytest.fixture(scope="session")
def model_directory() -> str:
    return str(resolve_checkpoint("synthetic:tiny-trained").path)


@pytest.fixture(scope="session")
def facts() -> dict[str, Any]:
    """llm_api.json as it lies there: "page" and "source"."""
    read: dict[str, Any] = json.loads((STANDIN / "llm_api.json").read_text(encoding="utf-8"))
    return read


@pytest.fixture(scope="session")
def in_child(model_directory: str) -> Callable[..., Any]:
    """Runs a program with the stand-in importable and ``MODEL`` set, and returns the JSON that it prints last."""

    def run(program: str, **variables: str) -> Any:
        environment = {name: value for name, value in os.environ.items() if not name.startswith("STANDIN_")}
        environment |= {"PYTHONPATH": str(STANDIN), "OMP_NUM_THREADS": "1", **variables}
        code = f"MODEL = {model_directory!r}\n{program}"
        done = subprocess.run(
            [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=CHILD_SECONDS
        )
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout.splitlines()[-1])

    return run
