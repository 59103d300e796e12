"""``synthetic:tiny-tools`` calls tools and thinks, measured on what it was never trained on."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from tool_conversations import MIX, Conversation, conversations
from tool_rendering import encoded, pieces, rendered
from tool_world import is_held_out
from transformers import AutoTokenizer

from trtx import LLM, SamplingParams
from trtx.checkpoint import resolve_checkpoint
from trtx.checkpoint.tokenizer import IM_END

pytestmark = pytest.mark.slow

LEAST_RIGHT = 0.85  # of the turns; TRAINING.md beside the weights has the shares by kind
GREEDY = SamplingParams(max_tokens=160, temperature=0)
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather of a city.",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string", "title": "City", "description": "Where?"},
                "unit": {"type": "string", "enum": ["celsius", "fahrenheit"], "default": "celsius"},
            },
            "required": ["city"],
            "additionalProperties": False,
        },
        "strict": True,
    },
}
TIME = {
    "type": "function",
    "function": {"name": "get_time", "parameters": {"properties": {"city": {"type": "string"}}}},
}
ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": "integer"}, "b": {"anyOf": [{"type": "integer"}, {"type": "number"}]}},
            "required": ["a", "b"],
        },
    },
}
NOW = {"type": "function", "function": {"name": "now"}}


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(resolve_checkpoint("synthetic:tiny-tools").path)


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM("synthetic:tiny-tools", max_seq_len=1024, kv_cache_config={"max_tokens": 16384}) as engine:
        yield engine


def call(name: str, arguments: Any) -> dict[str, Any]:
    function = {"name": name, "arguments": arguments}
    return {"role": "assistant", "content": None, "tool_calls": [{"id": "1", "type": "function", "function": function}]}


def test_the_template_writes_tools_calls_and_results_as_hermes_does(tokenizer: Any) -> None:
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "What is the weather in Paris and 2 + 3?"},
        call("get_weather", {"city": "Paris"}),
        {"role": "tool", "tool_call_id": "1", "content": "sunny"},
        call("add", '{"a": 2, "b": 3}'),
        {"role": "tool", "tool_call_id": "1", "content": [{"type": "text", "text": "5"}]},
        {"role": "assistant", "content": "The weather in Paris is sunny. 2 plus 3 is 5."},
        {"role": "user", "content": "Thanks!"},
    ]
    text = tokenizer.apply_chat_template(
        messages, tools=[WEATHER, TIME, ADD, NOW], add_generation_prompt=True, tokenize=False
    )
    assert text == (
        "<|im_start|>system\nBe brief.\n\n# Tools\n<tools>\n"
        '{"name": "get_weather", "parameters": {"city": "string"}}\n'
        '{"name": "get_time", "parameters": {"city": "string"}}\n'
        '{"name": "add", "parameters": {"a": "integer", "b": "any"}}\n'
        '{"name": "now", "parameters": {}}\n'
        "</tools><|im_end|>\n"
        "<|im_start|>user\nWhat is the weather in Paris and 2 + 3?<|im_end|>\n"
        "<|im_start|>assistant\n<think>\n\n</think>\n\n"
        '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call><|im_end|>\n'
        "<|im_start|>user\n<tool_response>\nsunny\n</tool_response><|im_end|>\n"
        "<|im_start|>assistant\n<think>\n\n</think>\n\n"
        '<tool_call>\n{"name": "add", "arguments": {"a": 2, "b": 3}}\n</tool_call><|im_end|>\n'
        "<|im_start|>user\n<tool_response>\n5\n</tool_response><|im_end|>\n"
        "<|im_start|>assistant\n<think>\n\n</think>\n\n"
        "The weather in Paris is sunny. 2 plus 3 is 5.<|im_end|>\n"
        "<|im_start|>user\nThanks!<|im_end|>\n"
        "<|im_start|>assistant\n<think>\n\n</think>\n\n"
    )


def test_the_template_joins_the_results_of_calls_that_were_made_at_once(tokenizer: Any) -> None:
    both = call("get_weather", {"city": "Oslo"})
    both["tool_calls"] += call("get_time", {"city": "Rome"})["tool_calls"]
    messages = [
        {"role": "user", "content": "Go."},
        both,
        {"role": "tool", "content": "cold"},
        {"role": "tool", "content": "10:30"},
    ]
    text = tokenizer.apply_chat_template(messages, tokenize=False)
    assert text.endswith(
        '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Oslo"}}\n</tool_call>\n'
        '<tool_call>\n{"name": "get_time", "arguments": {"city": "Rome"}}\n</tool_call><|im_end|>\n'
        "<|im_start|>user\n<tool_response>\ncold\n</tool_response>\n"
        "<tool_response>\n10:30\n</tool_response><|im_end|>\n"
    )


def test_the_template_closes_the_thinking_unless_it_is_enabled(tokenizer: Any) -> None:
    asked = [{"role": "user", "content": "Hi!"}]
    ends = {}
    for enabled in (None, False, True):
        values = {} if enabled is None else {"enable_thinking": enabled}
        ends[enabled] = tokenizer.apply_chat_template(asked, add_generation_prompt=True, tokenize=False, **values)
    assert ends[None] == ends[False] == ends[True] + "<think>\n\n</think>\n\n"
    assert ends[True].endswith("<|im_start|>assistant\n")


def test_thoughts_that_the_client_returns_are_in_the_prompt_as_the_model_wrote_them(tokenizer: Any) -> None:
    thought = "<think>\nNo tool is needed.\n</think>\n\nHello! How can I help?"
    separate = {"role": "assistant", "reasoning_content": "No tool is needed.", "content": "Hello! How can I help?"}
    for said in (separate, {"role": "assistant", "content": thought}):
        text = tokenizer.apply_chat_template([{"role": "user", "content": "Hi!"}, said], tokenize=False)
        assert text == f"<|im_start|>user\nHi!<|im_end|>\n<|im_start|>assistant\n{thought}<|im_end|>\n"


def test_a_word_has_the_same_tokens_wherever_it_is(tokenizer: Any) -> None:
    def ids(text: str) -> list[int]:
        return tokenizer.encode(text, add_special_tokens=False)

    for word in ("Paris", "Zanzibar", "Örebro", "4711", "x-ray"):
        for before, after in ((" ", "?"), ('"', '"}}'), ("\n", "\n"), (" ", ".")):
            assert ids(before + word + after) == ids(before) + ids(word) + ids(after)


def test_marks_are_one_token_each_and_stay_in_the_text(tokenizer: Any) -> None:
    for mark in ("<think>", "</think>", "<tool_call>", "</tool_call>"):
        ids = tokenizer.encode(mark, add_special_tokens=False)
        assert len(ids) == 1
        assert tokenizer.decode(ids, skip_special_tokens=True) == mark


def test_nothing_of_the_held_out_split_is_trained_on() -> None:
    def found(split: Any) -> set[str]:
        drawn = itertools.islice(conversations(split, 0), 1500)
        calls = (call for one in drawn for message in one.messages for call in message.get("tool_calls", ()))
        arguments = (call["function"]["arguments"] for call in calls)
        return {json.dumps(list(values.values())) for values in arguments if len(values) == 1}

    train, held_out = found("train"), found("held-out")
    assert len(train) > 500 and len(held_out) > 500
    places = {values for values in held_out if is_held_out("entity", json.loads(values)[0])}
    assert len(places) > 300
    assert not places & train


def test_the_rendered_turns_are_the_tokens_of_the_whole_text(tokenizer: Any) -> None:
    def ids(text: str) -> list[int]:
        return tokenizer.encode(text, add_special_tokens=False)

    for one in itertools.islice(conversations("train", 3), 100):
        text = rendered(tokenizer, one)
        found, answers = encoded(ids, text)
        assert found == ids(text)
        assert all(found[end - 1] == tokenizer.eos_token_id for _, end in answers)
        assert "".join(piece.text for piece in pieces(text)) == text


def turns(tokenizer: Any, conversation: Conversation) -> Iterator[tuple[str, str]]:
    """The prompt and the right answer of each turn of the model."""
    prompt = ""
    for piece in pieces(rendered(tokenizer, conversation)):
        if piece.is_answer:
            yield prompt, piece.text
        prompt += piece.text


@pytest.mark.proof
@pytest.mark.parametrize("thinks", [False, True])
def test_the_engine_answers_held_out_conversations(llm: LLM, tokenizer: Any, thinks: bool) -> None:
    asked = [
        turn
        for make in MIX
        for one in itertools.islice(conversations("held-out", 1, make, thinks=thinks), 5)
        for turn in turns(tokenizer, one)
    ]
    outputs = llm.generate([prompt for prompt, _ in asked], GREEDY)
    right = [
        output.outputs[0].text + IM_END == answer and output.outputs[0].finish_reason == "stop"
        for output, (_, answer) in zip(outputs, asked, strict=True)
    ]
    assert sum(right) >= LEAST_RIGHT * len(right), [a for a, is_right in zip(asked, right, strict=True) if not is_right]
    assert all(answer.startswith("<think>\n") == thinks for _, answer in asked)


@pytest.mark.proof
def test_a_conversation_with_two_calls_comes_to_its_end(llm: LLM, tokenizer: Any) -> None:
    """The client runs the tools, as every agent does, and returns what the model wrote."""
    tools: dict[str, Callable[..., Any]] = {"get_weather": lambda city: f"rainy in {city}", "add": lambda a, b: a + b}
    messages = [{"role": "user", "content": "What is the weather in Brandon and 1789 plus 46?"}]
    made = []
    while len(messages) < 10:
        prompt = tokenizer.apply_chat_template(
            messages, tools=[ADD, WEATHER], add_generation_prompt=True, tokenize=False
        )
        text = llm.generate(prompt, GREEDY).outputs[0].text
        if (found := re.fullmatch(r"<tool_call>\n(.*)\n</tool_call>", text)) is None:
            break
        asked = json.loads(found[1])
        made.append(asked)
        messages += [
            call(asked["name"], asked["arguments"]),
            {"role": "tool", "content": str(tools[asked["name"]](**asked["arguments"]))},
        ]
    assert made == [
        {"name": "get_weather", "arguments": {"city": "Brandon"}},
        {"name": "add", "arguments": {"a": 1789, "b": 46}},
    ]
    assert "rainy in Brandon" in text and "1835" in text
