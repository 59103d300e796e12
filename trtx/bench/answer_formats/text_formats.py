"""Formats of an answer's text: JSON, a JSON schema, a regular expression, a choice of texts, or a grammar."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, NoReturn

_GUIDED = ("guided_json", "guided_regex", "guided_choice", "guided_grammar")
FORMAT_FIELDS = frozenset({"response_format", "tools", "tool_choice", *_GUIDED})
"""Fields of a request body that set the format of the answer's text."""

_Grammar = Literal["regex", "grammar"]  # llguidance's names
_SHOWN = 60  # maximum number of characters of a value in a reason


class WrongFormat(ValueError):
    """A request asks for a format that no server can follow. The message begins with the field."""


@dataclass(frozen=True, slots=True)
class TextFormat:
    """The format of an answer's text.

    ``problem``: returns why a whole text breaks the format, as a clause; None if it follows it. ``unchecked``: why no
    text can be checked; empty if it can. ``ends_with_stop``: a stop string of the request may end the text before the
    format does.
    """

    problem: Callable[[str], str | None]
    unchecked: str = ""
    ends_with_stop: bool = False


def text_format(body: Mapping[str, Any]) -> TextFormat | None:
    """The format that a request body asks of the text; None if it asks for none. Raises WrongFormat."""
    asked = [name for name in _GUIDED if body.get(name) is not None]
    response: Any = body.get("response_format")
    if response is not None and _type_of(response) != "text":
        asked.append("response_format")
    if len(asked) > 1:
        raise WrongFormat(f"{asked[0]} and {asked[1]} both set the format of the answer; leave one of them out")
    if not asked:
        return None
    (name,) = asked
    if name == "response_format":
        return _response_format(response)
    return _READ[name](body[name])


def checked_schema(schema: Any, name: str) -> Any:
    """A jsonschema validator for ``schema``. Raises WrongFormat for an invalid schema or a reference out of it."""
    from jsonschema.exceptions import SchemaError
    from jsonschema.validators import Draft202012Validator, validator_for

    if not isinstance(schema, (dict, bool)):
        raise WrongFormat(f"{name} is {short(schema)}; expected a JSON schema")
    kind = validator_for(schema, default=Draft202012Validator)
    try:
        kind.check_schema(schema)
    except SchemaError as error:
        place = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in error.absolute_path)
        raise WrongFormat(f"{name}{place} is not a JSON schema: {short(error.message, 120)}") from error
    for reference in _references(schema):
        if not reference.startswith("#"):
            raise WrongFormat(
                f"{name} refers to {short(reference)}, and no server fetches another document; copy what it refers to "
                "into $defs"
            )
    return kind(schema)


def broken_by(validator: Any, value: Any) -> str | None:
    """The place and the keyword of the first rule of a schema that a value breaks; None if it breaks none.

    Indexes and values of the answer are left out, so that equal problems of many answers are counted as one.
    """
    from jsonschema.exceptions import best_match

    error = best_match(validator.iter_errors(value))
    if error is None:
        return None
    place = "".join("[]" if isinstance(part, int) else f".{part}" for part in error.absolute_path)
    if error.validator == "required":
        missing = [one for one in error.validator_value if one not in error.instance]
        return f"at ${place}: {', '.join(map(short, missing))} is missing"
    if error.validator in ("additionalProperties", "unevaluatedProperties"):
        return f"at ${place}: it has properties that the schema doesn't allow"
    return f"at ${place}: {error.validator} {short(error.validator_value)}"


def parsed_json(text: str) -> Any:
    """The value of a JSON text. Raises ValueError, also for NaN and Infinity, which are not JSON."""
    return json.loads(text, parse_constant=_refuse_constant)


def short(value: Any, limit: int = _SHOWN) -> str:
    """A value on one line, cut to ``limit`` characters."""
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
    line = " ".join("".join(char if char.isprintable() else " " for char in text).split())
    return line if len(line) <= limit else f"{line[: limit - 1]}…"


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON value")


def _type_of(response: Any) -> Any:
    if not isinstance(response, dict) or not isinstance(response.get("type"), str):
        raise WrongFormat(f"response_format is {short(response)}; expected an object with type and, for json_schema, a "
                          "json_schema")  # fmt: skip
    return response["type"]


def _response_format(response: Mapping[str, Any]) -> TextFormat:
    kind = response["type"]
    if kind == "json_object":
        return TextFormat(_object_problem)
    if kind != "json_schema":
        raise WrongFormat(f"response_format.type is {short(kind)}; expected text, json_object or json_schema")
    schema = response.get("json_schema")
    if not isinstance(schema, dict) or "schema" not in schema:
        raise WrongFormat("response_format.json_schema has no schema; expected an object with name and schema")
    return _schema_format(schema["schema"], "response_format.json_schema.schema")


def _guided_json(value: Any) -> TextFormat:
    if isinstance(value, str):
        try:
            value = parsed_json(value)
        except ValueError as error:
            raise WrongFormat(f"guided_json is not JSON ({error}); expected a JSON schema or its text") from error
    return _schema_format(value, "guided_json")


def _schema_format(schema: Any, name: str) -> TextFormat:
    return TextFormat(partial(_schema_problem, checked_schema(schema, name)))


def _guided_choice(value: Any) -> TextFormat:
    if not isinstance(value, list) or not value or not all(isinstance(one, str) and one for one in value):
        raise WrongFormat(f"guided_choice is {short(value)}; expected a list of at least one text")
    return TextFormat(partial(_choice_problem, frozenset(value)))


def _guided_text(kind: _Grammar, title: str, value: Any) -> TextFormat:
    name = f"guided_{kind}"
    if not isinstance(value, str) or not value:
        raise WrongFormat(f"{name} is {short(value)}; expected a {title}")
    wrong = ""
    try:
        compiled = _compiled(kind, value)
        wrong = short(compiled.get_error(), 120) if compiled.is_error() else ""
    except (ValueError, KeyError, TypeError, AssertionError, RecursionError) as error:
        wrong = short(str(error), 120)
    if wrong and kind == "regex":
        raise WrongFormat(f"{name} can't be compiled ({wrong}); correct it")
    # The server's library may accept grammars that llguidance rejects.
    reason = f"trtx bench can't compile their {title}" if wrong else ""
    return TextFormat(partial(_grammar_problem, kind, value, title), reason, ends_with_stop=True)


def _compiled(kind: _Grammar, source: str) -> Any:
    """A matcher of bytes. The library bounds its time and memory, so a hostile expression can't stop the benchmark."""
    from llguidance import LLMatcher, LLTokenizer, grammar_from

    return LLMatcher(LLTokenizer("byte"), grammar_from(kind, source), log_level=0)


_READ: Mapping[str, Callable[[Any], TextFormat]] = {
    "guided_json": _guided_json,
    "guided_regex": partial(_guided_text, "regex", "regular expression"),
    "guided_choice": _guided_choice,
    "guided_grammar": partial(_guided_text, "grammar", "grammar"),
}


def _object_problem(text: str) -> str | None:
    try:
        value = parsed_json(text)
    except (ValueError, RecursionError) as error:
        return _not_json(error)
    return (
        None if isinstance(value, dict) else "the answer is JSON but not an object, although json_object was requested"
    )


def _schema_problem(validator: Any, text: str) -> str | None:
    try:
        value = parsed_json(text)
    except (ValueError, RecursionError) as error:
        return _not_json(error)
    problem = broken_by(validator, value)
    return None if problem is None else f"the answer breaks its JSON schema {problem}"


def _not_json(error: Exception) -> str:
    reason = error.msg if isinstance(error, json.JSONDecodeError) else str(error)
    return f"the answer is not JSON ({short(reason)}), although its request asks for JSON"


def _choice_problem(choices: frozenset[str], text: str) -> str | None:
    return None if text in choices else "the answer is none of the texts of guided_choice"


def _grammar_problem(kind: _Grammar, source: str, title: str, text: str) -> str | None:
    tokens = list(text.encode())  # of the byte vocabulary
    matcher = _compiled(kind, source)
    if matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting():
        return None
    return f"the answer breaks its {title}"


def _references(schema: Any) -> Iterator[str]:
    if isinstance(schema, dict):
        for name, value in schema.items():
            if name in ("$ref", "$dynamicRef") and isinstance(value, str):
                yield value
            elif name not in ("const", "enum", "default", "examples"):
                yield from _references(value)
    elif isinstance(schema, list):
        for value in schema:
            yield from _references(value)
