"""A topology whose prompts Dynamo makes says so, and is refused where Dynamo would not serve the model."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from trtx.checkpoint import resolve_checkpoint
from trtx.config import TopologySpec
from trtx.errors import UsageError
from trtx.export.kubernetes.planning import plan_pods
from trtx.export.kubernetes.target import KubernetesTarget
from trtx.launch.prompt_notes import remote_prompt_notes


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return Path(shutil.copytree(resolve_checkpoint("synthetic:tiny").path, tmp_path / "model"))


def test_prompts_that_are_the_same_need_no_note(model: Path) -> None:
    assert list(remote_prompt_notes(model)) == []


def test_prompts_that_may_differ_get_one_sentence(model: Path) -> None:
    (model / "chat_template.jinja").write_text("{% for m in messages %}{{ m | tojson }}{% endfor %}")
    (note,) = remote_prompt_notes(model)
    assert "tojson" in note and "Dynamo makes the prompts" in note


def test_a_model_without_a_template_is_refused(model: Path) -> None:
    (model / "chat_template.jinja").unlink()
    config = model / "tokenizer_config.json"
    config.write_text(config.read_text().replace('"chat_template"', '"not_a_template"'))
    with pytest.raises(UsageError, match="no chat template"):
        list(remote_prompt_notes(model))


def test_an_export_has_the_note_among_its_reasons(model: Path) -> None:
    (model / "chat_template.jinja").write_text("{% for m in messages %}{{ m | tojson }}{% endfor %}")
    spec = TopologySpec(model=str(model), engine="torch")
    planned = plan_pods(spec, KubernetesTarget(image="x", model_claim="models/m"))
    assert any("Dynamo makes the prompts" in reason for reason in planned.reasons)
