"""What holds where a config says nothing: the torch engine's own defaults, and those that configs are compared by."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from typing import Any

import pytest

from trtx.config.normal_form import normal_form
from trtx.torch_engine.llm_args import LlmArgs

OF_NO_CONFIG = {"model", "deterministic", "grammar_tokenizer", "grammar_end_ids"}
NULL_IS_OFF = {"guided_decoding_backend"}


def defaults(section: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    for one in fields(section):
        value = getattr(section, one.name)
        if is_dataclass(value):
            yield from defaults(value, f"{prefix}{one.name}.")
        elif f"{prefix}{one.name}" not in OF_NO_CONFIG:
            yield f"{prefix}{one.name}", value


@pytest.mark.parametrize(("path", "value"), [*defaults(LlmArgs(model="m"))])
def test_a_default_of_the_torch_engine_says_what_holds_anyway(path: str, value: Any) -> None:
    section, _, name = path.rpartition(".")
    for said in (value,) if path in NULL_IS_OFF else (value, None):
        assert normal_form({section: {name: said}} if section else {name: said}, "torch") == {}


def test_a_section_that_is_null_is_no_default() -> None:
    assert normal_form({"cuda_graph_config": None}, "torch") == {"cuda_graph_config": None}


@pytest.mark.parametrize(("engine", "backend"), [("torch", "xgrammar"), ("tensorrt-llm", "xgrammar")])
def test_guided_decoding_is_on_unless_it_is_null(engine: str, backend: str) -> None:
    assert normal_form({"guided_decoding_backend": backend}, engine) == {}
    assert normal_form({"guided_decoding_backend": None}, engine) == {"guided_decoding_backend": None}


def test_another_engine_has_its_own_defaults() -> None:
    assert normal_form({"max_batch_size": 2048}, "tensorrt-llm") == {}
    assert normal_form({"max_batch_size": 256}, "tensorrt-llm") == {"max_batch_size": 256}
    assert normal_form({"max_batch_size": None}, "tensorrt-llm") == {"max_batch_size": None}
