"""Gives each message's content to a chat template in a form whose text the template prints.

OpenAI's API takes content as a string or as a list of parts, and many templates print only one of the two: Qwen3's
prints nothing of a list, LLaVA's nothing of a string, and a template with ``content | trim`` prints the list as Python
code. vLLM and Dynamo choose one form for all requests of a model. Here the template itself is tried, message by
message, with marks in the texts, so that templates that treat roles differently get what they print too.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator
from typing import Any

Message = dict[str, Any]
Render = Callable[[list[Message]], str | None]
"""The rendered text of messages; None where the template fails over them."""

_MARK = "\x01{}\x01"
"""Control characters: repr() and JSON escape them, so a mark inside a printed list does not count as printed text."""
_MARK_IN_STRING = f"m{uuid.uuid4().hex}n{{}}m"
"""Letters and digits, in no client's text: a string as sent counts as printed in JSON, escaped, cut or capitalized."""


class ContentForms:
    """What one template prints. ``choose`` may be called from several threads."""

    def __init__(self) -> None:
        self._printed_roles: set[str] = set()  # roles whose strings the template printed: these need no trial

    def choose(self, messages: list[Message], render: Render) -> list[Message]:
        """``messages`` with the content of each in the first form whose text ``render`` prints: as sent, text parts
        joined with a line break, a string as a list of one part. Content that is printed in no form stays as sent."""
        missing = {at for at, message in enumerate(messages) if not self._is_known(message)}
        chosen = list(messages)
        for form in (dict, _with_joined_text, _with_parts):
            tried = [form(message) for message in messages]
            if not missing or (form is not dict and tried == messages):
                continue
            found = _printed(tried, render, is_sent=form is dict)
            for at in found & missing:
                chosen[at] = tried[at]
            missing -= found
            if form is dict:
                self._printed_roles |= {_role(messages[at]) for at in found if isinstance(messages[at]["content"], str)}
        return chosen

    def _is_known(self, message: Message) -> bool:
        content = message.get("content")
        return not content or (isinstance(content, str) and _role(message) in self._printed_roles)


def _role(message: Message) -> str:
    return str(message.get("role"))


def _with_joined_text(message: Message) -> Message:
    """``message`` with its text parts as one string. vLLM and Dynamo give it to templates that take strings alone."""
    parts = message.get("content")
    texts = [_text_of(part) for part in parts] if isinstance(parts, list) else []
    if not texts or not all(isinstance(text, str) for text in texts):
        return message
    return {**message, "content": "\n".join(map(str, texts))}


def _with_parts(message: Message) -> Message:
    content = message.get("content")
    return {**message, "content": [{"type": "text", "text": content}]} if isinstance(content, str) else message


def _printed(messages: list[Message], render: Render, *, is_sent: bool) -> set[int]:
    """Indices of the messages whose texts ``render`` prints, each of them; a message without text is not among them."""
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
    """``content`` with a mark at the end of each text, which goes to ``found``: at the end, since templates cut the
    beginning of an answer that has a model's thoughts. A string as sent has it at both ends."""
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
