"""Which GPU runs which format, and which model a format fits."""

from __future__ import annotations

import pytest

from trtx.build.formats import FORMATS, check_gpu, check_model
from trtx.errors import UsageError
from trtx.memory import MemoryDevice, device_named

MODEL = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_attention_heads": 4,
    "head_dim": 64,
}


@pytest.mark.parametrize(
    ("gpu", "runs"),
    [
        ("A100", {"int4_awq", "int8_sq"}),
        ("L40S", {"fp8", "int4_awq", "int8_sq"}),
        ("H100", {"fp8", "int4_awq", "int8_sq"}),
        ("B200", {"fp8", "int4_awq", "int8_sq", "nvfp4"}),
        ("RTX5090", {"fp8", "int4_awq", "int8_sq", "nvfp4"}),
    ],
)
def test_a_format_that_a_generation_cannot_run_is_refused_by_name(gpu: str, runs: set[str]) -> None:
    device = device_named(gpu)
    for name, form in FORMATS.items():
        if name in runs:
            check_gpu(form, device)
            continue
        with pytest.raises(UsageError) as refused:
            check_gpu(form, device)
        for word in (name, device.name, form.generation, "--gpu"):
            assert word in str(refused.value)
        for other in runs:
            assert other in str(refused.value)


def test_a_gpu_that_nobody_knows_is_not_refused() -> None:
    check_gpu(FORMATS["nvfp4"], MemoryDevice("Some GPU", 1 << 30))


@pytest.mark.parametrize("already", [{"quant_algo": "FP8"}, {"quant_method": "awq"}, {"quant_method": "fp8"}])
def test_a_quantized_checkpoint_is_refused_with_what_it_is(already: dict[str, str]) -> None:
    with pytest.raises(UsageError, match=f"model m is quantized already \\({next(iter(already.values()))}\\)"):
        check_model(FORMATS["fp8"], MODEL | {"quantization_config": already}, name="m")


@pytest.mark.parametrize(
    ("form", "field", "value", "named"),
    [
        ("int4_awq", "intermediate_size", 704, "intermediate_size 704"),
        ("int4_awq", "head_dim", 80, "num_attention_heads x head_dim 320"),
        ("nvfp4", "hidden_size", 264, "hidden_size 264"),
        ("fp8", "hidden_size", 264, "hidden_size 264"),
    ],
)
def test_dimensions_that_a_format_does_not_fit_are_refused(form: str, field: str, value: int, named: str) -> None:
    check_model(FORMATS[form], MODEL, name="m")
    with pytest.raises(UsageError, match=named):
        check_model(FORMATS[form], MODEL | {field: value}, name="m")
