"""TensorRT-LLM is found by its version without being imported, and a CPU build asks for no GPU."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from trtx.engine import resolve_kind
from trtx.engine.tensorrt_llm.installed import installed_version, needs_gpu
from trtx.errors import UsageError

POISON = "raise RuntimeError('imported')\n"


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package named tensorrt_llm, first on the path, that can't be imported."""
    directory = tmp_path / "tensorrt_llm"
    directory.mkdir()
    (directory / "__init__.py").write_text(POISON)
    monkeypatch.syspath_prepend(str(tmp_path))
    return directory


def test_the_version_is_read_from_the_package_that_would_be_imported(package: Path) -> None:
    (package / "version.py").write_text(f'"""Doc."""\n__version__ = "1.3.0rc22"\n{POISON}')
    assert installed_version() == "1.3.0rc22"


def test_a_package_that_says_no_version_is_there_all_the_same(package: Path) -> None:
    assert installed_version() == "unknown"


def test_auto_takes_it_with_a_gpu_or_where_its_build_needs_none(package: Path) -> None:
    (package / "version.py").write_text('__version__ = "1.3.0rc22"\n')
    assert resolve_kind("auto", has_gpu=True) == "tensorrt-llm"
    assert resolve_kind("auto", has_gpu=False) == "torch"
    (package / "version.py").write_text('__version__ = "1.3.0rc22+cpu"\n')
    assert resolve_kind("auto", has_gpu=False) == "tensorrt-llm"


@pytest.mark.parametrize(
    ("version", "asks"), [("1.3.0rc22", True), ("1.3.0rc22+cu130", True), ("1.3.0rc22+cpu", False)]
)
def test_only_a_cpu_build_needs_no_gpu(version: str, asks: bool) -> None:
    assert needs_gpu(version) is asks


def test_an_engine_that_nobody_knows_is_named_with_those_there_are() -> None:
    with pytest.raises(UsageError, match="engine 'vllm' is not known; expected auto, simulated or one of torch"):
        resolve_kind("vllm", has_gpu=True)


@pytest.mark.slow
def test_the_launcher_says_that_the_package_is_missing(tmp_path: Path) -> None:
    command = "from trtx.cli.app import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", command, "serve", "--engine", "tensorrt-llm", "--dry-run", "-o", str(tmp_path)],
        capture_output=True,
        text=True,
        env={name: value for name, value in os.environ.items() if name != "PYTHONPATH"},
        timeout=60,
    )
    if installed_version() is None:
        assert done.returncode == 2
        assert "needs the package tensorrt_llm, which is not installed" in done.stderr
