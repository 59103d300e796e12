"""The formats that requests ask for: each is read, refused with its field, or checked against answers."""

from __future__ import annotations

from typing import Any

import pytest

from trtx.bench.answer_formats import AnswerContent, FormatResult, WrongFormat, requested_format
from trtx.bench.load import LoadSpec


def json_schema(schema: Any) -> dict[str, Any]:
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": schema}}}


def tool(name: str, parameters: Any, **said: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": parameters, **said}}


PERSON = {
    "type": "object",
    "properties": {"age": {"type": "integer"}, "names": {"type": "array", "items": {"type": "string"}}},
    "required": ["age"],
    "additionalProperties": False,
}
CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
OFFERED = {"tools": [tool("weather", CITY), tool("time", {"type": "object"})]}
STRICT = {"tools": [tool("weather", CITY, strict=True)]}
FORCED = {**OFFERED, "tool_choice": "required"}
NAMED = {**OFFERED, "tool_choice": {"type": "function", "function": {"name": "time"}}}
NO_CALL = "the answer calls no tool, although its request requires a call"


def judged(body: dict[str, Any], text: str = "", calls: tuple[str, ...] = (), finish: str = "stop") -> FormatResult:
    """``calls``: each is the name of a tool, a space and the text of its arguments."""
    content = AnswerContent()
    for index, call in enumerate(calls):
        name, _, arguments = call.partition(" ")
        first = {"index": index, "id": "c", "function": {"name": name, "arguments": arguments[:2]}}
        content.add({"choices": [{"index": 0, "delta": {"tool_calls": [first]}}]})
        rest = {"index": index, "function": {"arguments": arguments[2:]}}
        content.add({"choices": [{"index": 0, "delta": {"tool_calls": [rest]}}]})
    content.add({"choices": [{"index": 0, "delta": {"content": text}}]})
    content.add({"choices": [{"index": 0, "delta": {}, "finish_reason": finish}]})
    content.add({"choices": [], "usage": {}})
    requested = requested_format(body)
    assert requested is not None
    return requested.judge(content)


@pytest.mark.parametrize(
    ("body", "text", "problem"),
    [
        ({"response_format": {"type": "json_object"}}, ' {"a": [1]}\n', ""),
        ({"response_format": {"type": "json_object"}}, "[1]", "the answer is JSON but not an object"),
        ({"response_format": {"type": "json_object"}}, '{"a": NaN}', "not JSON (NaN is not a JSON value)"),
        (json_schema(PERSON), '{"age": 3, "names": ["a"]}', ""),
        (json_schema(PERSON), '{"age": "3"}', "at $.age: type integer"),
        (json_schema(PERSON), '{"age": 3, "names": ["a", 4]}', "at $.names[]: type string"),
        (json_schema(PERSON), "{}", "at $: age is missing"),
        (json_schema(PERSON), '{"age": 3, "x": 1}', "at $: it has properties that the schema doesn't allow"),
        (json_schema(True), "7", ""),
        ({"guided_json": PERSON}, "Sure!", "the answer is not JSON"),
        ({"guided_json": '{"type": "integer"}'}, "3", ""),
        ({"guided_regex": r"\p{L}+"}, "äb", ""),
        ({"guided_regex": "a+"}, "aab", "the answer breaks its regular expression"),
        ({"guided_regex": "(a+)+b"}, "a" * 4000 + "c", "the answer breaks its regular expression"),
        ({"guided_choice": ["yes", "no"]}, "no", ""),
        ({"guided_choice": ["yes", "no"]}, "no ", "none of the texts of guided_choice"),
        ({"guided_grammar": 'root ::= "a" | "b"'}, "b", ""),
        ({"guided_grammar": 'start: "a"'}, "ab", "the answer breaks its grammar"),
    ],
)  # fmt: skip
def test_a_text_is_checked_as_a_whole(body: dict[str, Any], text: str, problem: str) -> None:
    found = judged(body, text)
    assert (found.outcome == "broken") == bool(problem) and problem in found.reason
    assert judged(body, text[:1], finish="length").outcome == "cut"


@pytest.mark.parametrize(
    ("body", "calls", "outcome", "problem"),
    [
        (OFFERED, (), "free", ""),
        (OFFERED, ('weather {"city": 3}',), "kept", ""),
        (OFFERED, ("weather {",), "broken", "the arguments of a call of weather are not JSON"),
        (OFFERED, ("weather [1]",), "broken", "are not a JSON object"),
        (OFFERED, ("rain {}",), "broken", "the answer calls a tool that its request doesn't offer"),
        (OFFERED, ('weather {"city": "x"}', "time {"), "broken", "a call of time are not JSON"),
        (STRICT, ('weather {"city": 3}',), "broken", "a call of weather breaks the schema of its arguments at $.city"),
        (FORCED, ('weather {"city": 3}',), "broken", "at $.city: type string"),
        (FORCED, ('weather {"city": "x"}', "time {}"), "kept", ""),
        (FORCED, (), "broken", NO_CALL),
        (NAMED, ('weather {"city": "x"}',), "broken", "the answer calls weather, although tool_choice names time"),
        ({**OFFERED, "tool_choice": "none"}, ("time {}",), "broken", "although tool_choice is none"),
        ({**OFFERED, **json_schema(PERSON)}, ("time {}",), "kept", ""),
    ],
)
def test_calls_are_checked_against_the_tools_that_were_offered(
    body: dict[str, Any], calls: tuple[str, ...], outcome: str, problem: str
) -> None:
    found = judged(body, "", calls, finish="tool_calls" if calls else "stop")
    assert found.outcome == outcome and problem in found.reason


def test_an_answer_that_ends_before_its_forced_call_is_cut() -> None:
    assert judged(FORCED, finish="length").outcome == "cut"


def test_what_cannot_be_checked_is_neither_kept_nor_broken() -> None:
    unknown = judged({"guided_grammar": "%%%"}, "a")
    stopped = judged({"guided_regex": "ab", "stop": ["b"]}, "a")
    assert (unknown.outcome, stopped.outcome) == ("unchecked", "unchecked") and unknown.reason and stopped.reason


def test_calls_of_a_whole_body_are_read_like_those_of_a_stream() -> None:
    content = AnswerContent()
    call = {"id": "c", "type": "function", "function": {"name": "time", "arguments": "{"}}
    content.add({"choices": [{"message": {"content": None, "tool_calls": [call]}, "finish_reason": "tool_calls"}]})
    requested = requested_format(OFFERED)
    assert requested is not None and requested.judge(content).outcome == "broken"


REFUSED = [
    ({"response_format": "json"}, "response_format is json; expected an object with type"),
    ({"response_format": {"type": "yaml"}}, "response_format.type is yaml; expected text, json_object or json_schema"),
    ({"response_format": {"type": "json_schema"}}, "response_format.json_schema has no schema"),
    (json_schema({"type": "strin"}), "response_format.json_schema.schema.type is not a JSON schema: 'strin'"),
    (json_schema({"$ref": "https://example.com/a.json"}), "no server fetches another document"),
    (json_schema(3), "response_format.json_schema.schema is 3; expected a JSON schema"),
    ({"guided_json": "{"}, "guided_json is not JSON"),
    ({"guided_regex": "("}, "guided_regex can't be compiled"),
    ({"guided_regex": ""}, "expected a regular expression"),
    ({"guided_choice": []}, r"guided_choice is []; expected a list of at least one text"),
    ({"guided_json": {}, "guided_regex": "a"}, "guided_json and guided_regex both set the format of the answer"),
    ({"tools": [{"name": "f"}]}, "tools[0] is"),
    ({"tools": [tool("f", {}), tool("f", {})]}, "tools[1].function.name is f a second time"),
    ({"tools": [tool("f", {"type": 3})]}, "tools[0].function.parameters.type is not a JSON schema"),
    ({"tool_choice": "required"}, "tool_choice is required, but the request has no tools"),
    ({**OFFERED, "tool_choice": {"type": "function", "function": {"name": "g"}}}, "names the tool g, but the request"),
    ({**OFFERED, "tool_choice": "always"}, "tool_choice is always; expected none, auto, required"),
]


@pytest.mark.parametrize(("body", "said"), REFUSED, ids=lambda value: value if isinstance(value, str) else "")
def test_what_no_server_can_follow_is_refused_with_its_field(body: dict[str, Any], said: str) -> None:
    with pytest.raises(WrongFormat) as refused:
        requested_format(body)
    assert said in str(refused.value) and len(str(refused.value)) < 300 and "\n" not in str(refused.value)
    with pytest.raises(ValueError, match=r"extra_inputs\."):
        LoadSpec.model_validate({"extra_inputs": body})


@pytest.mark.parametrize("body", [{}, {"response_format": {"type": "text"}}, {"tools": None, "tool_choice": "auto"}])
def test_a_body_may_leave_the_form_of_its_answer_open(body: dict[str, Any]) -> None:
    assert requested_format(body) is None


def test_a_reference_inside_a_schema_is_followed() -> None:
    schema = {"$defs": {"n": {"type": "integer"}}, "type": "array", "items": {"$ref": "#/$defs/n"}}
    assert judged(json_schema(schema), "[1]").outcome == "kept"
    assert judged(json_schema(schema), '["1"]').outcome == "broken"
