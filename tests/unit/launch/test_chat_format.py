"""What ``--tool-call-parser``, ``--reasoning-parser`` and ``--chat-template`` become, and what is refused."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from dynamo._core import get_reasoning_parser_names, get_tool_parser_names

from trtx.checkpoint import resolve_checkpoint
from trtx.config import TopologySpec
from trtx.errors import UsageError
from trtx.launch.chat_format import ChatFormat, resolve_chat_format

THINKS = "{% if tools %}<tool_call>{% endif %}<think></think>"


@pytest.fixture(scope="module")
def model() -> Path:
    return resolve_checkpoint("synthetic:tiny").path


def resolved(model: Path, **fields: Any) -> ChatFormat:
    return resolve_chat_format(TopologySpec(**fields), model, "Qwen3ForCausalLM")


def test_every_parser_of_the_installed_dynamo_can_be_named(model: Path) -> None:
    for name in get_tool_parser_names():
        assert resolved(model, tool_call_parser=name).tool_call_parser == name
    for name in get_reasoning_parser_names():
        assert resolved(model, reasoning_parser=name).reasoning_parser == name


@pytest.mark.parametrize(
    ("option", "typed", "near"),
    [
        ("tool_call_parser", "herms", "hermes"),
        ("tool_call_parser", "llama3", "llama3_json"),
        ("reasoning_parser", "qwen", "qwen3"),
        ("reasoning_parser", "non", "none"),
        ("reasoning_parser", "hermes", None),  # of the other kind, and near to none
    ],
)
def test_an_unknown_parser_is_refused_with_the_nearest(model: Path, option: str, typed: str, near: str | None) -> None:
    with pytest.raises(UsageError) as refused:
        resolved(model, **{option: typed})
    said = str(refused.value)
    assert said.startswith(f"--{option.replace('_', '-')} '{typed}' is not a parser of the installed Dynamo; ")
    assert (f"did you mean {near}?" in said) if near else ("expected auto, none or one of " in said and "qwen3" in said)


def test_none_turns_off_what_the_template_would_choose(model: Path, tmp_path: Path) -> None:
    (tmp_path / "t.jinja").write_text(THINKS)
    found = resolved(model, chat_template=tmp_path / "t.jinja")
    assert (found.tool_call_parser, found.reasoning_parser, found.template) == ("hermes", "qwen3", THINKS)
    off = resolved(model, chat_template=tmp_path / "t.jinja", tool_call_parser="none", reasoning_parser="none")
    assert (off.tool_call_parser, off.reasoning_parser) == (None, None)
    assert "tool calls: no parser because --tool-call-parser says so" in off.reasons
    assert off.of(TopologySpec()).registered_parsers == {}
    assert found.of(TopologySpec()).registered_parsers == {
        "--tool-call-parser": "hermes",
        "--reasoning-parser": "qwen3",
    }


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (None, "can't be read (No such file or directory); expected a Jinja chat template"),
        (b"", "is empty; expected a Jinja chat template"),
        (b" \n", "is empty; expected a Jinja chat template"),
        (b"{{ '\xff' }}", "line 1 is not UTF-8; expected a Jinja chat template"),
        (b"{{ a }}\n{% if b %}", "is not valid Jinja (line 2: "),
        (b"x" * (256 * 1024 + 1), "is larger than 256 KiB; expected a Jinja chat template"),
    ],
)
def test_a_file_that_is_no_template_is_refused_in_one_sentence(
    model: Path, tmp_path: Path, content: bytes | None, said: str
) -> None:
    path = tmp_path / "t.jinja"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(UsageError, match=re.escape(said)) as refused:
        resolved(model, chat_template=path)
    assert str(refused.value).startswith("--chat-template ") and "\n" not in str(refused.value)


def test_parsers_of_harmony_warn_where_their_vocabulary_is_not_here(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TIKTOKEN_ENCODINGS_BASE", raising=False)
    (warning,) = resolved(model, tool_call_parser="harmony", reasoning_parser="gpt_oss").warnings
    assert "o200k_base.tiktoken" in warning and "TIKTOKEN_ENCODINGS_BASE" in warning
    (tmp_path / "o200k_base.tiktoken").touch()
    monkeypatch.setenv("TIKTOKEN_ENCODINGS_BASE", str(tmp_path))
    assert resolved(model, tool_call_parser="harmony").warnings == ()
