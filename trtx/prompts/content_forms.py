"""Converts each message's content to a form that the chat template prints.

OpenAI's API accepts content as a string or as a list of parts, but many templates print only one of the two: Qwen3's
ignores lists, LLaVA's ignores strings, and a template with ``content | trim`` prints a list as Python code. vLLM and
Dynamo choose one form for all requests to a model. This module renders the template with marks in the texts and chooses
a form for each message, because a template may treat roles differently.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator
from typing import Any

Message = dict[str, Any]
Render = Callable[[list[Message]], str | None]
"""Renders messages to text. Returns None if the template raises an error."""

_MARK = "\x01{}\x01"
"""Contains control characters, which repr() and JSON escape: a list printed as code does not contain the mark."""
_MARK_IN_STRING = f"m{uuid.uuid4().hex}n{{}}m"
"""Letters and digits that no client's text has: a string counts as printed if JSON, escaped, cut or capitalized."""


class ContentForms:
    """The content forms that one template prints. ``choose`` may be called from several threads."""

    def __init__(self) -> None:
        self._printed_roles: set[str] = set()  # roles whose string content the template prints

    def choose(self, messages: list[Message], render: Render, *, has_values: bool = False) -> list[Message]:
        """``messages`` with the content of each in the first form that ``render`` prints.

        The forms are: as sent; text parts joined with line breaks; a string as a list of one part. Content that
        ``render`` prints in none of them stays as sent. ``has_values``: the request sets variables of the template.
        They can change what it prints, so nothing is remembered from or for such a request.
        """
        known = set() if has_values else self._printed_roles
        missing = {at for at, message in enumerate(messages) if not _is_known(message, known)}
        chosen = list(messages)
        for form in (dict, _with_joined_text, _with_parts):
            tried = [form(message) for message in messages]
            if not missing or (form is not dict and tried == messages):
                continue
            found = _printed(tried, render, is_sent=form is dict)
            for at in found & missing:
                chosen[at] = tried[at]
            missing -= found
            if form is dict and not has_values:
                self._printed_roles |= {_role(messages[at]) for at in found if isinstance(messages[at]["content"], str)}
        return chosen


def _is_known(message: Message, printed_roles: set[str]) -> bool:
    content = message.get("content")
    return not content or (isinstance(content, str) and _role(message) in printed_roles)


def _role(message: Message) -> str:
    return str(message.get("role"))


def _with_joined_text(message: Message) -> Message:
    """``message`` with its text parts joined to one string, as vLLM and Dynamo do for templates that take strings."""
    parts = message.get("content")
    texts = [_text_of(part) for part in parts] if isinstance(parts, list) else []
    if not texts or not all(isinstance(text, str) for text in texts):
        return message
    return {**message, "content": "\n".join(map(str, texts))}


def _with_parts(message: Message) -> Message:
    content = message.get("content")
    return {**message, "content": [{"type": "text", "text": content}]} if isinstance(content, str) else message


def _printed(messages: list[Message], render: Render, *, is_sent: bool) -> set[int]:
    """Indices of the messages that have texts and whose texts ``render`` prints all."""
    count = iter(range(1 << 30))
    marks: dict[int, list[str]] = {}
    marked = []
    for at, message in enumerate(messages):
        found: list[str] = []
        marked.append({**message, "content": _marked(message.get("content"), count, found, is_sent=is_sent)})
        if found:
            marks[at] = found
    if (text := render(marked)) is None:
        return set()
    lower = text.lower()
    return {at for at, found in marks.items() if all(mark in lower for mark in found)}


def _marked(content: Any, count: Iterator[int], found: list[str], *, is_sent: bool) -> Any:
    """``content`` with a mark at the end of each text. Appends the marks to ``found``.

    The marks are at the end, because templates remove a model's thoughts from the beginning of its answers. A string as
    sent (``is_sent``) gets a mark at both ends.
    """
    if isinstance(content, str) and is_sent:
        found.append(_MARK_IN_STRING.format(next(count)))
        return found[-1] + content + found[-1]

    def mark(text: str) -> str:
        found.append(_MARK.format(next(count)))
        return text + found[-1]

    if isinstance(content, str):
        return mark(content)
    if isinstance(content, list):
        return [{**part, "text": mark(_text_of(part))} if _text_of(part) is not None else part for part in content]
    return content


def _text_of(part: Any) -> Any:
    """The text of a text part; None for another part."""
    is_text = isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str)
    return part["text"] if is_text else None
