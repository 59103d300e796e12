"""What ``trtx sleep`` and ``wake`` accept as ``--tags``."""

from __future__ import annotations

from pathlib import Path

import pytest

from trtx.cli import app


@pytest.mark.parametrize("verb", ["sleep", "wake"])
def test_an_unknown_tag_is_refused_with_the_known_ones(
    verb: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert app.run([verb, str(tmp_path), "--tags", "kv_cache,lora"]) == 2
    problem = "'lora' is not memory that a worker can release; expected kv_cache or model_weights"
    assert f"--tags kv_cache,lora: {problem}" in capsys.readouterr().err
