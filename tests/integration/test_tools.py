"""Tool calls and reasoning through ``trtx serve``, with a real frontend, real workers and a scripted model.

One topology of each mode answers the requests of all tests.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from processes import HTTP
from scripted_model import choice, write_scripted
from topology_clients import trtx_serve

from trtx.topology import Plan

pytestmark = pytest.mark.slow

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": "Does it.",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
        },
    }
    for name in ("get_weather", "get_time")
]
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Zürich"}}\n</tool_call>'
TEXTS = {
    "text": "Nothing to call here.",
    "two": 'Sure: <tool_call>\n{"name": "get_time", "arguments": {"city": "Bern"}}\n</tool_call> and then '
    '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Genève \\"{}<\\""}}\n</tool_call>',
    "agent": f"<think>The weather is needed.</think>\n\n{CALL}",
    "half": 'x <tool_call>\n{"name": "get_weather", "argu',
}
# As Qwen3's: it shows the tools, writes earlier calls, and can begin the reasoning itself.
TEMPLATE = (
    "{%- if tools %}{{ '<tools>' + tools | tojson + '</tools>\\n' }}{% endif %}"
    "{%- for message in messages %}{% if message.role == 'oops' %}{{ raise_exception('Oops is no role.') }}{% endif %}"
    "{%- for call in message.tool_calls or [] %}{{ '<tool_call>' + call.function.arguments | tojson }}{% endfor %}"
    "{{- message.content or '' }}{% endfor %}{# </think> #}"
    "{%- if opens %}{{ '<think>' }}{% endif %}"
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_scripted(tmp_path_factory.mktemp("model") / "scripted", TEXTS, TEMPLATE)


@pytest.fixture(scope="module", params=["agg", pytest.param("disagg", marks=pytest.mark.proof)])
def served(model: Path, request: pytest.FixtureRequest) -> Iterator[Plan]:
    with trtx_serve("--engine", "torch", "--mode", request.param, "--model", str(model)) as serve:
        yield serve.wait_ready(120)


def chat(served: Plan, said: str, **fields: Any) -> Any:
    """The answer to a chat request to which the model says ``TEXTS[said]``."""
    body = {"messages": [{"role": "user", "content": choice(said)}], **fields}
    return ask(served, "chat/completions", body)


def ask(served: Plan, path: str, body: dict[str, Any]) -> Any:
    answer = HTTP.post(f"{served.url}/v1/{path}", json={"model": served.model, "temperature": 0, **body}, timeout=60)
    if not body.get("stream") or answer.status_code != 200:
        return answer.status_code, answer.json()
    lines = [line.removeprefix("data: ") for line in answer.text.splitlines() if line.startswith("data: {")]
    return [json.loads(line)["choices"][0] for line in lines if json.loads(line)["choices"]]


def joined(choices: list[dict[str, Any]]) -> tuple[dict[str, Any], str]:
    """The message that a client makes of the deltas, and its last finish reason."""
    message: dict[str, Any] = {"content": "", "reasoning_content": "", "calls": {}}
    for delta in (one["delta"] for one in choices):
        for name in ("content", "reasoning_content"):
            message[name] += delta.get(name) or ""
        for call in delta.get("tool_calls") or []:
            name, arguments = message["calls"].get(call["index"], ("", ""))
            function = call.get("function") or {}
            whole = (name + (function.get("name") or ""), arguments + (function.get("arguments") or ""))
            message["calls"][call["index"]] = whole
    return message, [one["finish_reason"] for one in choices if one["finish_reason"]][-1]


def message_of(answer: tuple[int, Any]) -> tuple[dict[str, Any], str]:
    code, body = answer
    assert code == 200, body
    message = body["choices"][0]["message"]
    calls = {
        at: (one["function"]["name"], one["function"]["arguments"])
        for at, one in enumerate(message.get("tool_calls") or [])
    }
    texts = {name: message.get(name) or "" for name in ("content", "reasoning_content")}
    return {**texts, "calls": calls}, body["choices"][0]["finish_reason"]


def both(served: Plan, said: str, **fields: Any) -> tuple[dict[str, Any], str]:
    """The message of a whole answer, which must be that of a stream."""
    whole = message_of(chat(served, said, **fields))
    assert joined(chat(served, said, stream=True, **fields)) == whole
    return whole


def test_calls_and_reasoning_are_parsed_by_the_parsers_that_the_template_chose(served: Plan) -> None:
    said = " ".join(served.reasons)
    assert "tool calls: Dynamo's parser hermes because the chat template contains <tool_call>" in said
    assert "reasoning: Dynamo's parser qwen3 because the chat template contains <think>" in said
    message, finish = both(served, "agent", tools=TOOLS)
    assert message["reasoning_content"] == "The weather is needed."
    assert message["content"].strip() == ""
    assert message["calls"] == {0: ("get_weather", '{"city": "Zürich"}')}
    assert finish == "tool_calls"


def test_streamed_deltas_join_to_every_call_of_an_answer(served: Plan) -> None:
    message, finish = both(served, "two", tools=TOOLS)
    assert [(name, json.loads(text)) for name, text in message["calls"].values()] == [
        ("get_time", {"city": "Bern"}),
        ("get_weather", {"city": 'Genève "{}<"'}),
    ]
    assert (message["content"].split(), finish) == (["Sure:", "and", "then"], "tool_calls")


def test_a_text_stays_text_beside_tools(served: Plan) -> None:
    message, finish = both(served, "text", tools=TOOLS)
    assert (message["content"], message["calls"], finish) == (TEXTS["text"], {}, "stop")


def test_reasoning_that_the_template_begins_is_found_by_its_end_alone(served: Plan) -> None:
    message, _ = both(served, "text", tools=TOOLS, chat_template_kwargs={"opens": True})
    assert message["reasoning_content"] == "The weather is needed."
    assert message["calls"] == {0: ("get_weather", '{"city": "Zürich"}')}


def test_half_a_call_is_never_told_as_a_whole_one(served: Plan) -> None:
    message, finish = both(served, "half", tools=TOOLS)
    assert (message["calls"], finish) == ({}, "stop")
    for length in range(13, 34, 4):  # within the name, before the arguments, and within them
        cut, finish = both(served, "two", tools=TOOLS, max_tokens=length)
        assert (cut["calls"], finish) == ({}, "length")


@pytest.mark.parametrize("forced", ["required", {"type": "function", "function": {"name": "get_time"}}], ids=str)
def test_a_forced_call_that_is_cut_leaves_no_text(served: Plan, forced: Any) -> None:
    for length in (1, 5):
        streamed, finish = joined(chat(served, "two", tools=TOOLS, tool_choice=forced, max_tokens=length, stream=True))
        assert (streamed["content"], finish) == ("", "length")
        whole, finish = message_of(chat(served, "two", tools=TOOLS, tool_choice=forced, max_tokens=length))
        assert (whole["content"], whole["calls"], finish) == ("", {}, "length")


@pytest.mark.parametrize("fields", [{"tools": TOOLS, "tool_choice": "none"}, {}])
def test_an_answer_to_a_request_without_callable_tools_has_no_call(served: Plan, fields: dict[str, Any]) -> None:
    message, finish = both(served, "agent", **fields)
    assert (message["calls"], finish) == ({}, "stop")
    assert message["content"].strip() == CALL


@pytest.mark.parametrize("is_streamed", [False, True])
def test_a_request_that_a_worker_refuses_gets_its_sentence_beside_tools(served: Plan, is_streamed: bool) -> None:
    body = {"messages": [{"role": "user", "content": choice("text")}], "tools": TOOLS, "allowed_token_ids": [70]}
    url = f"{served.url}/v1/chat/completions"
    answer = HTTP.post(url, json={"model": served.model, "stream": is_streamed, **body}, timeout=60)
    assert "allowed_token_ids" in answer.text and "400" in answer.text
    # A stream without prefill has begun before a worker sees the request.
    assert answer.status_code == (200 if is_streamed and served.mode == "agg" else 400)


@pytest.mark.parametrize("is_streamed", [False, True])
@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"tool_choice": {"type": "function", "function": {"name": "fly"}}}, 'tool named "fly" in tool_choice'),
        ({"tool_choice": "required", "tools": []}, "tools array cannot be empty"),
        ({"messages": [{"role": "oops", "content": "x"}]}, "Oops is no role."),
    ],
)
def test_a_request_that_can_not_be_served_gets_a_400_with_its_reason(
    served: Plan, fields: dict[str, Any], said: str, is_streamed: bool
) -> None:
    code, body = chat(served, "text", **{"tools": TOOLS, **fields, "stream": is_streamed})
    assert (code, said in json.dumps(body).replace('\\"', '"')) == (400, True), body


def test_responses_have_calls_and_reasoning_apart_from_the_text(served: Plan) -> None:
    tools = [{"type": "function", **one["function"]} for one in TOOLS]
    code, body = ask(served, "responses", {"input": choice("agent"), "tools": tools})
    assert code == 200, body
    (call,) = [one for one in body["output"] if one["type"] == "function_call"]
    assert (call["name"], call["arguments"]) == ("get_weather", '{"city": "Zürich"}')
    assert "needed" not in json.dumps([one for one in body["output"] if one["type"] == "message"])


@pytest.mark.proof  # the stand-in's topology; the torch engine's is above
def test_workers_of_the_simulated_engine_register_parsers_and_template(tmp_path: Path) -> None:
    (tmp_path / "mine.jinja").write_text(TEMPLATE)
    asked = ("--chat-template", str(tmp_path / "mine.jinja"), "--reasoning-parser", "basic")
    with trtx_serve("--engine", "simulated", "--mode", "disagg", *asked) as serve:
        plan = serve.wait_ready(120)
        cards = [json.loads(path.read_text())["card_json"] for path in plan.discovery_dir.glob("v1/mdc/*")]
        assert len(cards) == 2
        for card in cards:
            registered = card["runtime_config"]
            assert (registered["tool_call_parser"], registered["reasoning_parser"]) == ("hermes", "basic")
            assert card["chat_template_file"]["hf_chat_template"]["file"]["size"] == len(TEMPLATE.encode())
        assert (plan.run_dir / "serve" / "configs" / "chat_template.jinja").read_text() == TEMPLATE
        code, answer = ask(plan, "chat/completions", {"messages": [{"role": "oops", "content": "x"}]})
        assert (code, "Oops is no role." in answer["message"]) == (400, True)
