"""The stand-in has what the facts list, as they list it, and nothing else; also for older versions."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
from collections.abc import Callable
from typing import Any

import pytest

pytestmark = pytest.mark.usefixtures("only_standin")

NAMES_OF_TREE = """
import importlib, json, sys
import tensorrt_llm
found = {}
for path in sorted(name for name in sys.modules if name.split(".")[0] == "tensorrt_llm" and "._" not in name):
    module = importlib.import_module(path)
    found[path] = [name for name in dir(module) if getattr(module, name) is not None]
import inspect
from tensorrt_llm.llmapi.llm import BaseLLM, SamplingParams
from tensorrt_llm.llmapi import DisaggregatedParams
from tensorrt_llm.llmapi.llm_args import TorchLlmArgs, KvCacheConfig
print(json.dumps({
    "version": tensorrt_llm.__version__, "modules": found,
    "methods": [name for name in dir(BaseLLM) if not name.startswith("__")],
    "generate_async": list(inspect.signature(BaseLLM.generate_async).parameters),
    "sampling": list(SamplingParams.__dataclass_fields__),
    "disaggregated": list(DisaggregatedParams.__dataclass_fields__),
    "arguments": list(TorchLlmArgs.model_fields), "cache": list(KvCacheConfig.model_fields),
    "torch_is_imported": "torch" in sys.modules}))
"""
DISAGG_IDS = """
import inspect, json
from tensorrt_llm.llmapi.disagg_utils import get_global_disagg_request_id as made
print(json.dumps([list(inspect.signature(made).parameters), made(1)]))
"""


def test_every_listed_name_is_there_and_no_other(facts: dict[str, Any]) -> None:
    for path, entries in facts["source"]["modules"].items():
        module = importlib.import_module(path)
        expected = {entry["name"] for entry in entries if entry.get("since") != "later" and "until" not in entry}
        assert set(module.__all__) == {name for name in expected if not name.startswith("_")}, path
        for name in expected:
            assert getattr(module, name) is not None
        with pytest.raises(AttributeError, match="no attribute 'NoSuchName'"):
            _ = module.NoSuchName


def test_names_that_came_later_are_absent(facts: dict[str, Any]) -> None:
    with pytest.raises(ImportError):
        importlib.import_module("tensorrt_llm.visual_gen.args")
    with pytest.raises(AttributeError):
        _ = importlib.import_module("tensorrt_llm").VisualGen
    with pytest.raises(AttributeError):
        _ = importlib.import_module("tensorrt_llm.llmapi").BuildConfig  # left with the TensorRT backend
    assert "ctx_usage" not in importlib.import_module("tensorrt_llm.llmapi").DisaggregatedParams.__dataclass_fields__


@pytest.mark.parametrize("function", ["generate", "generate_async"])
def test_signatures_are_the_pages(facts: dict[str, Any], function: str) -> None:
    llm = importlib.import_module("tensorrt_llm").LLM
    listed = facts["page"]["functions"][f"BaseLLM.{function}"]
    given = list(inspect.signature(getattr(llm, function)).parameters.values())[1:]
    assert [parameter.name for parameter in given] == [entry["name"] for entry in listed]
    for parameter, entry in zip(given, listed, strict=True):
        assert parameter.default == entry.get("default", inspect.Parameter.empty), parameter.name


def test_the_constructor_takes_the_pages_positions(facts: dict[str, Any]) -> None:
    parameters = list(inspect.signature(importlib.import_module("tensorrt_llm").LLM).parameters)
    assert parameters == [entry["name"] for entry in facts["page"]["functions"]["BaseLLM.__init__"]] + ["kwargs"]


@pytest.mark.parametrize(
    ("module", "name"),
    [
        ("tensorrt_llm.sampling_params", "SamplingParams"),
        ("tensorrt_llm.disaggregated_params", "DisaggregatedParams"),
        ("tensorrt_llm.executor.result", "CompletionOutput"),
    ],
)
def test_dataclasses_have_the_pages_fields(facts: dict[str, Any], module: str, name: str) -> None:
    made = getattr(importlib.import_module(module), name)
    listed = {entry["name"] for entry in facts["page"]["dataclasses"][name] if entry.get("since") != "later"}
    assert {field.name for field in dataclasses.fields(made) if not field.name.startswith("_")} == listed
    assert made.__module__ == module
    assert not hasattr(made(index=0) if name == "CompletionOutput" else made(), "__dict__")  # slots


def test_a_result_has_no_further_public_attributes(facts: dict[str, Any]) -> None:
    output = importlib.import_module("tensorrt_llm.llmapi").RequestOutput
    listed = {
        m["name"] for name in ("GenerationResult", "RequestOutput") for m in facts["source"]["classes"][name]["members"]
    }
    assert {name for name in dir(output) if not name.startswith("_")} == listed
    with pytest.raises(RuntimeError, match="not expected to create"):
        output()


@pytest.mark.parametrize(
    ("version", "absent"),
    [
        ("1.3.0rc22", []),
        ("1.3.0rc7", ["get_kv_cache_capacity", "_check_health", "encode"]),
        ("1.2.1", ["get_kv_cache_capacity", "_check_health", "encode"]),
    ],
)
def test_older_versions_lack_what_came_later(in_child: Callable[..., Any], version: str, absent: list[str]) -> None:
    found = in_child(NAMES_OF_TREE, STANDIN_TRTLLM_VERSION=version)
    is_newest = version == "1.3.0rc22"
    assert found["version"] == f"{version}+cpu"
    assert not set(absent) & set(found["methods"])
    assert ("BuildConfig" in found["modules"]["tensorrt_llm.llmapi"]) is not is_newest
    assert ("SADecodingConfig" in found["modules"]["tensorrt_llm.llmapi"]) is is_newest
    assert ("PARDDecodingConfig" in found["modules"]["tensorrt_llm.llmapi"]) is (version != "1.2.1")
    assert ("ConversationParams" in found["modules"]["tensorrt_llm.llmapi"]) is is_newest
    assert ("conversation_params" in found["generate_async"]) is is_newest
    assert ("priority" in found["generate_async"]) is is_newest
    assert ("logprobs_simple_format" in found["sampling"]) is is_newest
    assert ("disagg_request_id" in found["disaggregated"]) is (version != "1.2.1")
    assert ("sleep_config" in found["arguments"]) is is_newest
    assert ("onboard_blocks" in found["cache"]) is not is_newest
    assert not found["torch_is_imported"]


@pytest.mark.parametrize(
    ("version", "parameters"), [("1.3.0rc7", ["machine_id"]), ("1.3.0rc22", ["node_id", "process_id"])]
)
def test_global_ids_are_made_as_the_version_does(
    in_child: Callable[..., Any], version: str, parameters: list[str]
) -> None:
    names, made = in_child(DISAGG_IDS, STANDIN_TRTLLM_VERSION=version)
    assert names == parameters
    assert 1 << 40 <= made < 1 << 63


def test_an_unknown_version_is_refused(in_child: Callable[..., Any]) -> None:
    with pytest.raises(AssertionError, match=r"STANDIN_TRTLLM_VERSION is '9'; expected one of 1\.2\.1"):
        in_child("import tensorrt_llm", STANDIN_TRTLLM_VERSION="9")
