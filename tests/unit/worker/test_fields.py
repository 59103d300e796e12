"""Every field of Dynamo's request is honoured, without effect, or refused by name; an unknown one is refused."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import mmap
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from dynamo.common.backend.engine import GenerateRequest
from examples import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from trtx.torch_engine.llmapi.sampling import FIELDS as SAMPLING_FIELDS
from trtx.torch_engine.llmapi.sampling import FieldUse, SamplingParams
from trtx.worker.requests.fields import FIELDS, refusals
from trtx.worker.requests.invalid_request import InvalidRequest
from trtx.worker.requests.request import parse
from trtx.worker.requests.values import InvalidValue

PROMPT = {"token_ids": [5, 6, 7]}
# The Rust structs that arrive as mappings. A mapping counts as one field of the one around it.
STRUCTS = {
    "PreprocessedRequest": "",
    "StopConditions": "stop_conditions",
    "SamplingOptions": "sampling_options",
    "GuidedDecodingOptions": "sampling_options.guided_decoding",
    "OutputOptions": "output_options",
    "AgentContext": "agent_context",
    "PrefillResult": "prefill_result",
}
# Of nothing but what is empty: each asks for JSON, {} for any of it.
SCHEMAS_OF_NOTHING: list[dict[str, Any]] = [
    {}, {"properties": {"a": {}}}, {"properties": {}, "required": []}, {"items": {}}, {"not": {}}, {"const": None},
    {"enum": []}, {"type": []}, {"$ref": ""},
]  # fmt: skip
PATHS = [(section, name) for section, fields in FIELDS.items() for name in fields]


def within(section: str, **values: Any) -> dict[str, Any]:
    """A request with ``values`` in ``section``, such as ``extra_args.nvext``."""
    for part in reversed(section.split(".") if section else []):
        values = {part: values}
    return PROMPT | values


def names_of(section: str) -> set[str]:
    """Of the fields of a section, and of the mappings in it that are sections themselves."""
    inner = {path.rpartition(".") for path in FIELDS if path}
    return FIELDS[section].keys() | {name for parent, _, name in inner if parent == section}


@pytest.fixture(scope="module")
def runtime() -> Iterator[mmap.mmap]:
    """The installed Dynamo's compiled half, where serde keeps the names and the number of a struct's fields."""
    spec = importlib.util.find_spec("dynamo._core")
    assert spec is not None and spec.origin is not None
    with Path(spec.origin).open("rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as binary:
        yield binary


def test_the_table_was_read_from_the_dynamo_that_is_installed() -> None:
    """Another one: look at its PreprocessedRequest again, then at docs/request-fields.md."""
    assert importlib.metadata.version("ai-dynamo-runtime") == "1.6.1"


def test_the_table_has_every_key_of_dynamos_own_contract() -> None:
    assert GenerateRequest.__annotations__.keys() - names_of("") == set()


@pytest.mark.parametrize("struct", STRUCTS)
def test_the_table_has_every_field_of_dynamos_struct(runtime: mmap.mmap, struct: str) -> None:
    at = runtime.find(f"struct {struct} with ".encode())
    count = re.match(rb"struct \w+ with (\d+) element", runtime[at : at + 100])
    assert count is not None
    names = names_of(STRUCTS[struct])
    assert len(names) == int(count.group(1))
    assert [name for name in names if runtime.find(name.encode()) < 0] == []


def test_the_table_has_every_routing_hint(runtime: mmap.mmap) -> None:
    """Their struct is written without a count: the names stand between its own and the next one's, each once a file."""
    at = runtime.find(b"RoutingHintsbackend_instance_id") + len("RoutingHints")
    written = runtime[at : runtime.find(b"BootstrapInfo", at)].decode()
    for name in sorted(FIELDS["routing"], key=len, reverse=True):
        written = written.replace(name, " ")
    assert written.split() == []


@pytest.mark.parametrize(("section", "name"), PATHS, ids=lambda part: part or "request")
def test_a_refused_field_is_refused_by_name_and_no_other(section: str, name: str) -> None:
    said = list(refusals(within(section, **{name: {"held": "x"} if name != "guided_decoding" else {"json": {"a": 1}}})))
    if FIELDS[section][name].fate == "refused":
        assert len(said) == 1
        assert name in said[0] or "media" in said[0]
        assert len(said[0]) < 300
    else:
        assert said == []


@pytest.mark.parametrize("section", FIELDS, ids=lambda section: section or "request")
@pytest.mark.parametrize("value", [1, False, "x", [0], {"a": {"b": 2}}], ids=str)
def test_a_field_that_nobody_knows_is_refused_once_it_holds_something(section: str, value: Any) -> None:
    with pytest.raises(InvalidRequest, match=r"new_field is .*, and this worker does not know the field"):
        parse(within(section, new_field=value), context_length=10)
    for nothing in (None, [], "", {}, {"a": None}):
        assert parse(within(section, new_field=nothing), context_length=10)


def test_a_value_that_asks_for_nothing_is_no_reason_to_refuse() -> None:
    for section, name in PATHS:
        empty = () if FIELDS[section][name].asks_when_empty else ([], {}, "")
        for nothing in (None, *empty, *FIELDS[section][name].asks_nothing):
            assert list(refusals(within(section, **{name: nothing}))) == [], (section, name)


@pytest.mark.parametrize("schema", [*SCHEMAS_OF_NOTHING, True, False], ids=str)
def test_a_schema_is_asked_for_by_being_there_whatever_is_in_it(schema: Any) -> None:
    asked = within("sampling_options", n=None, guided_decoding={"json": schema, "regex": None})
    grammar = parse(asked, context_length=10).grammar
    assert grammar is not None and json.loads(grammar.params["json"]) == schema


@pytest.mark.parametrize("kind", ["json", "regex", "grammar", "choice", "structural_tag", "whitespace_pattern"])
def test_a_grammar_is_refused_if_its_text_is_empty(kind: str) -> None:
    with pytest.raises(InvalidRequest, match=rf"guided_{kind} is '', expected"):
        parse(within("sampling_options", guided_decoding={kind: ""}), context_length=10)


def test_a_grammar_of_which_every_part_is_null_was_asked_for_by_nobody() -> None:
    for nothing in (None, {}, {"json": None, "regex": None, "choice": None}):
        assert parse(within("sampling_options", guided_decoding=nothing), context_length=10).grammar is None


@pytest.mark.parametrize(
    "kind", [{"image_url": [{"Url": "data:image/png;base64," + "A" * 10**6}]}, {"audio_url": [{"Url": "http://x/a"}]}]
)
def test_media_are_refused_with_their_kind_and_without_their_bytes(kind: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest, match=f"has media \\({next(iter(kind))}\\), but this model") as refused:
        parse(PROMPT | {"multi_modal_data": kind, "extra_args": {"messages": [{"role": "user"}]}}, context_length=10)
    assert len(str(refused.value)) < 300


@pytest.mark.parametrize("name", ["allowed_token_ids", "bad_words_token_ids", "logprob_token_ids"])
def test_token_lists_that_no_engine_takes_are_refused(name: str) -> None:
    with pytest.raises(InvalidRequest, match=rf"{name} is \[70\], expected none"):
        parse(within("extra_args.sampling_options", **{name: [70]}), context_length=10)


def test_an_empty_list_of_allowed_tokens_is_refused_as_it_allows_none() -> None:
    with pytest.raises(InvalidRequest, match=r"allowed_token_ids is \[\], expected none"):
        parse(within("extra_args.sampling_options", allowed_token_ids=[]), context_length=10)


def test_prompt_logprobs_are_computed_only_for_a_client_that_will_see_them() -> None:
    asked = PROMPT | {"output_options": {"prompt_logprobs": 2}}
    with pytest.raises(InvalidRequest, match="prompt_logprobs is 2, and the frontend would drop them"):
        parse(asked, context_length=10)
    for shown in ("prompt_logprobs", "engine_data"):
        seen = asked | {"extra_args": {"nvext": {"extra_fields": [shown]}}}
        assert parse(seen, context_length=10).sampling["prompt_logprobs"] == 2


@pytest.mark.parametrize(("section", "name"), [path for path in PATHS if FIELDS[path[0]][path[1]].read is not None])
def test_what_is_handed_to_an_engine_is_honoured_there_in_all_of_its_range(section: str, name: str) -> None:
    """The worker's table and the torch engine's are of one mind, in both of their ranges."""
    use = SAMPLING_FIELDS[name].torch if name in SAMPLING_FIELDS else FieldUse.REFUSED
    assert use is FieldUse.HONOURED, (
        f"requests/fields.py hands {name} to the engine, whose table says {use.value}: refuse it in that file, or "
        "make it honoured in torch_engine/llmapi/sampling.py and do it there"
    )
    read, taken = FIELDS[section][name].read, 0
    assert read is not None
    for value in (-(2**63), -100, -2.0, -1, 0, 0.0, 1e-9, 0.01, 0.5, 1, 1.0, 2.0, 20, 100.0, 100.5, 10**6, 2**63 - 1):
        try:
            sampled = read(name, value)
        except InvalidValue:
            continue
        try:
            SamplingParams(**{"max_tokens": None} | {name: sampled})
        except ValueError as error:
            pytest.fail(
                f"requests/fields.py lets {name} be {value}, and the engine does not ({error}): narrow its range"
            )
        taken += 1
    assert taken


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)


@settings(max_examples=examples(50), derandomize=True, deadline=None)
@given(section=st.sampled_from(sorted(FIELDS)), name=st.text(max_size=12), value=JSON)
def test_whatever_comes_under_another_name_is_refused_or_empty(section: str, name: str, value: Any) -> None:
    if name in names_of(section):
        return

    is_empty = value in (None, "", []) or (isinstance(value, dict) and not any(v is not None for v in value.values()))
    assert bool(list(refusals(within(section, **{name: value})))) is not is_empty
