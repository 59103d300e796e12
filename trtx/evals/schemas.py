"""The documents of ``schemas``: prompts with JSON schemas from the user's file, and the judgement of an answer."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trtx.config.files import read_bytes
from trtx.config.strict_json import parse_json
from trtx.config.wording import a_kind, quoted, shown
from trtx.errors import UsageError

if TYPE_CHECKING:
    from jsonschema.protocols import Validator

TASK, GENERATED_TASK = "schemas", "trtx_schemas"
TASKS = (TASK, GENERATED_TASK)  # are asked both free and constrained unless --structured-output says otherwise
MOST_BYTES = 256 << 20
MOST_TOKENS = 1 << 20  # of an answer
_FIELDS = ("prompt", "messages", "schema", "answer", "max_tokens")
_EXPECTED = 'JSON lines such as {"prompt": "Name a color.", "schema": {"type": "object"}}'
# Keywords whose value is data, or a mapping from names to schemas; a "$ref" directly inside is no reference.
_DATA = frozenset(("enum", "const", "default", "examples"))
_NAMED = frozenset(("properties", "patternProperties", "$defs", "definitions", "dependentSchemas"))


def read_schemas(path: Path, *, over_chat: bool) -> list[dict[str, Any]]:
    """The documents in a file, each with its line, counted from 1. Schema, answer and messages are JSON as text.

    Raises UsageError with file, line and error.
    """
    where = f"--schemas {shown(path)}"
    content = read_bytes(path, "--schemas", _EXPECTED, limit=MOST_BYTES)
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise UsageError(f"{where}, line {line} is not UTF-8; expected {_EXPECTED}") from error
    rows = [
        {**_row(line, f"{where}, line {number}", over_chat=over_chat), "line": number}
        for number, line in enumerate(text.split("\n"), start=1)
        if line.strip()
    ]
    if not rows:
        raise UsageError(f"{where} has no rows; expected {_EXPECTED}")
    _refuse_some_answers(rows, where)
    return rows


def judge_answer(doc: Mapping[str, Any], text: str) -> dict[str, int]:
    """Whether a text is valid JSON, complies with the document's schema, and equals its answer, if the document has
    one.
    """
    wanted = {} if doc.get("answer") is None else {"exact_match": 0}
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return {"json_validity": 0, "schema_compliance": 0, **wanted}
    complies = validator_of(json.loads(doc["schema"])).is_valid(found)
    if wanted:
        wanted["exact_match"] = int(_same(found, json.loads(doc["answer"])))
    return {"json_validity": 1, "schema_compliance": int(complies), **wanted}


def validator_of(schema: dict[str, Any]) -> Validator:
    """The validator of the schema's own draft, by default 2020-12. It loads no document over the network."""
    from jsonschema.validators import Draft202012Validator, validator_for
    from jsonschema_specifications import REGISTRY

    kind = validator_for(schema, default=Draft202012Validator)
    found: Validator = kind(schema, registry=REGISTRY)
    return found


def _same(one: Any, other: Any) -> bool:
    """Equality of JSON values. In Python, true equals 1."""
    if isinstance(one, bool) or isinstance(other, bool):
        return one is other
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(_same(one[key], other[key]) for key in one)
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(_same, one, other))
    return bool(one == other)


def _row(line: str, where: str, *, over_chat: bool) -> dict[str, Any]:
    try:
        row = parse_json(line)
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{where} can't be read as JSON ({shown(error)}); expected {_EXPECTED}") from error
    if not isinstance(row, dict):
        raise UsageError(f"{where} holds {a_kind(row)}; expected {_EXPECTED}")
    try:
        json.dumps(row, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        raise UsageError(f"{where} has half of a character (a lone surrogate); expected {_EXPECTED}") from error
    if (unknown := next((name for name in row if name not in _FIELDS), None)) is not None:
        raise UsageError(f"{where} has the field {quoted(unknown)}; expected only {', '.join(_FIELDS)}")
    if "schema" not in row:
        raise UsageError(f'{where} has no "schema"; expected a JSON schema, such as {{"type": "object"}}')
    _check_schema(row["schema"], where)
    if "answer" in row and not validator_of(row["schema"]).is_valid(row["answer"]):
        raise UsageError(f"{where} has an answer that breaks its own schema; mend one of them")
    most = row.get("max_tokens")
    if "max_tokens" in row and not (type(most) is int and 1 <= most <= MOST_TOKENS):
        raise UsageError(
            f"{where} has {shown(json.dumps(most))} as max_tokens; expected a whole number from 1 to {MOST_TOKENS}"
        )
    return {
        **_question(row, where, over_chat=over_chat),
        "schema": json.dumps(row["schema"]),
        "answer": json.dumps(row["answer"]) if "answer" in row else None,
        "max_tokens": most,
    }


def _question(row: Mapping[str, Any], where: str, *, over_chat: bool) -> dict[str, Any]:
    """The prompt of a row; for messages, the last one's text, and all messages as JSON."""
    if ("prompt" in row) == ("messages" in row):
        had = "both" if "prompt" in row else "neither"
        raise UsageError(f'{where} has {had} of "prompt" and "messages"; expected one of them')
    if "prompt" in row:
        prompt = row["prompt"]
        if not isinstance(prompt, str) or not prompt.strip():
            raise UsageError(f"{where} has {shown(json.dumps(prompt))} as its prompt; expected text that is not empty")
        return {"prompt": prompt, "messages": None}
    if not over_chat:
        raise UsageError(f"{where} has messages, which only chat can send; add --endpoint-type chat, or give a prompt")
    messages = row["messages"]
    if not (isinstance(messages, list) and messages and all(map(_is_message, messages))):
        raise UsageError(
            f'{where} has {shown(json.dumps(messages))} as its messages; expected a list such as [{{"role": "user", '
            '"content": "Name a color."}]'
        )
    return {"prompt": messages[-1]["content"], "messages": json.dumps(messages, ensure_ascii=False)}


def _is_message(found: Any) -> bool:
    return (
        isinstance(found, dict)
        and found.keys() == {"role", "content"}
        and all(isinstance(value, str) for value in found.values())
    )


def _check_schema(schema: Any, where: str) -> None:
    """Raises UsageError for a schema with which no answer could be judged."""
    from jsonschema.exceptions import SchemaError

    if not isinstance(schema, dict):
        raise UsageError(f"{where} has {a_kind(schema)} as its schema; expected an object")
    validator = validator_of(schema)
    try:
        validator.check_schema(schema)
    except SchemaError as error:
        raise UsageError(
            f"{where} has a schema that is not valid at {shown(error.json_path)}: {shown(error.message)}; mend it"
        ) from error
    for reference in _unresolved(schema):
        told = (
            "which the schema does not have; mend it"
            if reference.startswith("#")
            else "which is another document and is not loaded; copy it to $defs"
        )
        raise UsageError(f"{where} has a schema whose $ref names {shown(reference)}, {told}")
    try:
        validator.is_valid(None)
    except RecursionError as error:
        raise UsageError(f"{where} has a schema whose $ref leads to itself without end; mend it") from error


def _unresolved(schema: dict[str, Any]) -> Iterator[str]:
    """References to places outside the schema."""
    from jsonschema_specifications import REGISTRY
    from referencing.exceptions import Unresolvable
    from referencing.jsonschema import DRAFT202012

    resource = DRAFT202012.create_resource(schema)
    address = resource.id() or ""
    resolver = REGISTRY.with_resource(address, resource).resolver(address)
    left: list[tuple[Any, Any]] = [(schema, resolver)]
    while left:
        found, resolver = left.pop()
        if isinstance(found, list):
            left += [(one, resolver) for one in found]
        if not isinstance(found, dict):
            continue
        if isinstance(found.get("$id"), str) and found is not schema:
            resolver = resolver.in_subresource(DRAFT202012.create_resource(found))
        if isinstance(reference := found.get("$ref"), str):
            try:
                resolver.lookup(reference)
            except Unresolvable:
                yield reference
        for key, value in found.items():
            if key in _NAMED and isinstance(value, dict):
                left += [(one, resolver) for one in value.values()]
            elif key not in _DATA:
                left.append((value, resolver))


def _refuse_some_answers(rows: list[dict[str, Any]], where: str) -> None:
    """Raises UsageError if only some rows have an answer, because a score covers every sample of its task."""
    lacking = [row["line"] for row in rows if row["answer"] is None]
    if lacking and len(lacking) < len(rows):
        raise UsageError(
            f"{where}, line {lacking[0]} has no answer, and other lines have one; give one in every line or in none"
        )
