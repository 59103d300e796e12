"""Structured output and forced tools over HTTP: every form that clients send, streamed or not, aggregated or not."""

from __future__ import annotations

import itertools
import json
import os
import re
import shutil
import signal
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from guided_answers import GuidedAnswer, ask
from processes import HTTP, Topology, topology, until
from test_worker import metric

from trtx.checkpoint import resolve_checkpoint

CHAT, TEXT, RESPONSES = "chat/completions", "completions", "responses"
TORCH: dict[str, Any] = {
    "max_seq_len": 1024,
    "max_batch_size": 16,
    "kv_cache_config": {"tokens_per_block": 16, "max_tokens": 16384},
}
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "zebra": {"type": "integer", "minimum": 0, "maximum": 9},
        "ant": {"enum": ["x", "ä"]},
        "bees": {"type": "array", "items": {"$ref": "#/$defs/bee"}, "maxItems": 2},
    },
    "required": ["zebra", "ant", "bees"],
    "additionalProperties": False,
    "$defs": {"bee": {"type": ["boolean", "null"]}},
}
FLAG: dict[str, Any] = {
    "type": "object",
    "properties": {"on": {"type": "boolean"}},
    "required": ["on"],
    "additionalProperties": False,
}
FORMAT = {"type": "json_schema", "name": "animals", "schema": SCHEMA}


def chat_format(**more: Any) -> dict[str, Any]:
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "animals", "schema": SCHEMA, **more}}}


def tool(name: str, parameters: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": parameters, **more}}


def named(name: str) -> dict[str, Any]:
    return {"tool_choice": {"type": "function", "function": {"name": name}}}


TOOLS = {"tools": [tool("animals", SCHEMA), tool("lamp", FLAG, strict=True)]}
FLAT_TOOLS = {"tools": [{"type": "function", "name": "animals", "parameters": SCHEMA}]}


def model_that_sees_tools(directory: Path) -> Path:
    """Random weights, with a chat template that shows tools: without, a request with tools is refused."""
    model = directory / "tiny"
    shutil.copytree(resolve_checkpoint("synthetic:tiny").path, model)
    template = model / "chat_template.jinja"
    template.write_text("{% if tools %}{{ tools | tojson }}{% endif %}" + template.read_text())
    return model


@pytest.fixture(scope="module")
def agg(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Topology]:
    directory = tmp_path_factory.mktemp("guided-agg")
    with topology(directory, model_that_sees_tools(directory)) as running:
        running.start_frontend("--migration-limit", "3")
        running.start_worker("agg-0", engine="torch", **TORCH)
        running.wait_ready(aggregated=1)
        yield running


@pytest.fixture(scope="module")
def disagg(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Topology]:
    directory = tmp_path_factory.mktemp("guided-disagg")
    with topology(directory, model_that_sees_tools(directory)) as running:
        running.start_frontend("--migration-limit", "3")
        for role in ("prefill", "decode"):
            running.start_worker(f"{role}-0", role=role, engine="torch", **TORCH)
        running.wait_ready(prefill=1, decode=1)
        yield running


def in_every_way(agg: Topology, disagg: Topology, route: str, **body: Any) -> GuidedAnswer:
    """The answer, which is the same whether it is streamed and whether prefill and decode are apart."""
    answers = [ask(running, route, stream=stream, **body) for running, stream in ((agg, False), (disagg, True))]
    assert all(answer == answers[0] for answer in answers), answers
    return answers[0]


def is_of_schema(text: str) -> bool:
    document = json.loads(text)
    jsonschema.validate(document, SCHEMA)
    return list(document) == list(SCHEMA["properties"])  # a client may count on the schema's order


FORMS: list[tuple[str, str, dict[str, Any], Callable[[str], object]]] = [
    ("json_schema", CHAT, chat_format(), is_of_schema),
    ("strict json_schema", CHAT, chat_format(strict=True), is_of_schema),
    ("lax json_schema", CHAT, chat_format(strict=False), is_of_schema),
    ("json_schema beside tools", CHAT, chat_format() | TOOLS, is_of_schema),
    ("guided_json", CHAT, {"guided_json": SCHEMA}, is_of_schema),
    ("guided_json as text", CHAT, {"guided_json": json.dumps(SCHEMA)}, is_of_schema),
    ("guided_json", TEXT, {"guided_json": SCHEMA}, is_of_schema),
    ("guided_regex", CHAT, {"guided_regex": "[ab]{3}c"}, re.compile("[ab]{3}c").fullmatch),
    ("guided_regex", TEXT, {"guided_regex": "[ab]{3}c"}, re.compile("[ab]{3}c").fullmatch),
    ("guided_choice", CHAT, {"guided_choice": ["a.b", "(c|d)"]}, {"a.b", "(c|d)"}.__contains__),
    ("guided_choice", TEXT, {"guided_choice": ["a.b", "(c|d)"]}, {"a.b", "(c|d)"}.__contains__),
    ("GBNF", CHAT, {"guided_grammar": 'root ::= "a" [0-9] "b"'}, re.compile("a[0-9]b").fullmatch),
    ("Lark", TEXT, {"guided_grammar": 'start: "a" /[0-9]/ "b"'}, re.compile("a[0-9]b").fullmatch),
    ("json_schema", RESPONSES, {"text": {"format": FORMAT}}, is_of_schema),
    ("strict json_schema", RESPONSES, {"text": {"format": FORMAT | {"strict": True}}}, is_of_schema),
]


LIKE_ANOTHER = {
    ("strict json_schema", CHAT), ("lax json_schema", CHAT), ("guided_json as text", CHAT), ("guided_regex", TEXT),
    ("guided_choice", TEXT), ("strict json_schema", RESPONSES),
}  # fmt: skip


@pytest.mark.parametrize(
    ("route", "body", "fits"),
    [pytest.param(*row[1:], marks=pytest.mark.proof if row[:2] in LIKE_ANOTHER else ()) for row in FORMS],
    ids=[f"{route} {name}" for name, route, *_ in FORMS],
)
def test_a_form_of_structured_output_is_followed_in_every_way(
    agg: Topology, disagg: Topology, route: str, body: dict[str, Any], fits: Callable[[str], object]
) -> None:
    answer = in_every_way(agg, disagg, route, **body)
    assert answer.is_whole and fits(answer.text), answer


@pytest.mark.parametrize(
    ("route", "body"),
    [
        (CHAT, {"response_format": {"type": "json_object"}, "max_tokens": 60}),
        (RESPONSES, {"text": {"format": {"type": "json_object"}}, "max_output_tokens": 60}),
    ],
)
def test_json_object_begins_an_object_and_ends_with_it(
    agg: Topology, disagg: Topology, route: str, body: dict[str, Any]
) -> None:
    answer = in_every_way(agg, disagg, route, **body)
    if answer.is_whole:
        assert isinstance(json.loads(answer.text), dict)
    else:  # random weights may never end it
        assert answer.finish_reason in ("length", "incomplete") and answer.text.lstrip().startswith("{")


@pytest.mark.parametrize("more", [{}, {"parallel_tool_calls": False}], ids=str)
@pytest.mark.parametrize("tools", [TOOLS, {"tools": [tool("lamp", FLAG)]}], ids=["two", "one"])
def test_a_required_tool_is_called_with_arguments_of_its_schema(
    agg: Topology, disagg: Topology, tools: dict[str, Any], more: dict[str, Any]
) -> None:
    schemas = {"animals": SCHEMA, "lamp": FLAG}
    answer = in_every_way(agg, disagg, CHAT, **tools, **more, tool_choice="required", max_tokens=150)
    if answer.finish_reason == "length":  # random weights may call tools without end
        assert not answer.calls
        return
    assert answer.finish_reason == "tool_calls" and answer.calls and not answer.text
    for name, arguments in answer.calls:
        jsonschema.validate(json.loads(arguments), schemas[name])


def test_a_named_tool_is_called_once_with_arguments_of_its_schema(agg: Topology, disagg: Topology) -> None:
    answer = in_every_way(agg, disagg, CHAT, **TOOLS, **named("animals"))
    assert [name for name, _ in answer.calls] == ["animals"] and is_of_schema(answer.calls[0][1])
    assert answer.finish_reason == "tool_calls"
    answer = in_every_way(agg, disagg, RESPONSES, **FLAT_TOOLS, tool_choice={"type": "function", "name": "animals"})
    assert [name for name, _ in answer.calls] == ["animals"] and is_of_schema(answer.calls[0][1])


@pytest.mark.parametrize("choice", [named("animals"), {"tool_choice": "required"}], ids=str)
@pytest.mark.parametrize("stream", [False, True])
def test_a_forced_call_has_the_log_probabilities_of_its_tokens(
    agg: Topology, disagg: Topology, choice: dict[str, Any], stream: bool
) -> None:
    body = {
        "model": agg.model_name,
        "messages": [{"role": "user", "content": "x"}],
        "max_tokens": 150,
        "stream": stream,
    }
    options = {"stream_options": {"include_usage": True}} if stream else {}
    for running in (agg, disagg):
        sent = {**body, **options, **TOOLS, **choice, "logprobs": True, "temperature": 0}
        text = HTTP.post(f"{running.url}/v1/{CHAT}", json=sent, timeout=60).text
        lines = [line.removeprefix("data: ") for line in text.splitlines() if line.startswith(("data: {", "{"))]
        chunks = [json.loads(line) for line in lines]
        logprobs = [one["logprobs"]["content"] for chunk in chunks for one in chunk["choices"] if one["logprobs"]]
        assert sum(map(len, logprobs)) == chunks[-1]["usage"]["completion_tokens"]


@pytest.mark.parametrize("choice", [{}, {"tool_choice": "auto"}, {"tool_choice": "none"}], ids=str)
def test_a_tool_that_is_not_forced_changes_no_token(agg: Topology, disagg: Topology, choice: dict[str, Any]) -> None:
    plain = ask(agg, CHAT, max_tokens=8, nvext={"token_data": [5, 6, 7]})
    answer = in_every_way(agg, disagg, CHAT, **TOOLS, **choice, max_tokens=8, nvext={"token_data": [5, 6, 7]})
    assert plain.finish_reason == "length" and answer == plain


@pytest.mark.parametrize(
    "body", [chat_format(), TOOLS | named("animals"), TOOLS | {"tool_choice": "required"}], ids=str
)
def test_a_document_that_max_tokens_cuts_ends_with_length_and_calls_nothing(
    agg: Topology, disagg: Topology, body: dict[str, Any]
) -> None:
    """A stream may have shown the beginning of a call; its finish reason says that the call is cut."""
    for running, stream in itertools.product((agg, disagg), (False, True)):
        answer = ask(running, CHAT, stream=stream, **body, max_tokens=5)
        assert (answer.finish_reason, answer.error) == ("length", "")
        assert stream or not answer.calls


def test_a_cut_response_is_incomplete(agg: Topology, disagg: Topology) -> None:
    answer = in_every_way(agg, disagg, RESPONSES, text={"format": FORMAT}, max_output_tokens=5)
    assert answer.finish_reason == "incomplete"


def test_a_stop_string_that_occurs_in_no_document_changes_nothing(agg: Topology, disagg: Topology) -> None:
    plain = ask(agg, CHAT, **chat_format())
    assert in_every_way(agg, disagg, CHAT, **chat_format(), stop=["never in it"]) == plain


BAD: list[tuple[str, dict[str, Any], str]] = [
    ("type", {"guided_json": {"type": "nope"}}, 'it has the type "nope"'),
    ("place", {"guided_json": {"properties": {"a": {"type": 3}}}}, "type must be a string or array of strings"),
    ("text", {"guided_json": "no JSON"}, "is not valid JSON"),
    ("no answer", {"guided_json": {"enum": []}}, "no value can satisfy it"),
    ("remote", {"guided_json": {"$ref": "http://127.0.0.1:9/x"}}, "is another document and is not loaded"),
    ("size", {"guided_json": {"enum": ["x" * 600_000]}}, "expected at most 262144; shorten it"),
    ("regex", {"guided_regex": "(a"}, "the pattern '(a' is not accepted"),
    ("nesting", {"guided_regex": "(" * 300 + "a" + ")" * 300}, "the regular expression can't be followed"),
    ("grammar", {"guided_grammar": "root ::= nothing"}, "the grammar can't be"),
    ("choice", {"guided_choice": ["a", ""]}, "expected a list of texts that are not empty"),
    ("whitespace", {"guided_json": {}, "guided_whitespace_pattern": " "}, "guided_whitespace_pattern is ' ', expected"),
    ("stop", {"guided_choice": ["hello"], "stop": ["ell"]}, "the stop string 'ell' occurs inside the choice 'hello'"),
    ("short", {"guided_regex": "[0-9]", "min_tokens": 3}, "complete after 1 tokens, and min_tokens is 3; lower"),
    ("repeats", {"guided_regex": "a{1000000000}"}, "require at least 1000000000 characters; expected at most 10000"),
]


@pytest.mark.parametrize(("body", "said"), [row[1:] for row in BAD], ids=[row[0] for row in BAD])
def test_a_bad_grammar_is_a_400_of_one_sentence(
    agg: Topology, disagg: Topology, body: dict[str, Any], said: str
) -> None:
    """In agg the stream has begun, so that its status is 200 and its one event has the sentence."""
    for running, stream, status in ((agg, False, 400), (agg, True, 200), (disagg, False, 400), (disagg, True, 400)):
        refused = ask(running, CHAT, stream=stream, **body)
        assert refused.status == status and said in refused.error and len(refused.error) < 500, refused


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (TOOLS | named("nope"), 'tool named "nope" in tool_choice is not present in tools'),
        ({"tool_choice": "required"}, 'tool_choice is "required" but tools is empty'),
        ({"structured_outputs": {"json": {}}}, "Unsupported parameter(s)"),
    ],
)
def test_what_the_frontend_refuses_is_a_400_streamed_or_not(agg: Topology, body: dict[str, Any], said: str) -> None:
    for stream in (False, True):
        refused = ask(agg, CHAT, stream=stream, **body)
        assert refused.status == 400 and said in refused.error


def test_a_stop_string_inside_a_document_is_a_400_and_never_half_of_it(agg: Topology, disagg: Topology) -> None:
    for running in (agg, disagg):
        refused = ask(running, CHAT, **chat_format(), stop=["zeb"])
        assert refused.status == 400 and "the stop string 'zeb' occurs inside the document" in refused.error
        streamed = ask(running, CHAT, stream=True, **chat_format(), stop=["zeb"])
        assert (streamed.text, streamed.finish_reason, bool(streamed.error)) == ("", None, True)


@pytest.mark.proof  # a worker of its own
def test_a_dead_workers_documents_end_with_an_error_and_the_next_are_whole(agg: Topology) -> None:
    """Dynamo never migrates a request with a grammar, so none is begun anew in the middle."""
    long = {"guided_regex": "[01]{150}"}
    victim = agg.start_worker("agg-victim", engine="torch", **TORCH)
    agg.wait_ready(aggregated=2)
    with ThreadPoolExecutor(6) as pool:
        asked = [pool.submit(ask, agg, CHAT, stream=True, **long, seed=i) for i in range(6)]
        until("the victim answers", lambda: metric(victim, "trtx_generated_tokens_total") > 60, every=0.01)
        os.kill(victim.status()["engine_pid"], signal.SIGKILL)
        answers = [one.result() for one in asked]
    assert victim.process.wait(15) == 4
    agg.children.remove(victim)
    agg.wait_ready(aggregated=1)
    answers.append(ask(agg, CHAT, **long))
    whole = [answer for answer in answers if answer.is_whole]
    assert all(re.fullmatch("[01]{150}", answer.text) for answer in whole)
    lost = [answer for answer in answers if not answer.is_whole]
    assert whole and lost and all(answer.error and answer.finish_reason is None for answer in lost)
