"""The grammar that a request's answer must follow: Dynamo's ``guided_decoding``, for the LLM API.

The frontend makes it of ``response_format``, of the ``guided_*`` fields, and of a ``tool_choice`` that forces a call.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from trtx.engine.api import EngineApi
from trtx.worker.requests.invalid_request import InvalidRequest

_KINDS = ("json", "regex", "choice", "grammar", "structural_tag")
_SPECIAL = frozenset("\\.^$*+?()[]{}|")
"""Characters with a meaning in a regular expression. Only these are escaped: engines differ in other escapes."""
_LONG_TEXT = 4 << 10
"""Length from which a grammar is checked in a thread: 256 KiB of schema take up to 30 ms, in which the event loop would
pass on no token of other requests."""


@dataclass(frozen=True, slots=True)
class RequestGrammar:
    """``kind``: the client's kind of grammar. ``params``: arguments of the LLM API's ``GuidedDecodingParams``."""

    kind: str
    params: Mapping[str, Any]

    @property
    def is_document(self) -> bool:
        """Whether the answer is a document that is worthless if a stop string cuts it."""
        return self.kind in ("json", "structural_tag")

    def cut_by(self, stop: str) -> InvalidRequest | None:
        """The error of an answer that a stop string cut, or None if its grammar permits the cut."""
        if not self.is_document:
            return None
        return InvalidRequest(
            f"the stop string {stop!r} occurs inside the document that the request's {self.kind} grammar demands, and "
            "would cut it off; leave the stop string out"
        )


async def check_long_grammar(grammar: RequestGrammar | None, api: EngineApi) -> None:
    """Checks a long grammar in a thread, so that the engine's API need not check it again. Raises InvalidRequest."""
    if grammar is None or api.GuidedDecodingParams is None:
        return
    if max(len(text) for text in grammar.params.values()) < _LONG_TEXT:
        return
    try:
        await asyncio.to_thread(api.GuidedDecodingParams, **grammar.params)
    except ValueError as error:
        raise InvalidRequest(str(error)) from error


def read_grammar(request: Mapping[str, Any], stop_strings: Sequence[str]) -> RequestGrammar | None:
    """The grammar of ``request``, Dynamo's dict; None if it has none. Raises InvalidRequest."""
    asked = (request.get("sampling_options") or {}).get("guided_decoding") or {}
    given = [kind for kind in _KINDS if asked.get(kind) is not None]
    if not given:
        return None
    if len(given) > 1:
        raise InvalidRequest(
            f"the request has several grammars ({', '.join(given)}), expected one: a forced tool_choice is one too; "
            "leave the others out"
        )
    kind = given[0]
    value = asked[kind]
    if kind == "choice":
        return RequestGrammar(kind, {"regex": _choice(value, stop_strings)})
    if kind in ("json", "structural_tag") and not isinstance(value, str):
        return RequestGrammar(kind, {kind: json.dumps(value)})
    if not isinstance(value, str) or not value:
        raise InvalidRequest(f"guided_{kind} is {value!r:.60}, expected text that is not empty; leave it out")
    return RequestGrammar(kind, {kind: value})


def _choice(options: Any, stop_strings: Sequence[str]) -> str:
    """A regular expression of the given texts."""
    if not isinstance(options, list) or not options or not all(isinstance(one, str) and one for one in options):
        raise InvalidRequest(
            f"guided_choice is {options!r:.60}, expected a list of texts that are not empty; give at least one"
        )
    for stop in stop_strings:
        for option in options:
            if stop in option:
                raise InvalidRequest(
                    f"the stop string {stop!r} occurs inside the choice {option!r:.60} and would cut it off; leave the "
                    "stop string out"
                )
    return f"({'|'.join(''.join(_escaped(character) for character in option) for option in options)})"


def _escaped(character: str) -> str:
    return f"\\{character}" if character in _SPECIAL else character
