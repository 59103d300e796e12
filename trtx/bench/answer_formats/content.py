"""Collects the text and the tool calls of an answer, from a stream or from one document."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(slots=True)
class ToolCallText:
    """One tool call: the name of the tool, and its arguments as the server wrote them."""

    name: str = ""
    arguments: str = ""


@dataclass(slots=True)
class AnswerContent:
    """Text and tool calls of the only choice of an answer; reasoning is not part of its text."""

    text: str = ""
    finish_reason: str | None = None
    _calls: dict[int, ToolCallText] = field(default_factory=dict)

    @property
    def calls(self) -> tuple[ToolCallText, ...]:
        return tuple(self._calls[index] for index in sorted(self._calls))

    def add(self, document: Mapping[str, Any]) -> None:
        """Adds one decoded event of a stream, or a whole body."""
        choices = document.get("choices")
        choice = choices[0] if isinstance(choices, list) and choices else None
        if not isinstance(choice, dict):
            return
        if reason := choice.get("finish_reason"):
            self.finish_reason = str(reason)
        part = choice.get("delta") or choice.get("message")
        if not isinstance(part, dict):
            return
        if isinstance(text := part.get("content"), str):
            self.text += text
        calls = part.get("tool_calls")
        for position, call in enumerate(calls if isinstance(calls, list) else ()):
            if isinstance(call, dict):
                self._add_call(position, call)

    def _add_call(self, position: int, call: Mapping[str, Any]) -> None:
        index = call.get("index")
        one = self._calls.setdefault(index if isinstance(index, int) else position, ToolCallText())
        function = call.get("function")
        if not isinstance(function, dict):
            return
        one.name = one.name or str(function.get("name") or "")
        one.arguments += str(function.get("arguments") or "")
