"""The guard in front of a chat template: what it marks is refused, and of other prompts not a character changes."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from jinja2.sandbox import ImmutableSandboxedEnvironment

from trtx.checkpoint import resolve_checkpoint
from trtx.text import load_tokenizer
from trtx.worker.multimodal.audio_guard import guarded_template, mark_of, refuse_unheard, registered_template
from trtx.worker.requests.invalid_request import InvalidRequest

AUDIO = {"type": "input_audio", "input_audio": {"data": "AAAA", "format": "wav"}}
TEXT = {"type": "text", "text": "what"}
TALKS: dict[str, list[dict[str, Any]]] = {
    "a string": [{"role": "user", "content": "hi"}],
    "parts": [{"role": "user", "content": [TEXT, {"type": "image"}]}, {"role": "assistant", "content": None}],
    "no content": [{"role": "assistant", "tool_calls": []}, {"role": "user", "content": "input_audio"}],
}
TEMPLATES = {
    "as transformers writes one": "{% for message in messages %}{{ message['role'] + '\n' }}{% endfor %}\n",
    "a block a line": "{% for one in messages %}\n  {% if 1 %}\n{{ one.role }}\n  {% endif %}\n{% endfor %}",
    "stripped": "{%- if 1 %}\n{{- 'bos' }}\n{%- set messages = messages[1:] %}\n{%- endif %}{{ messages }}\n\n",
    "a comment": "{# which\n #}\n{{- '<s>' -}}\n{% macro a(b) %}{{ b }}{% endmacro %}{{ a(messages[0]['role']) }}",
    "plain text": "System: be good\n{% if add_generation_prompt %}\nA:{% endif %}\n",
}  # fmt: skip


def model_with(directory: Path, template: Any) -> Path:
    model = directory / "model"
    shutil.copytree(resolve_checkpoint("synthetic:tiny").path, model)
    (model / "chat_template.jinja").unlink()
    config = json.loads((model / "tokenizer_config.json").read_text())
    (model / "tokenizer_config.json").write_text(json.dumps({**config, "chat_template": template}))
    return model


def environment(directory: Path) -> dict[str, str]:
    return {"TMPDIR": str(directory), "DYN_DISCOVERY_BACKEND": "file", "DYN_NAMESPACE": "trtx-1"}


def rendered(template: str, messages: list[dict[str, Any]]) -> str:
    """With the settings that transformers and Dynamo have."""
    made = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True).from_string(template)
    return made.render(messages=messages, add_generation_prompt=True)


@pytest.mark.parametrize("template", TEMPLATES.values(), ids=TEMPLATES)
def test_prompts_without_audio_are_what_they_were_and_those_with_begin_with_the_mark(
    template: str, tmp_path: Path
) -> None:
    path = guarded_template(model_with(tmp_path, template), environment(tmp_path))
    assert path is not None
    guarded, mark = path.read_bytes().decode(), mark_of("trtx-1")
    for name, messages in TALKS.items():
        assert rendered(guarded, messages) == rendered(template, messages), name
        for content in ([TEXT, AUDIO], [AUDIO]):
            heard = [*messages, {"role": "user", "content": content}]
            assert rendered(guarded, heard) == mark + rendered(template, heard)


def test_a_marked_prompt_is_refused_and_no_other(tmp_path: Path) -> None:
    model = resolve_checkpoint("synthetic:tiny").path
    tokenizer, mark = load_tokenizer(model), mark_of("trtx-1")
    path = guarded_template(model, environment(tmp_path))
    assert path is not None
    refuse_unheard(tokenizer.encode(rendered(path.read_text(), TALKS["a string"])).ids, tokenizer, "trtx-1")
    ids = tokenizer.encode(rendered(path.read_text(), [{"role": "user", "content": [TEXT, AUDIO]}])).ids
    with pytest.raises(InvalidRequest, match="the request contains input_audio, which no model takes here"):
        refuse_unheard(ids, tokenizer, "trtx-1")
    refuse_unheard(tokenizer.encode("a word " * 200 + mark).ids, tokenizer, "trtx-1")
    refuse_unheard(ids, None, "trtx-1")


@pytest.mark.parametrize("before", range(5))
def test_a_mark_is_seen_letter_by_letter_and_behind_a_token_for_the_beginning(before: int) -> None:
    tokenizer, mark = load_tokenizer(resolve_checkpoint("synthetic:tiny").path), mark_of("trtx-1")
    ids = [tokenizer.encode(letter, add_special_tokens=False).ids[0] for letter in mark]
    with pytest.raises(InvalidRequest, match="the request contains input_audio"):
        refuse_unheard([0] * before + ids + [1, 2, 3], tokenizer, "trtx-1")


def test_where_the_frontend_makes_prompts_dynamos_rendering_is_a_mark_that_is_refused(tmp_path: Path) -> None:
    model = model_with(tmp_path, "{{ messages | tojson }}")
    path = registered_template(model, environment(tmp_path), prompts_by="frontend")
    assert path is not None
    with pytest.raises(InvalidRequest, match="Dynamo made the prompt of this request"):
        tokenizer = load_tokenizer(model)
        refuse_unheard(tokenizer.encode(rendered(path.read_text(), TALKS["a string"])).ids, tokenizer, "trtx-1")
    plain = resolve_checkpoint("synthetic:tiny").path
    kept = guarded_template(plain, environment(tmp_path))
    assert registered_template(plain, environment(tmp_path), prompts_by="frontend") == kept


def test_all_workers_of_a_topology_register_one_file_and_those_of_another_another(tmp_path: Path) -> None:
    model, own = resolve_checkpoint("synthetic:tiny").path, environment(tmp_path)
    one = guarded_template(model, own)
    assert one is not None and guarded_template(model, own) == one
    assert guarded_template(model, {**own, "DYN_NAMESPACE": "trtx-2"}) != one
    assert len([*tmp_path.iterdir()]) == 2


@pytest.mark.parametrize("template", [" {% if true %}a{% endif %}", "\n{{ 1 }}", "", None, [{"name": "default"}]])
def test_a_template_that_no_guard_fits_in_front_of_stays_as_it_is(template: Any, tmp_path: Path) -> None:
    assert guarded_template(model_with(tmp_path, template), environment(tmp_path)) is None


@pytest.mark.parametrize("lacks", ["TMPDIR", "DYN_DISCOVERY_BACKEND"])
def test_where_the_frontend_may_be_elsewhere_there_is_none(lacks: str, tmp_path: Path) -> None:
    own = environment(tmp_path)
    assert guarded_template(resolve_checkpoint("synthetic:tiny").path, {**own, lacks: ""}) is None
