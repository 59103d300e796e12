"""The dtype of a CPU: bfloat16 where the checkpoint has it and the processor multiplies it, and said in a sentence."""

from __future__ import annotations

import pytest

from trtx.config import ResolvedEngineConfig
from trtx.launch.encode_configs import with_cpu_dtype
from trtx.memory import processor, torch_engine

_LINES = "processor\t: 0\nmodel name\t: a processor of avx512_bf16\nflags\t\t: fpu sse2 avx2 {}\n"


@pytest.mark.parametrize(
    ("flags", "has"),
    [("", False), ("avx512f avx512_bf16", True), ("amx_bf16 amx_tile", True), ("avx512f avx512_fp16", False)],
)
def test_a_processor_says_by_its_flags_whether_it_multiplies_bfloat16(flags: str, has: bool) -> None:
    assert processor.has_bfloat16(_LINES.format(flags) * 2) == has


def test_a_system_that_says_nothing_has_none() -> None:
    assert not processor.has_bfloat16("")
    assert not processor.has_bfloat16("processor\t: 0\nFeatures\t: fp asimd bf16\n")


@pytest.mark.parametrize("has", [True, False])
@pytest.mark.parametrize("own", ["float32", "bfloat16", "float16"])
def test_auto_is_bfloat16_where_the_checkpoint_and_the_processor_have_it(
    monkeypatch: pytest.MonkeyPatch, own: str, has: bool
) -> None:
    monkeypatch.setattr(processor, "multiplies_bfloat16", lambda: has)
    wanted = "bfloat16" if has and own == "bfloat16" else "float32"
    assert torch_engine.compute_dtype("auto", own, is_gpu=False) == wanted
    assert torch_engine.compute_dtype("auto", own, is_gpu=True) == own
    assert torch_engine.compute_dtype("float32", own, is_gpu=False) == "float32"
    said = with_cpu_dtype({"agg": ResolvedEngineConfig("agg", {}, "agg.yaml", ())}, own)["agg"]
    if own == "float32":
        assert not said.values and not said.reasons, "computed as it is: nothing to say"
        return
    assert said.values == {"dtype": wanted}
    assert said.reasons[0].startswith(f"agg: dtype = {wanted!r} because the checkpoint is {own}, ")
    typed = ResolvedEngineConfig("agg", {"dtype": "bfloat16"}, "agg.yaml", ())
    assert with_cpu_dtype({"agg": typed}, own) == {"agg": typed}
