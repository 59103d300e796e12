"""Before a real TensorRT-LLM loads, its GPUs are counted: all of them, or one node's where a launcher started ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from trtx.engine.tensorrt_llm.life import start
from trtx.errors import UsageError

REACHED = "the package is imported"
TWO_NODES = {"tensor_parallel_size": 2, "pipeline_parallel_size": 2, "gpus_per_node": 2}


@pytest.fixture(autouse=True)
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A TensorRT-LLM that needs GPUs and says when it is asked to load."""
    directory = tmp_path / "tensorrt_llm"
    directory.mkdir()
    (directory / "__init__.py").write_text(f"raise RuntimeError({REACHED!r})\n")
    (directory / "version.py").write_text('__version__ = "1.3.0rc22"\n')
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delenv("TLLM_SPAWN_PROXY_PROCESS", raising=False)


def load(monkeypatch: pytest.MonkeyPatch, visible: str, config: dict[str, Any], *, is_launched: bool) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    if is_launched:
        monkeypatch.setenv("TLLM_SPAWN_PROXY_PROCESS", "1")
    start(Path("/model"), config)


@pytest.mark.parametrize(
    ("visible", "config", "is_launched"),
    [
        ("0,1", TWO_NODES, True),
        ("GPU-a,GPU-b", {"tensor_parallel_size": 16, "gpus_per_node": 2}, True),
        ("0,1", {"tensor_parallel_size": 2}, True),
        ("0,1,2,3", {"tensor_parallel_size": 4}, False),
    ],
)
def test_enough_gpus_are_taken(
    visible: str, config: dict[str, Any], is_launched: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(RuntimeError, match=REACHED):
        load(monkeypatch, visible, config, is_launched=is_launched)


@pytest.mark.parametrize(
    ("visible", "config", "is_launched", "told"),
    [
        ("0,1", TWO_NODES, False, "asks for 4 GPUs a worker and CUDA_VISIBLE_DEVICES has 2; give the worker more"),
        ("0", TWO_NODES, True, "4 GPUs a worker, 2 of them on this node, and CUDA_VISIBLE_DEVICES has 1; set gpus_per"),
        ("0,1", {"tensor_parallel_size": 4}, True, "4 of them on this node, and CUDA_VISIBLE_DEVICES has 2"),
    ],
)
def test_too_few_are_told_before_anything_loads(
    visible: str, config: dict[str, Any], is_launched: bool, told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(UsageError, match=told):
        load(monkeypatch, visible, config, is_launched=is_launched)
