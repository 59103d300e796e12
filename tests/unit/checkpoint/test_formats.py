"""The table of formats, against everything that must know a format: runner, plan, build, command line, documents."""

from __future__ import annotations

import re
from pathlib import Path
from typing import get_args

import pytest
import torch
from torch.autograd.profiler import profile

from trtx.build.formats import NO_FORMAT
from trtx.checkpoint.formats import BUILT, FORMATS, LOADED
from trtx.cli.build import Quant
from trtx.torch_engine.runner.formats import FORMATS as RUN

DOCUMENT = Path(__file__).parents[3] / "docs" / "quantization.md"
ROWS = {row.split("`")[1]: row for row in DOCUMENT.read_text().splitlines() if re.match(r"\| `\w+` \| `", row)}
TABLE = "trtx/checkpoint/formats.py"


def test_every_format_that_is_loaded_has_its_arithmetic_in_the_runner() -> None:
    assert set(LOADED) == set(RUN), (
        f"{sorted(set(LOADED) ^ set(RUN))}: a format has `loading` in {TABLE} where, and only where, FORMATS of "
        "trtx/torch_engine/runner/formats.py has a class for it; add what is missing"
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("algorithm", LOADED)
def test_what_rounding_an_input_takes_is_what_the_plan_counts(algorithm: str, dtype: torch.dtype) -> None:
    rows, columns = 16, 4096
    stored = LOADED[algorithm].layout(rows, columns, 128)
    prepare = RUN[algorithm]().prepare([{suffix: torch.ones(tensor.shape) for suffix, tensor in stored.items()}])
    peak = 0.0
    if prepare is not None:
        x = torch.randn(rows, columns).to(dtype)
        with profile(profile_memory=True) as profiled:
            prepare(x)
        assert profiled.kineto_results is not None
        events = [event for event in profiled.kineto_results.events() if event.name() == "[memory]"]
        held = 0
        for event in sorted(events, key=lambda event: event.start_ns()):
            held += event.nbytes()
            peak = max(peak, held / x.numel())
    stated = LOADED[algorithm].rounding_bytes
    assert peak <= stated <= 1.3 * peak + 2, (
        f"{algorithm}: rounding an input holds {peak:.2f} bytes an element, and rounding_bytes of its row in {TABLE} "
        f"is {stated}; the plan and the runner's pool go by it"
    )


@pytest.mark.parametrize("algorithm", LOADED)
def test_bytes_a_parameter_are_those_of_the_layout(algorithm: str) -> None:
    size, loading = 8192, LOADED[algorithm]
    held = sum(tensor.nbytes("float32") for tensor in loading.layout(size, size, 128).values()) / size**2
    stated = FORMATS[algorithm].bytes_a_parameter
    assert stated == pytest.approx(held, rel=2e-3), (
        f"{algorithm}: bytes_a_parameter is {stated} and its layout has {held:.4f}; correct its row in "
        f"{TABLE}: plans of TensorRT-LLM and the space that a build needs go by it"
    )


def test_every_format_that_build_makes_can_be_asked_for() -> None:
    assert get_args(Quant) == (*BUILT, NO_FORMAT), (
        f"--quant takes {get_args(Quant)} and {TABLE} builds {tuple(BUILT)}: list the same in Quant "
        "of trtx/cli/build.py"
    )


@pytest.mark.parametrize("name", BUILT)
def test_every_format_that_build_makes_stands_in_the_document(name: str) -> None:
    form = BUILT[name]
    fits = "any" if form.block == 1 else f"multiples of {form.block}"
    wanted = [f"`{form.recipe}`", f"{8 * form.bytes_a_parameter:g}", fits, form.generation]
    cells = [cell.strip() for cell in ROWS.get(name, "").split("|")]
    assert not (missing := [cell for cell in wanted if cell not in cells]), (
        f"the row `{name}` of docs/quantization.md lacks {missing}: {TABLE} says so"
    )


def test_the_document_has_no_row_of_a_format_that_is_not_built() -> None:
    assert set(ROWS) == set(BUILT), f"docs/quantization.md has rows of {sorted(ROWS)}, {TABLE} builds {sorted(BUILT)}"


def test_no_two_formats_share_a_name() -> None:
    methods = [method for form in FORMATS.values() for method in form.methods]
    assert len(methods) == len(set(methods))
    assert all(FORMATS[form.algorithm] is form for form in BUILT.values()), f"one algorithm has two rows in {TABLE}"
