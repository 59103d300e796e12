"""Which package named ``tensorrt_llm`` is under test: the stand-in, or with ``--trtllm installed`` the real one.

The same assertions hold for both: ``make test`` runs them with the stand-in, ``make test-trtllm`` with the real package
on a machine that has it.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from trtx.checkpoint import resolve_checkpoint

STANDIN = Path(__file__).parents[1] / "standin"


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
        environment["OMP_NUM_THREADS"] = "1"  # CI has two cores, and every LLM of a test wants them
    return environment


@pytest.fixture(scope="session")
def model_directory() -> str:
    return str(resolve_checkpoint("synthetic:tiny-trained").path)
