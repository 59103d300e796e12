"""``benchmarks/kernel_code.py``: what the compiler made of Triton kernels, without a GPU."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

pytestmark = pytest.mark.slow

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
import kernel_code  # noqa: E402  # a script, which finds its modules beside itself

META = torch.device("meta")


def norm(kernel: Any, rows: int, hidden: int) -> None:
    x, out = (torch.empty(rows, hidden, dtype=torch.bfloat16, device=META) for _ in range(2))
    weight = torch.empty(hidden, dtype=torch.bfloat16, device=META)
    kernel[(rows,)](x, None, weight, out, None, None, hidden, 1e-6, HAS_RESIDUAL=False, BLOCK=1024, num_warps=2)


def test_a_kernel_is_compiled_once_for_each_variant_and_names_who_launches_it() -> None:
    kernel = pytest.importorskip("trtx.torch_engine.triton_pointwise").rms_norm_kernel
    recorder = kernel_code.Recorder()
    for user, hidden in (("a", 1024), ("b", 1024), ("b", 1000)):
        with recorder.recording(user):
            norm(kernel, 3, hidden)
    (uneven, only_b), (even, both) = sorted(recorder.variants(), key=lambda one: len(one[1]))
    assert (only_b, both) == (["b"], ["a", "b"])
    assert "hidden:i32:16" in even.arguments and "hidden:i32:16" not in uneven.arguments
    assert even.name == "rms_norm_kernel" and 0 < even.registers <= 255 and even.stack_bytes == 0
    assert even.ptx_hash != uneven.ptx_hash
    again = kernel_code.Recorder()
    with again.recording("c"):
        norm(kernel, 5, 1024)
    assert [one for one, _ in again.variants()] == [even]


@pytest.mark.skipif(importlib.util.find_spec("triton") is not None, reason="triton is here")
def test_without_triton_it_says_how_to_get_it(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        kernel_code.main([])
    assert ended.value.code == 2
    assert "pip install --no-deps --target DIR triton==3.6.0" in capsys.readouterr().err


def test_registers_and_stack_are_read_from_cuobjdump() -> None:
    text = (
        "Resource usage:\n Common:\n  GLOBAL:0\n Function choose_kernel:\n"
        "  REG:128 STACK:88 SHARED:0 LOCAL:0 CONSTANT[0]:648 TEXTURE:0 SURFACE:0 SAMPLER:0\n"
    )
    assert kernel_code.resources_in(text) == (128, 88)
    with pytest.raises(ValueError, match="cuobjdump names no registers: 'no such file'"):
        kernel_code.resources_in("no such file")
