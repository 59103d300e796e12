"""Grammars that no compiler likes: what is asked, and what the client reads; "" for those that compile."""

from __future__ import annotations

import json
from typing import Any

TAGS = {"begin": "<f>", "schema": {"type": "object"}, "end": "</f>"}


def nested(levels: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "integer"}
    for _ in range(levels):
        schema = {"type": "array", "items": schema}
    return schema


def chain(length: int, link: str = '{{"$ref":"#/$defs/{}"}}') -> str:
    links = ",".join(f'"{at}":{link.format(at + 1)}' for at in range(length))
    return f'{{"$ref":"#/$defs/0","$defs":{{{links},"{length}":{{"type":"string"}}}}}}'


def properties(count: int) -> dict[str, Any]:
    return {f"p{at}": {"type": "string"} for at in range(count)}


def text(**keywords: Any) -> dict[str, Any]:
    return {"type": "string", **keywords}


def integer(**keywords: Any) -> dict[str, Any]:
    return {"type": "integer", **keywords}


def array(**keywords: Any) -> dict[str, Any]:
    return {"type": "array", "items": {"type": "integer"}, **keywords}


DISTINCT = [
    {"type": "object", "properties": {f"p{at}": text()}, "required": [f"p{at}"], "additionalProperties": False}
    for at in range(300)
]
PRODUCT = [
    {"anyOf": [{"type": "object", "properties": {f"{i}_{j}": text()}, "required": [f"{i}_{j}"]} for j in range(6)]}
    for i in range(8)
]

# name: (the field of GuidedDecodingParams, its value, what the client reads)
HOSTILE: dict[str, tuple[str, Any, str]] = {
    "nested too deeply": ("json", nested(120), r"nests \d+ levels; expected at most 100; flatten it"),
    "nested deeply": ("json", nested(90), ""),
    "text nested without end": ("json", "[" * 200_000, r"is not valid JSON"),
    "a cycle of references": (
        "json", {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}},
        r"the JSON schema can't be followed: it permits no text$",
    ),
    "a reference to itself": ("json", {"$ref": "#"}, r"it permits no text$"),
    "a list of itself": ("json", array(items={"$ref": "#"}), ""),
    "an object that requires itself": (
        "json", {"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]}, ""
    ),
    "a reference to a web page": (
        "json", {"$ref": "http://example.invalid/s.json"}, r'"\$ref" names http://example.invalid/s.json, which is ano'
    ),
    "a reference to a file": ("json", {"$ref": "file:///etc/passwd"}, r"which is another document and is not loaded"),
    "a reference to nothing": ("json", {"$ref": "#/$defs/a"}, r"names /\$defs/a, which the schema does not have$"),
    "a chain of references": ("json", chain(8000), ""),
    "a chain of allOf": ("json", chain(5000, '{{"allOf":[{{"$ref":"#/$defs/{}"}}]}}'), ""),
    "references that double": (
        "json",
        chain(40, '{{"anyOf":[{{"$ref":"#/$defs/{0}"}},{{"$ref":"#/$defs/{0}"}}]}}'), "",
    ),
    "a regex of nested repeats": ("regex", "((a*)*)*b", ""),
    "a regex of a million states": ("regex", "((a{1,100}){1,100}){1,100}", ""),
    "a regex of a billion repeats": (
        "regex", "a{1000000000}", r"regex has patterns that require at least 1000000000 characters; expected at most"
    ),
    "a regex of a product of repeats": ("regex", r"((?:\[x]|[]a-z]\d){1000}){1,9}(b{99}){99}", r"at least 12801 char"),
    "patterns of many repeats": (
        "json", array(prefixItems=[text(pattern="a{6000}"), text(pattern="b{6000}")]), r"at least 12000 characters"
    ),
    "a grammar of a billion repeats": ("grammar", "start: /a{1000000000}/", r"at least 1000000000 characters"),
    "a pattern of nested repeats": ("json", text(pattern="^((a{0,100}){0,100}){0,100}$"), ""),
    "a pattern that looks ahead": ("json", text(pattern="^(?=a)b"), r"the pattern '\^\(\?=a\)b' .*look-around"),
    "a regex that looks behind": ("regex", "(?<=a)b", r"the pattern '\(\?<=a\)b' .*look-around"),
    "a pattern that refers back": ("json", text(pattern=r"^(a)\1$"), r"backreferences are not supported$"),
    "a pattern that is none": ("json", text(pattern="(["), r"the pattern '\(\[' is not accepted: unclosed character c"),
    "a regex that is none": ("regex", "([", r"the regular expression can't be followed: the pattern '\(\['"),
    "a regex of parentheses": ("regex", "(" * 5000 + "a" + ")" * 5000, r"…' is not accepted: exceed the maximum"),
    "a regex without a text": ("regex", r"[^\s\S]", r"it permits no text$"),
    "a long regex": ("regex", "a" * 20_000, r"regex has 20000 bytes; expected at most 16384; shorten it"),
    "a surrogate in a regex": ("regex", r"\uD800", r"hexadecimal literal is not a Unicode scalar value$"),
    "a text with a surrogate": ("regex", "a\ud800", r"expected Unicode text that is not empty"),
    "an empty regex": ("regex", "  ", r"expected Unicode text that is not empty"),
    "a large enum": ("json", {"enum": [f"v{at}" for at in range(15_000)]}, ""),
    "an enum of nothing": ("json", {"enum": []}, r"no value can satisfy it"),
    "an enum of long texts": ("json", {"enum": ["x" * 9000]}, r"a text of 9000 characters in enum; expected at most"),
    "a product of alternatives": ("json", {"allOf": PRODUCT}, r"its combinations of allOf, anyOf and oneOf are too ma"),
    "many alternatives": ("json", {"anyOf": [text()] * 2000}, r'has 2000 entries in "anyOf"; expected at most 1000'),
    "distinct alternatives": ("json", {"oneOf": DISTINCT}, ""),
    "alternatives that overlap": ("json", {"oneOf": [integer(), {"type": "number"}]}, r'"oneOf" may match the same'),
    "a long text": ("json", text(minLength=10**6), ""),
    "a text longer than memory": ("json", text(minLength=10**12), r"decimal literal invalid$"),
    "a text of negative length": ("json", text(minLength=10, maxLength=5), r"no value can satisfy it: minLength"),
    "a million items": ("json", array(minItems=10**6), ""),
    "lists of lists of a thousand": ("json", array(minItems=1000, items=array(minItems=1000)), ""),
    "unique items": ("json", array(uniqueItems=True), r'it has "uniqueItems", which guided decoding does not support$'),
    "not": ("json", {"not": text()}, r'it has "not", which'),
    "conditions": ("json", {"if": text(), "then": text(minLength=3)}, r'it has "if", "then", which'),
    "multiples": ("json", integer(multipleOf=7), ""),
    "multiples of a large number": ("json", integer(multipleOf=10**9 + 7), r"multipleOf .*expected at most 100000"),
    "multiples of many numbers": (
        "json", {"allOf": [integer(multipleOf=prime) for prime in (97, 89, 83, 79)]}, r"the least common multiple"
    ),
    "bounds that exclude": ("json", integer(minimum=10, maximum=5), r"no value can satisfy it: minimum \(10\)"),
    "types that exclude": ("json", {"allOf": [text(), integer()]}, r"no value can satisfy it: incompatible types$"),
    "a property that can't be": (
        "json", {"type": "object", "properties": {"a": False}, "required": ["a"]}, r"required property 'a' is unsati"
    ),
    "a key twice": ("json", '{"type": "object", "type": "string"}', ""),
    "a surrogate in a schema": ("json", '{"const": "\\ud800"}', r"JSON schema can't be followed: .* line 1 column 18"),
    "400 digits": ("json", '{"type": "integer", "minimum": ' + "9" * 400 + "}", r"number out of range at line 1"),
    "1e400": ("json", '{"type": "number", "minimum": 1e400}', r"number out of range at line 1"),
    "NaN": ("json", '{"const": NaN}', r"is not valid JSON: NaN is not a JSON number$"),
    "false": ("json", "false", r"json is 'false'; expected a JSON object$"),
    "true": ("json", "true", ""),
    "a list": ("json", "[]", r"json is '\[\]'; expected a JSON object$"),
    "an unknown type": ("json", {"type": "strin"}, r'it has the type "strin", which JSON Schema does not have$'),
    "an unknown format": ("json", text(format="klingon"), r'the format "klingon", which guided decoding does not'),
    "10,000 properties": ("json", {"properties": properties(10_000)}, r"json has \d+ bytes; expected at most 262144"),
    "5,000 properties": ("json", {"properties": properties(5000)}, r'has 5000 entries in "properties"; expected at'),
    "1,000 properties": ("json", {"type": "object", "properties": properties(1000)}, ""),
    "thousands of properties": (
        "json", {"allOf": [{"properties": properties(900)}] * 3}, r"too many objects with hundreds of properties"
    ),
    "patterns of properties that overlap": (
        "json",
        {"type": "object", "patternProperties": {"^a": integer(), "b$": text()}, "additionalProperties": False},
        r"are not disjoint$",
    ),
    "a rule that begins with itself": ("grammar", 'start: start "a" | "b"', ""),
    "an ambiguous rule": ("grammar", 'start: start start | "a" |', ""),
    "a rule that is itself": ("grammar", "start: start", r"the grammar can't be followed: it permits no text$"),
    "a token that holds itself": ("grammar", 'start: A\nA: "x" A | "y"', r'circular reference in token "A"'),
    "a rule that is missing": ("grammar", "start: foo", r'at 1\(8\): unknown name: "foo"$'),
    "a rule twice": ("grammar", 'start: "a"\nstart: "b"', r'at 2\(8\): duplicate rule: "start"$'),
    "an open parenthesis": ("grammar", "start: (((", r"1\(11\): Expected token"),
    "parentheses in Lark": ("grammar", "start: " + "(" * 15_000 + '"a"' + ")" * 15_000, r"too deeply nested"),
    "parentheses in GBNF": ("grammar", "root ::= " + "(" * 15_000 + '"a"' + ")" * 15_000, r"it is nested too deeply$"),
    "GBNF that ends too early": ("grammar", 'root ::= "a" (', r"the grammar can't be read: Expected '\)' at line 1"),
    "GBNF without root": ("grammar", 'foo ::= "a"', r"No 'root' rule found$"),
    "no grammar": ("grammar", "hello world", r"the grammar can't be read: Expected ::= at line 1"),
    "a long chain of rules": (
        "grammar", "\n".join(["start: r0", *(f"r{at}: r{at + 1}" for at in range(2000)), 'r2000: "z"']), ""
    ),
    "a long grammar": ("grammar", 'start: "a"\n' + "// more\n" * 5000, r"grammar has \d+ bytes; expected at most 32"),
    "a grammar with a remote schema": ("grammar", 'start: %json {"$ref": "http://x"}', r"is another document"),
    "tags without triggers": (
        "structural_tag", {"structures": [TAGS], "triggers": []}, r'"triggers" is missing or empty; expected an object'
    ),
    "tags of another form": ("structural_tag", {"format": {}}, r'"structures" is missing or empty; expected an object'),
    "tags that are none": ("structural_tag", "[1]", r"structural_tag is '\[1\]'; expected a JSON object$"),
    "a tag that no trigger begins": (
        "structural_tag", {"structures": [TAGS], "triggers": ["x"]}, r"structures\[0\].begin is '<f>'; expected it to"
    ),
    "a tag without a schema": (
        "structural_tag", {"structures": [{"begin": "<f>", "end": ""}], "triggers": ["<"]}, r"\[0\].schema is NoneType"
    ),
    "a tag whose begin is a number": (
        "structural_tag", {"structures": [TAGS | {"begin": 1}], "triggers": ["<"]}, r"\[0\].begin is missing or no text"
    ),
    "a tag with a remote schema": (
        "structural_tag", {"structures": [TAGS | {"schema": {"$ref": "http://x"}}], "triggers": ["<"]},
        r"the structural tag can't be followed: \"\$ref\" names http://x",
    ),
    "a tag that ends the grammar's text": (
        "structural_tag", {"structures": [TAGS | {"begin": '<f>"\nstart: "x'}], "triggers": ["<"]}, ""
    ),
}  # fmt: skip


def value_of(name: str) -> Any:
    field, value, _ = HOSTILE[name]
    return json.dumps(value) if field == "structural_tag" and not isinstance(value, str) else value
