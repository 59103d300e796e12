"""Reads the output format that a request body demands, and judges an answer by it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal, Self

from trtx.bench.answer_formats.content import AnswerContent, ToolCallText
from trtx.bench.answer_formats.text_formats import (
    FORMAT_FIELDS,
    TextFormat,
    WrongFormat,
    broken_by,
    checked_schema,
    parsed_json,
    short,
    text_format,
)

_READ_FIELDS = (*sorted(FORMAT_FIELDS), "stop", "stop_token_ids")
_REMEMBERED = 1024  # formats; a dataset usually has a few

# kept: the answer was checked and follows its format. cut: max_tokens ended it before it was complete. free: the
# request lets the model choose, and it chose an unconstrained answer, such as text instead of an offered tool.
FormatOutcome = Literal["kept", "cut", "broken", "unchecked", "free"]
Asked = Literal["format", "tools"]


@dataclass(frozen=True, slots=True)
class FormatResult:
    """The outcome of one answer, with the reason if it is broken or unchecked."""

    outcome: FormatOutcome
    reason: str = ""


@dataclass(frozen=True, slots=True)
class OfferedTool:
    """A tool of a request. ``arguments``: the validator of its arguments. ``is_strict``: every call must be valid."""

    arguments: Any
    is_strict: bool


@dataclass(frozen=True, slots=True)
class RequestedFormat:
    """The format of the text, the offered tools, and which of them must be called."""

    text: TextFormat | None
    tools: Mapping[str, OfferedTool]
    choice: Literal["none", "auto", "required"]
    named: str | None  # the only tool that may be called
    has_stop: bool

    @classmethod
    def of(cls, body: Mapping[str, Any]) -> Self | None:
        """Reads a request body; None if it demands no format and offers no tools. Raises WrongFormat."""
        tools = _tools(body.get("tools"))
        choice, named = _choice(body.get("tool_choice"), tools)
        text = text_format(body)
        if text is None and not tools:
            return None
        return cls(text, tools, choice, named, bool(body.get("stop") or body.get("stop_token_ids")))

    @classmethod
    def unreadable(cls, reason: str) -> Self:
        """A format that can't be read, so no answer can be checked; ``reason`` says why."""
        return cls(TextFormat(lambda text: None, reason), {}, "auto", None, False)

    @property
    def asked(self) -> tuple[Asked, ...]:
        """Whether the request has a format of the text, tools, or both."""
        return (*(("format",) if self.text else ()), *(("tools",) if self.tools else ()))

    @property
    def needs_guidance(self) -> bool:
        """Whether every answer must follow a format, which requires guided decoding."""
        return self.text is not None or self.choice == "required"

    def judge(self, content: AnswerContent) -> FormatResult:
        """The outcome of an answer that is complete by its finish reason."""
        if self.choice == "required" or content.calls:
            return self._judge_calls(content)
        if self.text is None:
            return FormatResult("free")
        if content.finish_reason == "length":
            return FormatResult("cut")
        if self.text.unchecked:
            return FormatResult("unchecked", self.text.unchecked)
        problem = self.text.problem(content.text)
        if problem and self.has_stop and self.text.ends_with_stop:
            return FormatResult("unchecked", "a stop string may have ended them")
        return FormatResult("broken", problem) if problem else FormatResult("kept")

    def _judge_calls(self, content: AnswerContent) -> FormatResult:
        if content.finish_reason == "length":
            return FormatResult("cut")
        if not content.calls:
            return FormatResult("broken", "the answer calls no tool, although its request requires a call")
        if self.choice == "none":
            return FormatResult("broken", "the answer calls a tool, although tool_choice is none")
        problem = next(filter(None, map(self._call_problem, content.calls)), None)
        return FormatResult("broken", problem) if problem else FormatResult("kept")

    def _call_problem(self, call: ToolCallText) -> str | None:
        tool = self.tools.get(call.name)
        if tool is None:
            return "the answer calls a tool that its request doesn't offer"
        if self.named not in (None, call.name):
            return f"the answer calls {short(call.name)}, although tool_choice names {short(self.named)}"
        try:
            arguments = parsed_json(call.arguments)
        except (ValueError, RecursionError):
            return f"the arguments of a call of {short(call.name)} are not JSON"
        if not isinstance(arguments, dict):
            return f"the arguments of a call of {short(call.name)} are not a JSON object"
        if not tool.is_strict and self.choice != "required":
            return None
        problem = broken_by(tool.arguments, arguments)
        return None if problem is None else f"a call of {short(call.name)} breaks the schema of its arguments {problem}"


def requested_format(body: Mapping[str, Any]) -> RequestedFormat | None:
    """Like :meth:`RequestedFormat.of`, but each format is compiled once. Raises WrongFormat."""
    asked = {name: body[name] for name in _READ_FIELDS if body.get(name) is not None}
    return None if FORMAT_FIELDS.isdisjoint(asked) else _compiled(json.dumps(asked))


@lru_cache(maxsize=_REMEMBERED)
def _compiled(fields: str) -> RequestedFormat | None:
    return RequestedFormat.of(json.loads(fields))


def _tools(value: Any) -> dict[str, OfferedTool]:
    if value is None:
        return {}
    if not isinstance(value, list):
        raise WrongFormat(f"tools is {short(value)}; expected a list of tools")
    found: dict[str, OfferedTool] = {}
    for number, tool in enumerate(value):
        body = tool.get("function") if isinstance(tool, dict) and tool.get("type") == "function" else None
        function = body if isinstance(body, dict) else {}
        name = function.get("name")
        if not isinstance(name, str) or not name:
            raise WrongFormat(
                f'tools[{number}] is {short(tool)}; expected {{"type": "function", "function": {{"name": "…", '
                '"parameters": {…}}}'
            )
        if name in found:
            raise WrongFormat(f"tools[{number}].function.name is {short(name)} a second time; rename one of the tools")
        parameters = function.get("parameters")
        validator = checked_schema({} if parameters is None else parameters, f"tools[{number}].function.parameters")
        found[name] = OfferedTool(validator, bool(function.get("strict")))
    return found


def _choice(value: Any, tools: Mapping[str, OfferedTool]) -> tuple[Literal["none", "auto", "required"], str | None]:
    if value is None:
        return "auto", None
    if value in ("none", "auto"):
        return value, None
    if value == "required":
        if not tools:
            raise WrongFormat("tool_choice is required, but the request has no tools; add tools, or leave it out")
        return "required", None
    function = value.get("function") if isinstance(value, dict) and value.get("type") == "function" else None
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(name, str):
        raise WrongFormat(
            f'tool_choice is {short(value)}; expected none, auto, required, or {{"type": "function", "function": '
            '{"name": "…"}}'
        )
    if name not in tools:
        offered = ", ".join(map(short, tools)) or "none"
        raise WrongFormat(f"tool_choice names the tool {short(name)}, but the request offers {offered}; correct one")
    return "required", name
