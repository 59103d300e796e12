"""The fewest tokens that a chat request can have: against transformers on real tokenizers, and what can't be told."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from trtx.bench.fewest_prompt_tokens import fewest_tokens
from trtx.checkpoint import resolve_checkpoint
from trtx.text import load_hf_tokenizer


@pytest.fixture(scope="module")
def tiny() -> Path:
    return resolve_checkpoint("synthetic:tiny", on_gpu=False).path


@pytest.fixture
def model(tiny: Path, tmp_path: Path) -> Path:
    """A tokenizer that a test may change."""
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(tiny / name, tmp_path)
    return tmp_path


@pytest.mark.slow
@pytest.mark.parametrize("shape", ["tiny", "tiny-vl"])
def test_it_is_what_transformers_makes_of_one_letter(shape: str) -> None:
    path = resolve_checkpoint(f"synthetic:{shape}", on_gpu=False).path
    tokenizer = load_hf_tokenizer(path)
    text = tokenizer.apply_chat_template([{"role": "user", "content": "a"}], tokenize=False, add_generation_prompt=True)
    assert fewest_tokens(path, 0) == len(tokenizer.encode(text, add_special_tokens=False))


def test_a_template_may_write_special_tokens_dates_and_json_and_skip_rounds(model: Path) -> None:
    (model / "chat_template.jinja").write_text(
        "{% for m in messages %}{% if m.role == 'system' %}{% continue %}{% endif %}{{ bos_token }}"
        "{{ m.content | tojson }}{% endfor %}{{ eos_token }}{{ strftime_now('%%') }}"
    )
    config = json.loads((model / "tokenizer_config.json").read_text())
    config |= {"bos_token": {"content": "<|im_start|>"}, "eos_token": "<|im_end|>"}
    (model / "tokenizer_config.json").write_text(json.dumps(config))
    assert fewest_tokens(model, 0) == len(["<|im_start|>", '"', "a", '"', "<|im_end|>", "%"])


def test_several_templates_are_known_by_the_name_default(model: Path) -> None:
    (model / "chat_template.jinja").unlink()
    config = json.loads((model / "tokenizer_config.json").read_text())
    named = [
        {"name": "tool_use", "template": "zzzz"},
        {"name": "default", "template": "<|im_end|>{{ messages[0].content }}"},
    ]
    (model / "tokenizer_config.json").write_text(json.dumps({**config, "chat_template": named}))
    assert fewest_tokens(model, 0) == 2
    (model / "tokenizer_config.json").write_text(json.dumps({**config, "chat_template": named[:1]}))
    assert fewest_tokens(model, 0) is None


def test_nothing_is_counted_where_every_template_of_its_length_fits(model: Path) -> None:
    assert fewest_tokens(model, 12) == 13
    (model / "tokenizer.json").unlink()
    assert fewest_tokens(model, 512) is None


@pytest.mark.parametrize(
    "template",
    [
        "{{ raise_exception('only with a system message') }}",
        "{{ messages[1].content }}",
        "{% generation %}",
        "{{ 1 / 0 }}",
    ],
)
def test_a_template_that_takes_more_is_not_known(model: Path, template: str) -> None:
    (model / "chat_template.jinja").write_text(template)
    assert fewest_tokens(model, 0) is None


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json"])
@pytest.mark.parametrize("text", [None, "", "{}", "[]", "\0"])
def test_files_that_can_not_be_read_leave_it_unknown(model: Path, name: str, text: str | None) -> None:
    if text is None:
        (model / name).unlink()
    else:
        (model / name).write_text(text)
    assert fewest_tokens(model, 0) in ((None, 13) if text == "{}" and name == "tokenizer_config.json" else (None,))
