"""A checkpoint's prompts are Dynamo's own only where its files prove that they are transformers'."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from tokenizers import Tokenizer, processors

from trtx.checkpoint import resolve_checkpoint
from trtx.prompts.same import difference, first_foreign

PLAIN = "{% for m in messages %}{{ '<' + m['role'] + '>' + m['content'] + '\n' }}{% endfor %}"


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return Path(shutil.copytree(resolve_checkpoint("synthetic:tiny").path, tmp_path / "model"))


def edited(model: Path, **values: object) -> Path:
    path = model / "tokenizer_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))
    return model


def test_the_text_models_that_trtx_makes_are_rendered_by_dynamo(model: Path) -> None:
    assert difference(model) is None
    assert first_foreign(PLAIN) is None


@pytest.mark.parametrize(
    "template",
    [
        "{{ true }}", "{{ none }}", "{{ 1.0 }}", "{{ [1] }}", "{{ messages }}", "{{ messages[0]['role'] }}",
        "{{ m }}", "{{ nothing }}", "{{ messages | tojson }}", "{{ messages | length }}", "{{ 'a' % 1 }}",
        "{{ 'a'.rsplit('.') }}", "{{ 'a' ~ none }}", "{{ 'a' if false }}", "{% set a = 1 %}{{ a }}",
        "{% macro f() %}{% endmacro %}{{ f() }}", "{% if tools %}x{% endif %}", "{% if 1 is odd %}x{% endif %}",
        "{% for m in messages %}{{ m.content }}{% endfor %}", "{% for m in messages %}{{ m.name }}{% endfor %}",
        "{% for m in messages %}{{ m.content | trim }}{% endfor %}", "{% for m in messages[1:] %}x{% endfor %}",
        "{% for m in messages %}{{ loop.index }}{% endfor %}", "{% for m in messages if m.role %}x{% endfor %}",
        "{% for m in messages %}{% if m.tool_calls %}x{% endif %}{% endfor %}", "{{ raise_exception('x') }}",
        "{% generation %}x{% endgeneration %}", "{% for m in messages %}{% continue %}{% endfor %}", "{% if %}",
        "{% filter upper %}x{% endfilter %}",
        "{% for m in messages %}{% if m.content == none %}x{% endif %}{% endfor %}",
        "{% for m in messages %}{% if m.content is string %}x{% else %}{{ m.content }}{% endif %}{% endfor %}",
        "{% for m in messages %}{% for p in m.content %}{{ p.text }}{% endfor %}{% endfor %}",
        "a\r\nb", "a\x0c", "a\u00a0{% if add_generation_prompt %}b{% endif %}", "{{ '\\a' }}", "{{ '\\/' }}",
        "{{ '\\x41' }}", "{% raw %}\n{{ a }}{% endraw %}",
    ],
)  # fmt: skip
def test_a_template_with_anything_else_in_it_is_rendered_by_transformers(template: str) -> None:
    assert first_foreign(template) is not None
    assert first_foreign(PLAIN + template) is not None


def test_a_file_that_has_changed_is_read_again(model: Path) -> None:
    """The result is kept for as long as no file has changed."""
    path = model / "tokenizer.json"
    plain, padding = path.read_text(), {"strategy": {"Fixed": 9}, "direction": "Right", "pad_id": 0}
    padded = json.dumps({**json.loads(plain), "padding": {**padding, "pad_type_id": 0, "pad_token": "a"}})
    for _ in range(2):
        path.write_text(plain)
        assert difference(model) is None
        path.write_text(padded)
        assert difference(model) == "tokenizer.json defines padding or truncation"


def test_a_tokenizer_that_transformers_changes_or_that_adds_tokens_is_transformers(model: Path) -> None:
    assert difference(edited(model, tokenizer_class="Qwen2TokenizerFast")) is not None
    assert difference(edited(model, tokenizer_class="PreTrainedTokenizerFast", add_bos_token=True)) is not None
    edited(model, add_bos_token=False)
    assert difference(model) is None
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    tokenizer.enable_padding(length=96)
    tokenizer.save(str(model / "tokenizer.json"))
    assert "defines padding or truncation" in str(difference(model))
    tokenizer.no_padding()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="$A <|im_end|>", pair="$A $B", special_tokens=[("<|im_end|>", 4)]
    )
    tokenizer.save(str(model / "tokenizer.json"))
    assert "adds special tokens" in str(difference(model))


def test_a_model_without_a_template_is_transformers(model: Path) -> None:
    (model / "chat_template.jinja").unlink()
    edited(model, chat_template=None)
    assert "no chat template" in str(difference(model))
