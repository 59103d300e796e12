"""The Python API: TensorRT-LLM's names are there, or say what to use in a sentence, and cost no import."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from pathlib import Path

import pytest

from trtx import names
from trtx.torch_engine import llmapi

MODULES = ("trtx", "trtx.torch_engine", "trtx.torch_engine.llmapi")
FACTS = json.loads((Path(__file__).parents[1] / "standin" / "llm_api.json").read_text(encoding="utf-8"))
TENSORRT_LLM = sorted({
    entry["name"]
    for part in ("source", "page")
    for module in ("tensorrt_llm", "tensorrt_llm.llmapi")
    for entry in FACTS[part]["modules"].get(module, ())
})  # fmt: skip


@pytest.mark.parametrize("name", TENSORRT_LLM)
def test_a_name_of_tensorrt_llm_is_there_or_says_what_to_use(name: str) -> None:
    for module in MODULES:
        if name in names.PUBLIC:
            assert getattr(importlib.import_module(module), name) is getattr(llmapi, name)
            continue
        with pytest.raises(ImportError) as refused:
            exec(f"from {module} import {name}")
        said = str(refused.value)
        assert said.startswith(f"{module} has no {name}: the embedded engine "), (
            "name it in ABSENT of trtx/names.py with what to use, or in PUBLIC"
        )
        assert len(said) < 200 and "\n" not in said


def test_the_list_of_names_is_that_of_the_module_and_has_nothing_twice() -> None:
    assert set(llmapi.__all__) == names.PUBLIC
    assert not names.PUBLIC & names.ABSENT.keys()
    for module in MODULES[:2]:
        assert set(dir(importlib.import_module(module))) >= names.PUBLIC


@pytest.mark.parametrize("name", ["nonsense", "__path__x", "LLMs"])
@pytest.mark.parametrize("module", MODULES)
def test_any_other_name_is_missing_as_python_says_it(module: str, name: str) -> None:
    assert not hasattr(importlib.import_module(module), name)
    with pytest.raises(ImportError, match="cannot import name"):
        exec(f"from {module} import {name}")


def test_import_trtx_loads_nothing_slow_until_a_name_is_asked_for() -> None:
    program = (
        "import sys, trtx, trtx.torch_engine; dir(trtx); hasattr(trtx, 'nonsense'); "
        "assert not {'torch', 'numpy', 'trtx.torch_engine.llmapi'} & set(sys.modules); "
        "from trtx import LLM, SamplingParams; "
        "from trtx.torch_engine import LLM as old, Logprob; assert old is LLM"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
