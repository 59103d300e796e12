"""Which package named ``tensorrt_llm`` is under test: the stand-in, or with ``--trtllm installed`` the real one.

The same assertions hold for both: ``make test`` runs them with the stand-in, ``make test-trtllm`` with the real package
on a machine that has it.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from trtx.checkpoint import resolve_checkpoint

STANDIN = Path(__file__).parents[1] / "standin"
CHILD_SECONDS = 60
MODULES = (
    "tensorrt_llm",
    "tensorrt_llm.llmapi",
    "tensorrt_llm.llmapi.llm_args",
    "tensorrt_llm.llmapi.llm_utils",
    "tensorrt_llm.llmapi.disagg_utils",
    "tensorrt_llm.sampling_params",
    "tensorrt_llm.executor.result",
    "tensorrt_llm.executor.utils",
    "tensorrt_llm._torch.shared_tensor",
)


class Package:
    """Finds a name in the modules of the package under test, which is chosen after this file is imported."""

    def __getattr__(self, name: str) -> Any:
        for path in MODULES:
            if hasattr(module := importlib.import_module(path), name):
                return getattr(module, name)
        raise AttributeError(f"no module of tensorrt_llm has {name}")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--trtllm",
        choices=("standin", "installed"),
        default="standin",
        help="which tensorrt_llm the tests marked trtllm run with",
    )


def _uses_standin(config: pytest.Config) -> bool:
    # The option is there only when this folder was named on the command line; a run of everything uses the stand-in.
    return config.getoption("--trtllm", "standin") == "standin"


@pytest.fixture(scope="session")
def is_standin(pytestconfig: pytest.Config) -> bool:
    return _uses_standin(pytestconfig)


@pytest.fixture(scope="module")
def only_standin(is_standin: bool) -> None:
    if not is_standin:
        pytest.skip("faults, versions and GPUs on demand are the stand-in's")


@pytest.fixture(scope="module", autouse=True)
def tensorrt_llm_package(is_standin: bool) -> Iterator[None]:
    """``import tensorrt_llm`` finds the package under test, in this process, while a module's tests run."""
    if not is_standin:
        if importlib.util.find_spec("tensorrt_llm") is None:
            pytest.fail("--trtllm installed: no package tensorrt_llm is installed; install trtx[tensorrt-llm]")
        yield
        return
    sys.path.insert(0, str(STANDIN))
    yield
    sys.path.remove(str(STANDIN))
    for name in [name for name in sys.modules if name.split(".")[0] == "tensorrt_llm"]:
        del sys.modules[name]


@pytest.fixture(scope="session")
def trtllm_environment(is_standin: bool) -> Mapping[str, str]:
    """The environment of a child process that is to find the package under test."""
    environment = dict(os.environ)
    if is_standin:
        paths = (str(STANDIN), environment.get("PYTHONPATH"))
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    return environment


@pytest.fixture(scope="module")
def api(tensorrt_llm_package: None) -> Package:
    return Package()


@pytest.fixture(scope="session")
def model_directory() -> str:
    return str(resolve_checkpoint("synthetic:tiny-trained").path)


@pytest.fixture(scope="session")
def facts() -> dict[str, Any]:
    """The content of llm_api.json: "page" and "source"."""
    read: dict[str, Any] = json.loads((STANDIN / "llm_api.json").read_text(encoding="utf-8"))
    return read


@pytest.fixture(scope="session")
def in_child(model_directory: str) -> Callable[..., Any]:
    """Runs a program with the stand-in importable and ``MODEL`` set, and returns the JSON that it prints last."""

    def run(program: str, **variables: str) -> Any:
        environment = {name: value for name, value in os.environ.items() if not name.startswith("STANDIN_")}
        environment |= {"PYTHONPATH": str(STANDIN), **variables}
        code = f"MODEL = {model_directory!r}\n{program}"
        done = subprocess.run(
            [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=CHILD_SECONDS
        )
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout.splitlines()[-1])

    return run
