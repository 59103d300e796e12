"""The documents of ``trtx_schemas``: one for each kind of schema in turn, with the value to write in words.

The kinds are those of public collections of schemas: nested and optional fields, bounds, patterns, alternatives, lists,
definitions, and schemas that refer to themselves. Every document is small, so that a small model can end it.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from itertools import cycle
from typing import Any, NamedTuple

from trtx.checkpoint.tasks import COLOURS
from trtx.checkpoint.text import NOUNS

Schema = dict[str, Any]


class _Case(NamedTuple):
    """A schema, a value of it, and that value in words."""

    schema: Schema
    value: Any
    words: str


def generated_rows(count: int) -> list[dict[str, Any]]:
    """The first ``count`` documents; always the same."""
    return [_row(number, kind) for number, kind in zip(range(count), cycle(_KINDS), strict=False)]


def _row(number: int, kind: str) -> dict[str, Any]:
    case = _KINDS[kind](random.Random(f"{kind}/{number}"))
    schema = json.dumps(case.schema)
    prompt = f"Write JSON that follows this schema: {schema}\nThe content: {case.words}.\nAnswer with the JSON alone:"
    return {"kind": kind, "prompt": prompt, "schema": schema, "answer": json.dumps(case.value)}


def _object(properties: Schema, *, optional: tuple[str, ...] = ()) -> Schema:
    required = [name for name in properties if name not in optional]
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}


def _word(most: int = 12) -> Schema:
    return {"type": "string", "minLength": 1, "maxLength": most}


def _whole(least: int = 0, most: int = 99) -> Schema:
    return {"type": "integer", "minimum": least, "maximum": most}


def _flat(rng: random.Random) -> _Case:
    value = {"name": rng.choice(NOUNS), "count": rng.randint(0, 99), "is_new": rng.random() < 0.5}
    words = f"name {value['name']}, count {value['count']}, {'new' if value['is_new'] else 'not new'}"
    return _Case(_object({"name": _word(), "count": _whole(), "is_new": {"type": "boolean"}}), value, words)


def _optional(rng: random.Random) -> _Case:
    value: Schema = {"name": rng.choice(NOUNS)}
    if has_color := rng.random() < 0.5:
        value["color"] = rng.choice(COLOURS)
    words = f"name {value['name']}, " + (f"color {value['color']}" if has_color else "no color")
    return _Case(_object({"name": _word(), "color": _word()}, optional=("color",)), value, words)


def _enum(rng: random.Random) -> _Case:
    choices = rng.sample(COLOURS, 4)
    value = {"color": rng.choice(choices)}
    return _Case(_object({"color": {"enum": choices}}), value, f"color {value['color']}")


def _bounds(rng: random.Random) -> _Case:
    value = {"percent": rng.randint(1, 99), "change": rng.randint(-9, 9)}
    schema = _object({"percent": {"type": "integer", "exclusiveMinimum": 0, "exclusiveMaximum": 100},
                      "change": _whole(-9, 9)})  # fmt: skip
    return _Case(schema, value, f"percent {value['percent']}, change {value['change']}")


def _number(rng: random.Random) -> _Case:
    value = {"weight": rng.randint(1, 99) / 2}
    schema = _object({"weight": {"type": "number", "minimum": 0, "maximum": 50, "multipleOf": 0.5}})
    return _Case(schema, value, f"weight {value['weight']}")


def _pattern(rng: random.Random) -> _Case:
    value = {"code": f"{rng.choice('ABC')}{rng.choice('XYZ')}-{rng.randint(100, 999)}"}
    return _Case(
        _object({"code": {"type": "string", "pattern": "^[A-C][X-Z]-[0-9]{3}$"}}), value, f"code {value['code']}"
    )


def _format(rng: random.Random) -> _Case:
    value = {"day": f"20{rng.randint(10, 29)}-{rng.randint(1, 12):02}-{rng.randint(1, 28):02}"}
    return _Case(_object({"day": {"type": "string", "format": "date"}}), value, f"day {value['day']}")


def _nested(rng: random.Random) -> _Case:
    name, age, kind = rng.choice(NOUNS), rng.randint(1, 99), rng.choice(NOUNS)
    schema = _object({"owner": _object({"name": _word(), "age": _whole(1)}), "kind": _word()})
    words = f"the owner has name {name} and age {age}; kind {kind}"
    return _Case(schema, {"owner": {"name": name, "age": age}, "kind": kind}, words)


def _list(rng: random.Random) -> _Case:
    value = {"tags": rng.sample(COLOURS, rng.randint(1, 3))}
    schema = _object({"tags": {"type": "array", "items": _word(), "minItems": 1, "maxItems": 3}})
    return _Case(schema, value, f"tags {' and '.join(value['tags'])}")


def _tuple(rng: random.Random) -> _Case:
    value = [rng.choice(NOUNS), rng.randint(0, 99)]
    schema = {"type": "array", "prefixItems": [_word(), _whole()], "items": False, "minItems": 2, "maxItems": 2}
    return _Case(schema, value, f"a list of {value[0]} and {value[1]}")


def _alternatives(rng: random.Random) -> _Case:
    value = {"size": rng.choice([rng.randint(0, 99), rng.choice(COLOURS), None])}
    schema = _object({"size": {"anyOf": [_whole(), _word(), {"type": "null"}]}})
    return _Case(schema, value, "no size (null)" if value["size"] is None else f"size {value['size']}")


def _tagged(rng: random.Random) -> _Case:
    circle = _object({"shape": {"const": "circle"}, "radius": _whole()})
    square = _object({"shape": {"const": "square"}, "side": _whole()})
    shape, field = rng.choice((("circle", "radius"), ("square", "side")))
    value = {"shape": shape, field: rng.randint(0, 99)}
    return _Case({"anyOf": [circle, square]}, value, f"a {shape} of {field} {value[field]}")


def _definitions(rng: random.Random) -> _Case:
    value = {"from": {"x": rng.randint(0, 9), "y": rng.randint(0, 9)}, "to": {"x": rng.randint(0, 9), "y": 0}}
    point = {"$ref": "#/$defs/point"}
    schema = _object({"from": point, "to": point}) | {"$defs": {"point": _object({"x": _whole(), "y": _whole()})}}
    from_x, from_y, to_x = value["from"]["x"], value["from"]["y"], value["to"]["x"]
    return _Case(schema, value, f"from x {from_x}, y {from_y} to x {to_x}, y 0")


def _recursive(rng: random.Random) -> _Case:
    inner = {"value": rng.randint(0, 99), "next": None}
    value = {"value": rng.randint(0, 99), "next": inner}
    node = _object({"value": _whole(), "next": {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/node"}]}})
    schema = {"$ref": "#/$defs/node", "$defs": {"node": node}}
    return _Case(schema, value, f"a list of two nodes with the values {value['value']} and {inner['value']}")


def _names(rng: random.Random) -> _Case:
    keys = rng.sample(NOUNS, 2)
    value = {key: rng.randint(0, 99) for key in keys}
    schema = {"type": "object", "additionalProperties": _whole(), "maxProperties": 3}
    return _Case(schema, value, ", ".join(f"{key} is {number}" for key, number in value.items()))


_KINDS: dict[str, Callable[[random.Random], _Case]] = {
    "flat": _flat,
    "optional": _optional,
    "enum": _enum,
    "bounds": _bounds,
    "number": _number,
    "pattern": _pattern,
    "format": _format,
    "nested": _nested,
    "list": _list,
    "tuple": _tuple,
    "alternatives": _alternatives,
    "tagged": _tagged,
    "definitions": _definitions,
    "recursive": _recursive,
    "names": _names,
}
