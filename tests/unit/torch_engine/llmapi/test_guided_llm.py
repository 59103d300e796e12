"""Guided decoding of the LLM API: random weights resist every schema, and their answers fit it all the same."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import pytest
from jsonschema import Draft202012Validator

from trtx.torch_engine.llmapi.guided_decoding import GuidedDecodingParams
from trtx.torch_engine.llmapi.llm import LLM
from trtx.torch_engine.llmapi.request_errors import RequestError
from trtx.torch_engine.llmapi.sampling import SamplingParams

pytestmark = pytest.mark.proof  # core/test_guided.py and integration/test_guided.py ask the same of one request

PROMPT = [5, 9, 13]
TEXT = {"type": "string", "maxLength": 6}
NUMBER = {"type": "integer", "minimum": -9, "maximum": 99}


def thing(required: list[str], **properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}


PARTS: list[dict[str, Any]] = [
    TEXT, NUMBER, {"type": "boolean"}, {"type": "null"}, {"enum": ["a", 2, None, [1]]}, {"const": {"k": "v"}},
    {"type": "string", "pattern": "^[a-z]{2,4}$"}, {"type": "string", "format": "date"}, {"type": ["null", "boolean"]},
    {"type": "integer", "multipleOf": 3, "minimum": 0, "maximum": 30}, {"anyOf": [NUMBER, {"const": "none"}]},
    {"type": "number", "minimum": 0, "exclusiveMaximum": 1},
]  # fmt: skip
SCHEMAS: list[dict[str, Any]] = [
    *PARTS,
    *({"type": "array", "items": part, "maxItems": 3} for part in PARTS),
    *(thing(["a"], a=part) for part in PARTS),
    *(thing(["b"], a=part, b={"type": "boolean"}) for part in PARTS),
    *({"$ref": "#/$defs/p", "$defs": {"p": {"type": "array", "prefixItems": [part, {"type": "null"}], "items": False,
       "minItems": 2}}} for part in PARTS),
]  # fmt: skip


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with pytest.MonkeyPatch.context() as one_thread:
        one_thread.setenv("OMP_NUM_THREADS", "1")  # more threads than idle cores make each step wait
        with LLM("synthetic:tiny", max_batch_size=8, max_num_tokens=64, kv_cache_config={"max_tokens": 4096}) as made:
            yield made


def guided(max_tokens: int = 150, *, guide: dict[str, Any] | None = None, **sampling: Any) -> SamplingParams:
    params = None if guide is None else GuidedDecodingParams(**guide)
    return SamplingParams(**({"max_tokens": max_tokens, "temperature": 1.0} | sampling), guided_decoding=params)


def test_60_schemas_are_fitted_at_temperature_1(llm: LLM) -> None:
    assert len(SCHEMAS) == 60
    asked = [guided(guide={"json": schema}, seed=seed) for seed, schema in enumerate(SCHEMAS)]
    results = [llm.generate_async(PROMPT, params) for params in asked]
    whole = 0
    for schema, output in zip(SCHEMAS, results, strict=True):
        (choice,) = output.result().outputs
        if choice.finish_reason == "stop":
            whole += 1
            Draft202012Validator(schema).validate(json.loads(choice.text))
        else:
            assert (choice.finish_reason, len(choice.token_ids)) == ("length", 150)
    assert whole > 45, "whitespace has a limit, so that nearly all documents end"


def test_a_document_that_max_tokens_cuts_ends_by_its_length(llm: LLM) -> None:
    (choice,) = llm.generate_async(PROMPT, guided(2, guide={"json": thing(["a"], a=TEXT)})).result().outputs
    assert (choice.finish_reason, len(choice.token_ids)) == ("length", 2)


def test_choices_of_a_request_fit_each_for_itself(llm: LLM) -> None:
    outputs = llm.generate_async(PROMPT, guided(guide={"regex": "[0-9]{9}"}, n=4, seed=1)).result().outputs
    texts = {choice.text for choice in outputs}
    assert len(texts) == 4 and all(re.fullmatch("[0-9]{9}", text) for text in texts)


def test_any_object_and_a_list_of_grammars_are_followed(llm: LLM) -> None:
    found = llm.generate_async(PROMPT, guided(40, guide={"json_object": True}, ignore_eos=True)).result().outputs[0]
    assert found.text.startswith("{")
    for grammar in ('start: "yes" | "no"', 'root ::= "yes" | "no"'):
        (choice,) = llm.generate_async(PROMPT, guided(guide={"grammar": grammar})).result().outputs
        assert choice.text in ("yes", "no") and choice.finish_reason == "stop"


def test_a_stop_string_cuts_a_regex_and_never_a_document(llm: LLM) -> None:
    (choice,) = llm.generate_async(PROMPT, guided(guide={"regex": "[0-9]{3}x[0-9]{20}"}, stop="x")).result().outputs
    assert re.fullmatch("[0-9]{3}", choice.text) and (choice.finish_reason, choice.stop_reason) == ("stop", "x")
    document = {"json": thing(["a"], a=NUMBER)}
    with pytest.raises(RequestError, match="the stop string ':' occurs in the JSON .*; leave out stop$"):
        llm.generate_async(PROMPT, guided(guide=document, stop=":")).result()
    (choice,) = llm.generate_async(PROMPT, guided(guide=document, stop="@")).result().outputs
    Draft202012Validator(document["json"]).validate(json.loads(choice.text))


def test_a_schema_that_cannot_be_followed_is_the_requests_error(llm: LLM) -> None:
    with pytest.raises(RequestError, match='it has "not", which guided decoding does not support'):
        llm.generate_async(PROMPT, guided(guide={"json": {"not": TEXT}})).result()
    assert llm.generate_async(PROMPT, guided(5, ignore_eos=True)).result().outputs[0].finish_reason == "length"


def test_a_model_may_think_before_its_answer(llm: LLM) -> None:
    free = llm.generate_async(PROMPT, guided(8, seed=1, ignore_eos=True)).result().outputs[0].token_ids
    first, end = free[0], free[3]
    assert end not in free[:3]
    for guide in ({"thinking_end_id": end}, {"thinking_end_id": end, "thinking_start_id": first}):
        params = guided(40, guide={"regex": "[0-9]{4}", **guide}, seed=1, ignore_eos=True)
        (choice,) = llm.generate_async(PROMPT, params).result().outputs
        if "thinking_start_id" not in guide or choice.token_ids[0] == first:
            assert choice.token_ids[:4] == free[:4]
        after = choice.token_ids[4:] if choice.token_ids[0] == first else choice.token_ids
        assert re.fullmatch("[0-9]{4}", llm.tokenizer.decode(after, skip_special_tokens=True))
        assert choice.finish_reason == "stop"


def test_an_engine_without_guided_decoding_refuses_it() -> None:
    params = guided(guide={"regex": "a"})
    small: dict[str, Any] = {"max_batch_size": 2, "kv_cache_config": {"max_tokens": 256}}
    with (
        LLM("synthetic:tiny", guided_decoding_backend=None, **small) as off,
        pytest.raises(RequestError, match="guided decoding, which is off; set guided_decoding_backend"),
    ):
        off.generate_async(PROMPT, params).result()
