"""Checks the messages of a chat request, as servers of OpenAI's API do."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from trtx.bench.datasets.wrong_record import WrongRecord

_ROLES = ("system", "developer", "user", "assistant", "tool", "function")  # of OpenAI's API


def check_messages(messages: Sequence[Any], of: str, first: int = 0) -> None:
    """Raises WrongRecord for a message that a server can't read, or for a result of a tool that was not called.

    ``of``: the prefix of names in messages. ``first``: the place of the message with the number 0; those before it
    belong to earlier turns.
    """
    called: set[str] = set()
    for number, message in enumerate(messages):
        name = f"{of}messages[{number - first}]"
        if number >= first:
            _check_content(message, name)
            _check_result(message, name, called)
        for place, call in enumerate(message.get("tool_calls") or ()):
            called.add(_call_id(call, f"{name}.tool_calls[{place}]"))


def _check_content(message: Mapping[str, Any], name: str) -> None:
    role, content = message.get("role"), message.get("content")
    if role not in _ROLES:
        raise WrongRecord(f"{name}.role is {role!r:.60}; expected one of {', '.join(_ROLES)}")
    if isinstance(content, str) or (isinstance(content, list) and content):
        return
    if content is None and role == "assistant" and (message.get("tool_calls") or message.get("function_call")):
        return
    state = f"is {content!r:.60}" if "content" in message else "is missing"
    raise WrongRecord(f"{name}.content {state}; expected text or a list of parts")


def _check_result(message: Mapping[str, Any], name: str, called: set[str]) -> None:
    if message.get("role") != "tool":
        return
    answered = message.get("tool_call_id")
    if answered not in called:
        state = f"is {answered!r:.60}" if "tool_call_id" in message else "is missing"
        raise WrongRecord(f"{name}.tool_call_id {state}; expected the id of a call in an earlier message")


def _call_id(call: Any, name: str) -> str:
    function = call.get("function") if isinstance(call, dict) else None
    if isinstance(function, dict) and isinstance(function.get("name"), str) and isinstance(call.get("id"), str):
        if isinstance(function.get("arguments"), str):
            return str(call["id"])
        raise WrongRecord(f"{name}.function.arguments is not text; expected the JSON text of the arguments")
    raise WrongRecord(
        f'{name} is {call!r:.60}; expected {{"id": "…", "type": "function", "function": {{"name": "…", "arguments": '
        '"…"}}'
    )
