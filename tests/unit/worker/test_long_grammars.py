"""A long grammar is checked beside the event loop, and the engine's API does not check it again."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from trtx.engine import load
from trtx.torch_engine.llmapi.grammar_limits import check_json
from trtx.torch_engine.llmapi.guided_decoding import GuidedDecodingParams
from trtx.worker.requests.grammars import RequestGrammar, check_long_grammar
from trtx.worker.requests.invalid_request import InvalidRequest

API = load("torch")


def schema(properties: int, **others: Any) -> RequestGrammar:
    named = {f"property {at}": {"type": "string", "maxLength": at} for at in range(properties)}
    return RequestGrammar("json", {"json": json.dumps({"type": "object", "properties": named, **others})})


def test_a_checked_schema_is_not_walked_again_on_the_event_loop() -> None:
    check_json.cache_clear()
    grammar = schema(500)
    asyncio.run(check_long_grammar(grammar, API))
    assert check_json.cache_info().misses == 1
    GuidedDecodingParams(**grammar.params)
    assert check_json.cache_info().misses == 1


def test_a_short_schema_and_no_schema_are_left_to_the_engine() -> None:
    check_json.cache_clear()
    asyncio.run(check_long_grammar(schema(3), API))
    asyncio.run(check_long_grammar(None, API))
    assert check_json.cache_info().misses == 0


def test_a_long_schema_beyond_the_limits_is_the_client_s_mistake() -> None:
    with pytest.raises(InvalidRequest, match=r"has 1500 entries in \"properties\"; expected at most 1000"):
        asyncio.run(check_long_grammar(schema(1500), API))
