"""Writes the loads of agents in sweeps/agents/: recorded tool conversations, and sessions for aiperf's agentic replay.

Everything is made up here from a seed, so the files have this repository's licence, and each run writes the same bytes:
``python tools/agent_load.py [DIRECTORY]``.
"""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path
from typing import Any

SEED = 7
CONVERSATIONS = 24
SESSIONS = 8
_CITIES = ("Oslo", "Lima", "Cairo", "Quito", "Delhi", "Perth")
_BLOCK_TOKENS = 16  # the block size of trtx's KV cache on a CPU
_TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string", "enum": list(_CITIES)}},
                "required": ["city"],
                "additionalProperties": False,
            },
        },
    },
    {
        "type": "function",
        "function": {
            "name": "add",
            "parameters": {
                "type": "object",
                "properties": {
                    "a": {"type": "integer", "minimum": 0, "maximum": 99},
                    "b": {"type": "integer", "minimum": 0, "maximum": 99},
                },
                "required": ["a", "b"],
                "additionalProperties": False,
            },
        },
    },
]
_REPORT = {
    "type": "json_schema",
    "json_schema": {
        "name": "report",
        "strict": True,
        "schema": {
            "type": "object",
            "properties": {
                "city": {"type": "string", "enum": list(_CITIES)},
                "celsius": {"type": "integer", "minimum": -30, "maximum": 50},
                "warm": {"type": "boolean"},
            },
            "required": ["city", "celsius", "warm"],
            "additionalProperties": False,
        },
    },
}


def conversation(number: int) -> dict[str, Any]:
    """Four turns: a call that the request forces, the answer to its result, a call by name, and a JSON document."""
    random_ = random.Random(f"{SEED}:{number}")
    city, celsius = random_.choice(_CITIES), random_.randint(-10, 35)
    other = random_.randint(1, 9)
    return {
        "session_id": f"conversation-{number:02d}",
        "tools": _TOOLS,
        "max_tokens": 128,
        "turns": [
            {
                "messages": [
                    {"role": "system", "content": "Call a tool if you need one."},
                    {"role": "user", "content": f"What is the weather in {city}?"},
                ],
                "tool_choice": "required",
            },
            {
                "messages": [_called("get_weather", {"city": city}), _result(f'{{"celsius": {celsius}}}')],
                "max_tokens": 24,
                "delay": random_.randint(20, 80),
            },
            {
                "messages": [
                    {"role": "assistant", "content": f"It is {celsius} degrees in {city}."},
                    {"role": "user", "content": f"Add {other} to that."},
                ],
                "tool_choice": {"type": "function", "function": {"name": "add"}},
                "delay": random_.randint(50, 200),
            },
            {
                "messages": [
                    _called("add", {"a": celsius, "b": other}),
                    _result(f"{celsius + other}"),
                    {"role": "user", "content": "Write a report."},
                ],
                "tools": None,
                "response_format": _REPORT,
                "delay": random_.randint(20, 80),
            },
        ],
    }


def _called(name: str, arguments: dict[str, Any]) -> dict[str, Any]:
    function = {"name": name, "arguments": json.dumps(arguments)}
    return {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"id": f"call-{name}", "type": "function", "function": function}],
    }


def _result(text: str) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": "call-get_weather" if "celsius" in text else "call-add", "content": text}


def session(number: int) -> dict[str, Any]:
    """An agent's session in aiperf's form weka_trace; every fourth one starts a sub-agent."""
    random_ = random.Random(f"{SEED}:session:{number}")
    requests: list[dict[str, Any]] = []
    at, tokens = 0.0, 96
    for turn in range(random_.randint(4, 7)):
        requests.append(_request(random_, at, tokens, "text" if turn == 0 else "tool_result"))
        at = round(at + requests[-1]["api_time"] + random_.uniform(0.05, 0.3), 3)
        tokens += requests[-1]["out"] + random_.randint(16, 64)
        if turn == 1 and number % 4 == 0:
            requests.append(_subagent(random_, at))
            at = round(at + requests[-1]["duration_ms"] / 1000 + 0.05, 3)
    return {
        "id": f"session-{number:02d}",
        "models": ["agent"],
        "block_size": _BLOCK_TOKENS,
        "hash_id_scope": "local",
        "tool_tokens": 48,
        "system_tokens": 32,
        "requests": requests,
    }


def _request(random_: random.Random, at: float, tokens: int, kind: str, first_block: int = 1) -> dict[str, Any]:
    blocks = -(-tokens // _BLOCK_TOKENS)
    return {
        "t": at,
        "type": "s",
        "model": "agent",
        "in": tokens,
        "out": random_.randint(8, 24),
        "hash_ids": list(range(first_block, first_block + blocks)),
        "input_types": [kind],
        "output_types": ["tool_use"],
        "stop": "tool_use",
        "api_time": round(random_.uniform(0.05, 0.2), 3),
        "think_time": 0.1,
        "ttft": 0.02,
    }


def _subagent(random_: random.Random, at: float) -> dict[str, Any]:
    first = _request(random_, at, 80, "text", first_block=1000)
    second = _request(random_, round(at + 0.3, 3), 80 + first["out"] + 32, "tool_result", first_block=1000)
    return {
        "t": at,
        "type": "subagent",
        "agent_id": "agent_001",
        "subagent_type": "Explore",
        "duration_ms": 600,
        "total_tokens": first["in"] + first["out"] + second["in"] + second["out"],
        "tool_use_count": 1,
        "status": "completed",
        "requests": [first, second],
        "models": ["agent"],
    }


def write(directory: Path) -> None:
    """Writes ``conversations.jsonl`` and ``sessions/``."""
    sessions = directory / "sessions"
    sessions.mkdir(parents=True, exist_ok=True)
    lines = [json.dumps(conversation(number)) for number in range(CONVERSATIONS)]
    (directory / "conversations.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    for number in range(SESSIONS):
        text = json.dumps(session(number)) + "\n"
        (sessions / f"session-{number:02d}.json").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    write(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parents[1] / "sweeps" / "agents")
