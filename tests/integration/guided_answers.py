"""Sends requests that ask for structured output or tools, and joins what comes back, streamed or not."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

from processes import HTTP, Topology

OWN: dict[str, dict[str, Any]] = {
    "chat/completions": {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 400, "seed": 1},
    "completions": {"prompt": "hello", "max_tokens": 400, "seed": 1},
    # this route drops the seed
    "responses": {"input": "hello", "max_output_tokens": 400, "temperature": 0},
}


@dataclass
class GuidedAnswer:
    """One answer. ``calls``: name and arguments of each tool call. ``error``: the message of a refusal."""

    status: int
    text: str = ""
    calls: list[tuple[str, str]] = field(default_factory=list)
    finish_reason: str | None = None
    error: str = ""

    @property
    def is_whole(self) -> bool:
        return self.status == 200 and not self.error and self.finish_reason in ("stop", "tool_calls", "completed")


def ask(running: Topology, route: str, *, stream: bool = False, **body: Any) -> GuidedAnswer:
    whole = {"model": running.model_name, **OWN[route], **body} | ({"stream": True} if stream else {})
    answer = HTTP.post(f"{running.url}/v1/{route}", json=whole, timeout=120)
    if answer.status_code != 200:
        return GuidedAnswer(answer.status_code, error=answer.json()["message"])
    if not stream:
        return _of_response(answer.json()) if route == "responses" else _of_choice(answer.json()["choices"][0])
    events = [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: {")]
    return _of_response_events(events) if route == "responses" else _of_chunks(events)


def _of_choice(choice: dict[str, Any]) -> GuidedAnswer:
    message = choice.get("message") or {"content": choice.get("text")}
    calls = [(call["function"]["name"], call["function"]["arguments"]) for call in message.get("tool_calls") or []]
    return GuidedAnswer(200, message.get("content") or "", calls, choice["finish_reason"])


def _of_chunks(events: list[dict[str, Any]]) -> GuidedAnswer:
    found = GuidedAnswer(200)
    calls: dict[int, list[str]] = {}
    for event in events:
        if "error" in event:
            found.error = event["error"]["message"]
            continue
        for choice in event["choices"]:
            delta = choice.get("delta") or {"content": choice.get("text")}
            found.text += delta.get("content") or ""
            found.finish_reason = choice.get("finish_reason") or found.finish_reason
            for call in delta.get("tool_calls") or []:
                joined = calls.setdefault(call["index"], ["", ""])
                joined[0] += call["function"].get("name") or ""
                joined[1] += call["function"].get("arguments") or ""
    assert list(calls) == list(range(len(calls)))
    found.calls = [(name, arguments) for name, arguments in calls.values()]
    return found


def _of_response(response: dict[str, Any]) -> GuidedAnswer:
    found = GuidedAnswer(200, finish_reason=response["status"])
    for item in response["output"]:
        if item["type"] == "function_call":
            found.calls.append((item["name"], item["arguments"]))
        else:
            found.text += "".join(part["text"] for part in item["content"])
    return found


def _of_response_events(events: list[dict[str, Any]]) -> GuidedAnswer:
    """The last event holds the whole response; the deltas must join to it."""
    last = events[-1]
    if last["type"] == "response.failed":
        return GuidedAnswer(200, error="response.failed")
    found = _of_response(last["response"])
    text = "".join(event["delta"] for event in events if event["type"] == "response.output_text.delta")
    arguments = "".join(event["delta"] for event in events if event["type"] == "response.function_call_arguments.delta")
    assert (text, arguments) == (found.text, "".join(given for _, given in found.calls))
    return found
