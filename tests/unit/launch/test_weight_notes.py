"""What lies beside a model's weights and is not served is named in the plan."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from trtx.checkpoint import resolve_checkpoint
from trtx.config import TopologySpec
from trtx.launch import prepare


@pytest.mark.parametrize("name", ["adapter_model.safetensors", "adapter_model.bin", None])
def test_an_adapter_beside_the_weights_is_named_once(
    tmp_path: Path, name: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    model = Path(shutil.copytree(resolve_checkpoint("synthetic:tiny-trained").path, tmp_path / "model"))
    if name is not None:
        (model / name).write_bytes(b"")
    spec = TopologySpec(model=str(model), engine="torch", mode="disagg", port=0)
    told = [one for one in prepare(spec, run_dir=tmp_path / "run").warnings if "adapter" in one]
    assert len(told) == (name is not None)
    assert name is None or (name in told[0] and "is not applied" in told[0])
