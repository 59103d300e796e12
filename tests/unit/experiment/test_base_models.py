"""A load of chat messages needs a chat template: a base model is refused before anything starts."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from trtx.checkpoint import resolve_checkpoint
from trtx.cli.app import run


def test_bench_refuses_a_model_without_a_chat_template_before_it_starts(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    model = Path(shutil.copytree(resolve_checkpoint("synthetic:tiny").path, tmp_path / "model"))
    (model / "chat_template.jinja").unlink()
    config = model / "tokenizer_config.json"
    config.write_text(config.read_text().replace('"chat_template"', '"not_a_template"'))
    assert run(["bench", "--model", str(model), "--engine", "torch", "-o", str(tmp_path / "runs")]) == 2
    said = " ".join(capsys.readouterr().err.split())
    assert "has no chat template" in said and "trtx eval" in said
    assert not list((tmp_path / "runs").glob("*/serve")), "nothing was started"
