"""Named loads that resemble real use: the options of ``trtx bench`` for each, the same for every server.

A load is ``KIND`` or ``KIND:option=value,option=value``, such as ``drawn:concurrency=16,isl=900,seed=3``. The options
are those of ``trtx bench`` without dashes; they replace or extend the kind's own. ``trtx bench`` checks the
combination.
"""

from __future__ import annotations

import json
import zlib
from dataclasses import dataclass

# A document that is longer than any answer of the load, so that answers with and without the schema are equally long.
ENDLESS_SCHEMA = {
    "type": "array",
    "minItems": 200,
    "items": {
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 24},
            "age": {"type": "integer", "minimum": 0, "maximum": 130},
            "kind": {"enum": ["person", "company", "agent"]},
            "tags": {"type": "array", "items": {"type": "string", "maxLength": 12}, "maxItems": 4},
            "score": {"type": "number"},
        },
        "required": ["name", "age", "kind", "tags", "score"],
        "additionalProperties": False,
    },
}
KINDS: dict[str, dict[str, str]] = {
    # Equal lengths, all clients at once.
    "fixed": {"concurrency": "64", "isl": "512", "osl": "128"},
    # As fixed, and every answer follows a JSON schema.
    "schema": {"concurrency": "64", "isl": "512", "osl": "128", "extra-inputs": json.dumps({"response_format": {
        "type": "json_schema", "json_schema": {"name": "records", "schema": ENDLESS_SCHEMA},
    }})},
    # Mixed lengths, with means of 1,500 and 250.
    "drawn": {"concurrency": "128", "isl": "1500", "isl-stddev": "600", "osl": "250", "osl-stddev": "100"},
    # Open loop: 12 requests/s.
    "arrivals": {"request-rate": "12", "isl": "1024", "isl-stddev": "400", "osl": "200", "osl-stddev": "80",
                 "request-count": "240"},
    # Documents: few clients, prompts much longer than answers.
    "long": {"concurrency": "4", "isl": "12000", "osl": "64", "request-count": "32"},
    # Sixteen system prompts that requests share: 2,048 of 2,560 tokens.
    "prefixes": {"concurrency": "32", "isl": "2560", "osl": "128", "prefix-prompt-length": "2048",
                 "num-prefix-prompts": "16"},
    # Conversations: each turn includes all previous ones.
    "turns": {"concurrency": "16", "isl": "512", "osl": "128", "session-turns-mean": "4", "request-count": "128"},
}  # fmt: skip
OPTIONS = frozenset({
    "concurrency", "request-rate", "arrival", "burstiness", "isl", "osl", "isl-stddev", "osl-stddev", "request-count",
    "warmup-request-count", "seed", "trials", "prompt-corpus", "session-turns-mean", "session-turns-stddev",
    "session-turn-delay-mean", "session-turn-delay-stddev", "prefix-prompt-length", "num-prefix-prompts",
    "shared-system-prompt-length", "extra-inputs", "temperature", "top-p", "top-k",
})  # fmt: skip
SEEDS = 1_000_000


@dataclass(frozen=True, slots=True)
class UserLoad:
    """``name``: the requested text. ``options``: all options of ``trtx bench``, including a seed."""

    name: str
    options: dict[str, str]

    def words(self) -> list[str]:
        return [word for name, value in self.options.items() for word in (f"--{name}", value)]


def user_loads(asked: list[str], common: dict[str, str]) -> list[UserLoad]:
    """Returns the loads in the requested order; ``common`` has defaults for all. Raises ValueError.

    The seed is derived from the requested text. So two loads have different prompts, which a prefix cache can't mix up,
    and a later call has the same ones.
    """
    if twice := next((text for text in asked if asked.count(text) > 1), None):
        raise ValueError(f"load {twice!r} is named twice; each once, or with other options")
    found = []
    for text in asked:
        kind, _, said = text.partition(":")
        if kind not in KINDS:
            raise ValueError(f"no load {kind!r}; there are {', '.join(KINDS)}")
        own: dict[str, str] = {}
        for pair in filter(None, said.split(",")):
            name, is_pair, value = pair.partition("=")
            if name not in OPTIONS or not is_pair or not value:
                raise ValueError(f"{pair!r} of load {text!r} is no option=value; options: {', '.join(sorted(OPTIONS))}")
            if name in own:
                raise ValueError(f"load {text!r} says {name} twice; expected one value")
            own[name] = value
        of_kind = KINDS[kind]
        if "request-rate" in own or "concurrency" in own:  # two ways to say when a request is sent
            of_kind = {name: value for name, value in of_kind.items() if name not in ("request-rate", "concurrency")}
        found.append(UserLoad(text, {"seed": str(zlib.crc32(text.encode()) % SEEDS)} | common | of_kind | own))
    return found
