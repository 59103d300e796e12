"""The table of formats, against everything that must know a format: runner, plan, build and command line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import get_args

import pytest
import torch
from safetensors.torch import save_file
from torch.autograd.profiler import profile

from trtx.build.formats import NO_FORMAT
from trtx.checkpoint.formats import BUILT, FORMATS, LOADED
from trtx.cli.build import Quant
from trtx.torch_engine.runner.formats import FORMATS as RUN

TABLE = "trtx/checkpoint/formats.py"
# Bits of a parameter of a large module: those of a value, and those of a scale by the values that share it.
BITS = {
    "FP8": 8,
    "W4A16_AWQ": 4 + 32 / 128,
    "NVFP4": 4 + 8 / 16,
    "W8A8_SQ_PER_CHANNEL": 8,
    "FP8_PER_CHANNEL_PER_TOKEN": 8,
    "FP8_BLOCK_SCALES": 8 + 32 / 128**2,
    "FP8_PB_WO": 8 + 32 / 128**2,
    "INT8_SQ": 8,
    "W4A8_AWQ": 4 + 16 / 128,
    "W4A16_GPTQ": 4 + (16 + 4) / 128,  # a zero point of 4 bits too
    "NVFP4_AWQ": 4 + 8 / 16,
    "MXFP4": 4 + 8 / 32,
    "W4A8_MXFP4_FP8": 4 + 8 / 32,
    "W4A8_MXFP4_MXFP8": 4 + 8 / 32,
}


def test_every_format_that_is_loaded_has_its_arithmetic_in_the_runner() -> None:
    assert set(LOADED) == set(RUN), (
        f"{sorted(set(LOADED) ^ set(RUN))}: a format has `loading` in {TABLE} where, and only where, FORMATS of "
        "trtx/torch_engine/runner/formats.py has a class for it; add what is missing"
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("algorithm", LOADED)
def test_what_rounding_an_input_takes_is_what_the_plan_counts(algorithm: str, dtype: torch.dtype) -> None:
    assert algorithm in RUN, f"{algorithm}: add its class to FORMATS of trtx/torch_engine/runner/formats.py"
    rows, columns = 16, 4096
    stored = FORMATS[algorithm].layout(rows, columns, 128)
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


@pytest.mark.parametrize("algorithm", FORMATS)
def test_a_parameter_takes_the_bits_that_its_format_has_by_hand(algorithm: str, tmp_path: Path) -> None:
    assert algorithm in BITS, (
        f"{algorithm}: add the bits of a parameter, scales included, to BITS of {Path(__file__).name}"
    )
    stated, expected = 8 * FORMATS[algorithm].bytes_a_parameter, BITS[algorithm]
    assert stated == expected, (
        f"{algorithm}: the layout of its row in {TABLE} has {stated} bits a parameter, by hand they are {expected}: "
        "correct the one that is wrong; plans of TensorRT-LLM and the space that a build needs go by the layout"
    )
    size = 2048
    layout = FORMATS[algorithm].layout(size, size, 128)
    tensors = {
        suffix: torch.zeros(stored.shape, dtype=getattr(torch, stored.dtype or "float32"))
        for suffix, stored in layout.items()
    }
    save_file(tensors, tmp_path / "module.safetensors")
    on_disk = 8 * (tmp_path / "module.safetensors").stat().st_size / size**2
    assert on_disk == pytest.approx(expected, rel=0.01), (
        f"{algorithm}: a module of {size} x {size} in the layout of {TABLE} takes {on_disk:.3f} bits a parameter on "
        f"the disk, by hand they are {expected}"
    )


def test_every_format_that_build_makes_can_be_asked_for() -> None:
    assert get_args(Quant) == (*BUILT, NO_FORMAT), (
        f"--quant takes {get_args(Quant)} and {TABLE} builds {tuple(BUILT)}: list the same in Quant "
        "of trtx/cli/build.py"
    )


NOT_OF_QUANT_ALGO = {  # what quantization files call them, in place of TensorRT-LLM's QuantAlgo
    "FP8_PB_WO": "ModelOpt's name of FP8_BLOCK_SCALES",
    "INT8_SQ": "ModelOpt's name of W8A8_SQ_PER_CHANNEL",
    "MXFP4": "quant_method of gpt-oss",
}


def test_formats_are_called_as_tensorrt_llm_calls_them() -> None:
    facts = json.loads((Path(__file__).parents[2] / "standin" / "llm_api.json").read_text(encoding="utf-8"))
    theirs = {member["name"] for member in facts["source"]["enums"]["QuantAlgo"]["members"]}
    strangers = sorted(FORMATS.keys() - theirs - NOT_OF_QUANT_ALGO.keys())
    assert not strangers, (
        f"{', '.join(strangers)} is no QuantAlgo of TensorRT-LLM: call the row of {TABLE} as it does "
        f"({', '.join(sorted(theirs))}), or say in NOT_OF_QUANT_ALGO of {Path(__file__).name} whose name it is"
    )


def test_no_two_formats_share_a_name() -> None:
    methods = [method for form in FORMATS.values() for method in form.methods]
    twice = sorted({method for method in methods if methods.count(method) > 1})
    assert not twice, f"{', '.join(twice)} is the method of two formats: leave it in one row of {TABLE}"
    assert all(FORMATS[form.algorithm] is form for form in BUILT.values()), f"one algorithm has two rows in {TABLE}"
