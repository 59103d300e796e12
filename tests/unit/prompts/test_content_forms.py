"""A chat template gets each message's content in a form that it prints. The oracle is transformers' own rendering."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from trtx.checkpoint import resolve_checkpoint
from trtx.prompts.rendering import PromptMaker

STRING_ELSE_NOTHING = (  # as Qwen3's
    "{%- for m in messages %}{%- if m.content is string %}{%- set c = m.content %}{%- else %}{%- set c = '' %}"
    "{%- endif %}{{- '<|im_start|>' + m.role + '\\n' + c + '<|im_end|>\\n' }}{%- endfor %}"
)
PARTS_ALONE = (  # as LLaVA's
    "{% for m in messages %}{{ m.role.upper() }}: {% for p in m.content | selectattr('type', 'equalto', 'image') %}"
    "<image>{% endfor %}{% for p in m.content | selectattr('type', 'equalto', 'text') %}{{ p.text }} {% endfor %}"
    "{% endfor %}"
)
EITHER = (
    "{% for m in messages %}{{ m.role }}{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for p in m.content %}{% if p.type == 'image' %}<image>{% else %}{{ p.text }}{% endif %}{% endfor %}{% endif %}"
    "{% endfor %}"
)
SYSTEM_AS_STRING = (  # as Llama 3.2 Vision's
    "{{ messages[0].content | trim }}{% for m in messages[1:] %}{% if m.content is string %}{{ m.content }}"
    "{% else %}{% for p in m.content %}{{ p.text }}{% endfor %}{% endif %}{% endfor %}"
)
TRIMMED = "{% for m in messages %}{{ m.role }}{{ m.content | trim }}{% endfor %}"
CONCATENATED = "{% for m in messages %}{{ m.role + m.content }}{% endfor %}"
UPPER = "{% for m in messages %}{{ m.content | string | upper }}{% endfor %}"
FIRST_PART = "{% for m in messages %}{{ m.content[0].text }}{% endfor %}"
REFUSES_LISTS = (
    "{% for m in messages %}{% if m.content is not string %}{{ raise_exception('text alone') }}{% endif %}"
    "{{ m.content }}{% endfor %}"
)
AS_JSON = "{% for m in messages %}{{ m.content | tojson }}{% endfor %}"
STRING_PRINTED = (
    "{{% for m in messages %}}{{% if m.content is string %}}{{{{ {} }}}}{{% else %}}{{% for p in m.content %}}"
    "{{{{ p.text }}}}{{% endfor %}}{{% endif %}}{{% endfor %}}"
)


def parts(*texts: str) -> list[dict[str, str]]:
    return [{"type": "text", "text": text} for text in texts]


STRING, LIST = "a", parts("a", "b")
CASES = [
    (STRING_ELSE_NOTHING, STRING, STRING), (STRING_ELSE_NOTHING, LIST, "a\nb"),
    (PARTS_ALONE, STRING, parts("a")), (PARTS_ALONE, LIST, LIST),
    (PARTS_ALONE, [{"type": "image"}, *LIST], [{"type": "image"}, *LIST]),
    (EITHER, STRING, STRING), (EITHER, LIST, LIST), (EITHER, [{"type": "image"}], [{"type": "image"}]),
    (TRIMMED, LIST, "a\nb"), (CONCATENATED, LIST, "a\nb"), (UPPER, LIST, "a\nb"), (REFUSES_LISTS, LIST, "a\nb"),
    (FIRST_PART, STRING, parts("a")), (AS_JSON, LIST, LIST), (AS_JSON, STRING, STRING), (EITHER, "", ""),
    *[(STRING_PRINTED.format(way), "a b", "a b") for way in (
        "m.content | tojson", "[m.content]", "m.content | upper", "m.content.split(' ')[0]", "m.content[2:]",
    )],
]  # fmt: skip


def model(directory: Path, template: str) -> Path:
    shutil.copytree(resolve_checkpoint("synthetic:tiny").path, directory)
    (directory / "chat_template.jinja").write_text(template)
    return directory


def messages(content: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": content}]


@pytest.mark.parametrize(("template", "sent", "given"), CASES)
def test_a_template_gets_content_that_it_prints(tmp_path: Path, template: str, sent: Any, given: Any) -> None:
    path = model(tmp_path / "m", template)
    maker, oracle = PromptMaker(path), AutoTokenizer.from_pretrained(path)
    expected = oracle.apply_chat_template(messages(given), tokenize=False, add_generation_prompt=True)
    for _ in range(2):  # what the first request showed is kept for the second
        assert maker.rendered({"messages": messages(sent)}) == expected


def test_each_message_gets_a_form_of_its_own(tmp_path: Path) -> None:
    maker = PromptMaker(model(tmp_path / "m", SYSTEM_AS_STRING))
    talk = [{"role": "system", "content": LIST}, {"role": "user", "content": LIST}]
    assert maker.rendered({"messages": talk}) == "a\nbab"


def test_text_that_a_template_leaves_out_stays_as_it_was_sent(tmp_path: Path) -> None:
    """A template that drops a model's thoughts, or all turns but the last, is asked for no other form."""
    template = "{{ messages[-1].content.split('</think>')[-1] }}"
    maker = PromptMaker(model(tmp_path / "m", template))
    talk = [{"role": "user", "content": "old"}, {"role": "assistant", "content": "<think>x</think>y"}]
    assert maker.rendered({"messages": talk}) == "y"


def test_variables_of_a_template_that_change_the_form_do_not_change_it_for_others(tmp_path: Path) -> None:
    template = "{% if as_json %}" + AS_JSON + "{% else %}" + FIRST_PART + "{% endif %}"
    maker = PromptMaker(model(tmp_path / "m", template))
    asked = messages("hello")
    assert "hello" in maker.rendered({"messages": asked, "chat_template_kwargs": {"as_json": True}})
    assert maker.rendered({"messages": asked}) == "hello"
