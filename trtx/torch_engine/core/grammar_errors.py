"""Puts llguidance's messages into words for the client."""

from __future__ import annotations

import re

SHOWN_CHARACTERS = 300
"""Maximum length of a library's message in an error text."""
_SHOWN_PATTERN = 80
_EMPTY = ("NoExtension", "NoExtensionBias", "NotStopped", "EndOfSentence")
_KNOWN: tuple[tuple[str, str], ...] = (
    (r"Unimplemented keys: \[(.*)\]", "it has {0}, which guided decoding does not support"),
    (r"oneOf constraints are not supported", 'alternatives of "oneOf" may match the same value; use "anyOf"'),
    (
        r"Resource '(.*)' is not present in a registry",
        '"$ref" names {0}, which is another document and is not loaded; copy it to "$defs"',
    ),
    (r"Pointer '(.*)' does not exist", '"$ref" names {0}, which the schema does not have'),
    (r"Unsatisfiable schema: (.*)", "no value can satisfy it: {0}"),
    (r"schema too large", "its combinations of allOf, anyOf and oneOf are too many"),
    (r"Current row has \d+ items", "it permits too many alternatives at one place"),
    (r"fuel exhausted", "its patterns take too long to compile"),
    (r"too many states", "its patterns need too much memory"),
    (r"Invalid type: (.*)", 'it has the type "{0}", which JSON Schema does not have'),
    (r"Unknown format: (.*)", 'it has the format "{0}", which guided decoding does not support'),
    (r"maximum recursion depth exceeded", "it is nested too deeply"),
)


def readable(said: str) -> str:
    """Returns the reason from ``said``, an error text or a stop reason of llguidance, in one line."""
    line = said.split("\n", 1)[0].strip()
    if line in _EMPTY or not line:
        return "it permits no text"
    if (at := said.find("regex parse error:")) >= 0:
        return _regex_problem(said[at:])
    for pattern, words in _KNOWN:
        if (found := re.search(pattern, line)) is not None:
            return words.format(*(group[:SHOWN_CHARACTERS] for group in found.groups()))
    return line[:SHOWN_CHARACTERS]


def is_exhausted(said: str) -> bool:
    """True if a compiled grammar has used up the states of its patterns. All of its sequences share them."""
    return "too many states" in said


def _regex_problem(said: str) -> str:
    """Returns the reason from llguidance's error, which prints the expression, a line of carets, and a line with the
    reason.
    """
    lines = said.splitlines()
    reason = next((line.removeprefix("error: ") for line in lines if line.startswith("error: ")), "it is not valid")
    expression = lines[1].strip() if len(lines) > 1 else ""
    if len(expression) > _SHOWN_PATTERN:
        expression = f"{expression[:_SHOWN_PATTERN]}…"
    return f"the pattern {expression!r} is not accepted: {reason}"
