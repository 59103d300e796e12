"""Makes JSON schemas of the kinds that clients send: each from a seed, and none endless for a model that resists it."""

from __future__ import annotations

from random import Random
from typing import Any

Schema = dict[str, Any]

_WORDS = (
    "id",
    "name",
    "état",
    "first name",
    "x-y",
    "count",
    "ref",
    "tags",
    "is_on",
    "größe",
    "kind",
    "note",
    "to",
    "at",
)
_PATTERNS = (
    r"^[a-z]{2,5}$",
    r"^\d{3}-\d{2}$",
    r"^(red|green|blue)$",
    r"^[A-Z][a-z]{0,4}( [a-z]{1,3})?$",
    r"^a?b+c{1,3}$",
)
_FORMATS = ("date", "uuid", "ipv4")
_VALUES = (None, True, False, 0, -3, 12.5, "", "a", 'quo"te', "new\nline", "ß")


def generated_schema(seed: int) -> Schema:
    """The schema of ``seed``. Every third one has definitions, of which some refer to themselves."""
    random = Random(seed)
    definitions: Schema = {}
    if seed % 3 == 0:
        definitions = {"leaf": _leaf(random), "tree": _tree(random), "pair": _object(random, 1, {})}
    schema = _object(random, 3, definitions)
    return schema | {"$defs": definitions} if definitions else schema


def _tree(random: Random) -> Schema:
    """Refers to itself: in a list that may be empty, or in place of a null."""
    again = {"type": "array", "items": {"$ref": "#/$defs/tree"}, "maxItems": random.randint(0, 1)}
    child = random.choice([again, {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/tree"}]}])
    return {
        "type": "object",
        "properties": {"value": {"type": "boolean"}, "child": child},
        "required": ["value"],
        "additionalProperties": False,
    }


def _any(random: Random, depth: int, definitions: Schema) -> Schema:
    makers = [_leaf, _leaf, _leaf]
    if definitions and random.random() < 0.3:
        return {"$ref": f"#/$defs/{random.choice(list(definitions))}"}
    if depth <= 0:
        return _leaf(random)
    kind = random.randrange(6)
    if kind == 0:
        return _object(random, depth - 1, definitions)
    if kind == 1:
        return _array(random, depth - 1, definitions)
    if kind == 2:
        options = [_any(random, depth - 1, definitions) for _ in range(random.randint(2, 3))]
        return {"anyOf": options}
    return random.choice(makers)(random)


def _object(random: Random, depth: int, definitions: Schema) -> Schema:
    names = random.sample(_WORDS, random.randint(1, 5))
    schema: Schema = {
        "type": "object",
        "properties": {name: _any(random, depth, definitions) for name in names},
        "required": random.sample(names, random.randint(0, len(names))),
        "additionalProperties": False,
    }
    if random.random() < 0.2:
        schema["description"] = "A description, which constrains nothing."
    return schema


def _array(random: Random, depth: int, definitions: Schema) -> Schema:
    low = random.randint(0, 2)
    schema: Schema = {"type": "array", "minItems": low, "maxItems": low + random.randint(0, 2)}
    if random.random() < 0.2:
        first = [_leaf(random) for _ in range(low + 1)]
        return schema | {"prefixItems": first, "items": False, "maxItems": len(first)}
    return schema | {"items": _any(random, depth, definitions)}


def _leaf(random: Random) -> Schema:
    return random.choice((_text, _pattern, _integer, _number, _constant, _enum, _nullable))(random)


def _text(random: Random) -> Schema:
    if random.random() < 0.3:
        return {"type": "string", "format": random.choice(_FORMATS)}
    low = random.randint(0, 3)
    return {"type": "string", "minLength": low, "maxLength": low + random.randint(0, 12)}


def _pattern(random: Random) -> Schema:
    return {"type": "string", "pattern": random.choice(_PATTERNS)}


def _integer(random: Random) -> Schema:
    low = random.randint(-20, 20)
    bounds = ({"minimum": low, "maximum": low + 30}, {"exclusiveMinimum": low, "exclusiveMaximum": low + 2}, {})
    schema: Schema = {"type": "integer", **random.choice(bounds)}
    return {"type": "integer", "multipleOf": random.randint(2, 7)} | (schema if "minimum" in schema else {})


def _number(random: Random) -> Schema:
    low = random.randint(-20, 20)
    return {"type": "number", "minimum": low, "maximum": low + random.randint(0, 5) + 0.5}


def _constant(random: Random) -> Schema:
    return {"const": random.choice([*_VALUES, {"a": [1, None]}, []])}


def _enum(random: Random) -> Schema:
    return {"enum": random.sample(_VALUES, random.randint(1, 4))}


def _nullable(random: Random) -> Schema:
    return {"type": [random.choice(["boolean", "integer"]), "null"]}
