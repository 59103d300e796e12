"""Prompts with JSON schemas of a user's file: what is read, how an answer is judged, and each fault of the file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from trtx.errors import UsageError
from trtx.evals.generated_schemas import generated_rows
from trtx.evals.schemas import judge_answer, read_schemas

ANY = {"type": "object"}
COLOR = {"type": "object", "properties": {"color": {"enum": ["red", "blue"]}}, "required": ["color"]}


def written(directory: Path, *rows: Any) -> Path:
    path = directory / "own.jsonl"
    path.write_text("\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows))
    return path


def test_each_line_is_a_document_with_its_schema_answer_and_length(tmp_path: Path) -> None:
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "A color?"}]
    path = written(
        tmp_path, {"prompt": "Red?", "schema": COLOR, "answer": {"color": "red"}}, "",
        {"messages": messages, "schema": COLOR, "answer": {"color": "blue"}, "max_tokens": 7},
    )  # fmt: skip
    first, second = read_schemas(path, over_chat=True)
    assert (first["prompt"], first["messages"], first["max_tokens"], first["line"]) == ("Red?", None, None, 1)
    assert json.loads(first["schema"]) == COLOR and json.loads(first["answer"]) == {"color": "red"}
    assert (json.loads(second["messages"]), second["max_tokens"], second["line"]) == (messages, 7, 3)


def test_references_inside_a_schema_and_to_json_schema_itself_are_resolved(tmp_path: Path) -> None:
    schema = {
        "$id": "https://example.com/root.json",
        "$defs": {"x": {"enum": [{"$ref": "only data"}]}},
        "properties": {
            "$ref": {"type": "string"},
            "a": {"$ref": "#/$defs/x"},
            "b": {"$ref": "https://example.com/root.json#/$defs/x"},
            "c": {"$ref": "http://json-schema.org/draft-07/schema#"},
            "d": {"$id": "inner.json", "$defs": {"y": {}}, "$ref": "#/$defs/y"},
        },
    }
    assert len(read_schemas(written(tmp_path, {"prompt": "a", "schema": schema}), over_chat=False)) == 1


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        ([], "has no rows"),
        ([" "], "has no rows"),
        (["{"], "line 1 can't be read as JSON"),
        (["[]"], "line 1 holds a list"),
        ([{"prompt": "a", "schema": ANY}, {"prompt": "a"}], 'line 2 has no "schema"'),
        ([{"prompt": "a", "schema": ANY, "shema": 1}], "line 1 has the field 'shema'"),
        ([{"prompt": "a", "schema": "{}"}], "line 1 has text as its schema; expected an object"),
        ([{"prompt": "a", "schema": {"type": "any"}}], "line 1 has a schema that is not valid at $.type"),
        ([{"prompt": "a", "schema": {"pattern": "("}}], "line 1 has a schema that is not valid at $.pattern"),
        (
            [{"prompt": "a", "schema": {"items": {"$ref": "https://example.com/a.json"}}}],
            "https://example.com/a.json, which is another document and is not loaded",
        ),
        ([{"prompt": "a", "schema": {"items": {"$ref": "#/$defs/a"}}}], "#/$defs/a, which the schema does not have"),
        ([{"prompt": "a", "schema": {"$ref": "#"}}], "leads to itself without end"),
        ([{"schema": ANY}], 'line 1 has neither of "prompt" and "messages"'),
        ([{"prompt": "a", "messages": [], "schema": ANY}], 'line 1 has both of "prompt" and "messages"'),
        ([{"prompt": " ", "schema": ANY}], "expected text that is not empty"),
        ([{"messages": [{"role": "user"}], "schema": ANY}], "as its messages; expected a list"),
        ([{"prompt": "a", "schema": ANY, "max_tokens": 0}], "line 1 has 0 as max_tokens"),
        ([{"prompt": "a", "schema": ANY, "max_tokens": True}], "line 1 has true as max_tokens"),
        ([{"prompt": "a", "schema": COLOR, "answer": {}}], "line 1 has an answer that breaks its own schema"),
        ([{"prompt": "a", "schema": ANY, "answer": {}}, {"prompt": "a", "schema": ANY}], "line 2 has no answer"),
        (['{"prompt": "a\\ud800", "schema": {}}'], "line 1 has half of a character"),
    ],
)
def test_a_file_that_can_not_be_asked_is_refused_with_its_line(tmp_path: Path, rows: list[Any], words: str) -> None:
    with pytest.raises(UsageError) as refused:
        read_schemas(written(tmp_path, *rows), over_chat=True)
    said = str(refused.value)
    assert said.startswith("--schemas ") and "\n" not in said and words in said


def test_messages_are_refused_without_chat(tmp_path: Path) -> None:
    path = written(tmp_path, {"messages": [{"role": "user", "content": "a"}], "schema": ANY})
    with pytest.raises(UsageError, match="line 1 has messages, which only chat can send; add --endpoint-type chat"):
        read_schemas(path, over_chat=False)


@pytest.mark.parametrize(
    ("text", "judged"),
    [
        ('{"color": "red"}', (1, 1, 1)),
        ('{"color": "blue"}', (1, 1, 0)),
        ('{"color": 1}', (1, 0, 0)),
        ('```json\n{"color": "red"}\n```', (0, 0, 0)),
        ('{"color": "re', (0, 0, 0)),
        ("[" * 100_000, (0, 0, 0)),
    ],
)
def test_an_answer_is_judged_by_its_schema_and_its_reference(text: str, judged: tuple[int, ...]) -> None:
    doc = {"schema": json.dumps(COLOR), "answer": '{"color": "red"}'}
    names = ("json_validity", "schema_compliance", "exact_match")
    assert judge_answer(doc, text) == dict(zip(names, judged, strict=True))
    assert "exact_match" not in judge_answer({**doc, "answer": None}, text)


def test_true_is_not_one_and_a_schema_is_judged_by_its_own_draft() -> None:
    assert judge_answer({"schema": "{}", "answer": "[1, {}]"}, "[true, {}]")["exact_match"] == 0
    assert judge_answer({"schema": "{}", "answer": "[1, {}]"}, "[1.0, {}]")["exact_match"] == 1
    old = {"$schema": "http://json-schema.org/draft-04/schema#", "minimum": 1, "exclusiveMinimum": True}
    assert judge_answer({"schema": json.dumps(old), "answer": None}, "1")["schema_compliance"] == 0


def test_the_generated_documents_are_many_kinds_with_a_reference_that_is_right(tmp_path: Path) -> None:
    rows = generated_rows(60)
    assert rows == generated_rows(60) and len({row["kind"] for row in rows}) == 15
    assert len({row["prompt"] for row in rows}) == 60
    for row in rows:
        assert set(judge_answer(row, row["answer"]).values()) == {1}, row
    asked = [{"prompt": row["prompt"], "schema": json.loads(row["schema"])} for row in rows]
    assert len(read_schemas(written(tmp_path, *asked), over_chat=False)) == 60
