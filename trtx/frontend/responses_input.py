"""Converts a request to ``/v1/responses`` to the messages of a chat request."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from trtx.prompts.rendering import Unrenderable

_TEXT_PARTS = ("input_text", "output_text", "text")


def chat_of_responses(request: Mapping[str, Any]) -> dict[str, Any] | None:
    """The chat request with the fields that a chat template reads. None for a request that Dynamo refuses itself.

    Raises Unrenderable for input items that can't be part of a conversation.
    """
    given = request.get("input")
    messages: list[dict[str, Any]] = []
    if isinstance(instructions := request.get("instructions"), str):
        messages.append({"role": "system", "content": instructions})
    if isinstance(given, str):
        messages.append({"role": "user", "content": given})
    elif isinstance(given, list):
        for item in given:
            if not isinstance(item, Mapping):
                return None
            _add(messages, item)
    else:
        return None
    chat: dict[str, Any] = {"messages": messages, "tool_choice": request.get("tool_choice")}
    tools = [_tool(tool) for tool in request.get("tools") or () if isinstance(tool, Mapping) and _is_function(tool)]
    if tools:
        chat["tools"] = tools
    reasoning = request.get("reasoning")
    if isinstance(reasoning, Mapping) and reasoning.get("effort") is not None:
        chat["reasoning_effort"] = reasoning["effort"]
    return chat


def _add(messages: list[dict[str, Any]], item: Mapping[str, Any]) -> None:
    kind = item.get("type", "message")
    if kind == "message" and isinstance(item.get("role"), str):
        messages.append({"role": item["role"], "content": _content(item.get("content"))})
    elif kind == "function_call":
        function = {"name": item.get("name"), "arguments": item.get("arguments")}
        call = {"id": item.get("call_id"), "type": "function", "function": function}
        if messages and messages[-1]["role"] == "assistant" and messages[-1].get("tool_calls"):
            messages[-1]["tool_calls"].append(call)  # parallel calls belong to one message
        else:
            messages.append({"role": "assistant", "content": None, "tool_calls": [call]})
    elif kind == "function_call_output":
        output = item.get("output")
        text = output if isinstance(output, str) else json.dumps(output, ensure_ascii=False)
        messages.append({"role": "tool", "tool_call_id": item.get("call_id"), "content": text})
    elif kind != "reasoning":
        raise Unrenderable(
            f"input contains an item of type {kind}, expected message, function_call or function_call_output; remove "
            "it, or send messages to /v1/chat/completions"
        )


def _content(content: Any) -> Any:
    if not isinstance(content, list):
        return content
    parts = [_part(part) for part in content]
    if all(part["type"] == "text" for part in parts):
        return "".join(part["text"] for part in parts) if len(parts) == 1 else parts
    return parts


def _part(part: Any) -> dict[str, Any]:
    kind = part.get("type") if isinstance(part, Mapping) else None
    if kind in _TEXT_PARTS and isinstance(part.get("text"), str):
        return {"type": "text", "text": part["text"]}
    if kind == "input_image":
        return {"type": "image_url"}
    if kind == "input_audio":
        return {"type": "input_audio"}
    raise Unrenderable(f"input contains content of type {kind}, expected input_text or input_image; remove it")


def _is_function(tool: Mapping[str, Any]) -> bool:
    return tool.get("type") == "function" and isinstance(tool.get("name"), str)


def _tool(tool: Mapping[str, Any]) -> dict[str, Any]:
    function = {
        name: tool[name] for name in ("name", "description", "parameters", "strict") if tool.get(name) is not None
    }
    return {"type": "function", "function": function}
