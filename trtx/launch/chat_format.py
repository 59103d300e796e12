"""Decides the chat template, the tool call parser and the reasoning parser, before anything starts."""

from __future__ import annotations

import difflib
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from trtx.config import TopologySpec
from trtx.config.files import read_text
from trtx.config.topology import NO_PARSER
from trtx.config.wording import quoted, shown
from trtx.errors import UsageError
from trtx.prompts.files import chat_template
from trtx.prompts.formats import ParserChoice, reasoning_parser_of, tool_parser_of
from trtx.prompts.same import syntax_error
from trtx.topology import Plan

_AUTO = "auto"
_EXPECTED = "a Jinja chat template, such as a checkpoint's chat_template.jinja"
# Parsers of Dynamo 1.6.1 that load the vocabulary of OpenAI's Harmony format, which no wheel contains.
_HARMONY_PARSERS = frozenset({"harmony", "gpt_oss"})
_HARMONY_FILE, _HARMONY_DIRECTORY = "o200k_base.tiktoken", "TIKTOKEN_ENCODINGS_BASE"


@dataclass(frozen=True, slots=True)
class ChatFormat:
    """The resolved format of chat requests. ``template``: the text that replaces the checkpoint's, or None."""

    tool_call_parser: str | None
    reasoning_parser: str | None
    template: str | None
    reasons: tuple[str, ...]
    warnings: tuple[str, ...]

    def of(self, spec: TopologySpec) -> TopologySpec:
        """``spec`` with the names of the parsers that its workers register."""
        names = {
            "tool_call_parser": self.tool_call_parser or NO_PARSER,
            "reasoning_parser": self.reasoning_parser or NO_PARSER,
        }
        return spec.model_copy(update=names)


def with_chat_format(plan: Plan, chat: ChatFormat) -> Plan:
    """``plan`` with the chat template, the reasons and the warnings of ``chat``."""
    return replace(
        plan,
        chat_template=chat.template,
        reasons=(*plan.reasons, *chat.reasons),
        warnings=(*plan.warnings, *chat.warnings),
    )


def resolve_chat_format(spec: TopologySpec, model: Path, architecture: str) -> ChatFormat:
    """Decides the parsers of ``spec`` for the model in a directory.

    Raises UsageError for a parser that the installed Dynamo lacks and for a file that is not a chat template.
    """
    replacing = None if spec.chat_template is None else read_chat_template(spec.chat_template)
    template = replacing
    if template is None:
        try:
            template = chat_template(model)
        except (OSError, ValueError):  # a worker reports the error in the file
            template = None
    known_tools, known_reasoning = _known_parsers()
    tools, of_tools = _choose(
        "--tool-call-parser", spec.tool_call_parser, known_tools, tool_parser_of(architecture, template)
    )
    reasoning, of_reasoning = _choose(
        "--reasoning-parser", spec.reasoning_parser, known_reasoning, reasoning_parser_of(architecture, template)
    )
    reasons = [f"tool calls: {of_tools}", f"reasoning: {of_reasoning}"]
    if spec.chat_template is not None:
        reasons.append(f"the chat template is {shown(spec.chat_template)} because --chat-template says so")
    return ChatFormat(tools, reasoning, replacing, tuple(reasons), tuple(_warnings(tools, reasoning)))


def read_chat_template(path: Path) -> str:
    """The text of ``--chat-template``. Raises UsageError."""
    text = read_text(path.expanduser(), "--chat-template", _EXPECTED)
    if not text.strip():
        raise UsageError(f"--chat-template {shown(path)} is empty; expected {_EXPECTED}")
    if (problem := syntax_error(text)) is not None:
        raise UsageError(f"--chat-template {shown(path)} is not valid Jinja ({shown(problem, 200)}); correct the file")
    return text


def _known_parsers() -> tuple[list[str], list[str]]:
    """The names of the tool call parsers and the reasoning parsers of the installed Dynamo."""
    from dynamo._core import get_reasoning_parser_names, get_tool_parser_names

    return sorted(get_tool_parser_names()), sorted(get_reasoning_parser_names())


def _choose(option: str, asked: str, known: Sequence[str], found: ParserChoice) -> tuple[str | None, str]:
    """The parser, and the reason for it. Raises UsageError for an unknown name."""
    if asked == NO_PARSER:
        return None, f"no parser because {option} says so"
    if asked != _AUTO:
        if asked not in known:
            raise UsageError(_unknown(option, asked, known))
        return asked, f"Dynamo's parser {asked} because {option} says so"
    if found.parser is not None and found.parser not in known:
        return None, f"no parser because this Dynamo lacks {found.parser}, and {found.because}"
    if found.parser is None:
        return None, f"no parser because {found.because}"
    return found.parser, f"Dynamo's parser {found.parser} because {found.because}"


def _unknown(option: str, asked: str, known: Sequence[str]) -> str:
    near = difflib.get_close_matches(asked, (*known, _AUTO, NO_PARSER), n=1, cutoff=0.5)
    advice = f"did you mean {near[0]}?" if near else f"expected {_AUTO}, {NO_PARSER} or one of {', '.join(known)}"
    return f"{option} {quoted(asked)} is not a parser of the installed Dynamo; {advice}"


def _warnings(*parsers: str | None) -> list[str]:
    needing = [name for name in parsers if name in _HARMONY_PARSERS]
    directory = os.environ.get(_HARMONY_DIRECTORY)
    if not needing or (directory and (Path(directory) / _HARMONY_FILE).is_file()):
        return []
    return [
        f"Dynamo's parser {needing[0]} downloads {_HARMONY_FILE} at the first request, and without the file loses "
        f"tool calls and reasoning; on a machine without internet put it into a directory and set {_HARMONY_DIRECTORY} "
        "to that directory"
    ]
