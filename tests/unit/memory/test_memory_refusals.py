"""What can't fit is refused with numbers and with values that would; hypothesis looks for a config where they don't."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from examples import examples
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from published_models import DEEPSEEK_R1, GEMMA_3_27B, LLAMA_3_1_8B, MODELS, QWEN3_8B, QWEN3_30B_A3B

from trtx.config.families import read_header, recipe_files, recipe_names
from trtx.errors import UsageError
from trtx.memory import MemoryDevice, MemoryPlan, device_named, plan_memory

pytestmark = pytest.mark.slow

GIB = 1 << 30
H100 = device_named("H100")


def _plan(directory: Path, config: dict[str, Any], values: dict[str, Any], **context: Any) -> MemoryPlan:
    (directory / "config.json").write_text(json.dumps(config))
    return plan_memory(directory, "agg", values, **({"engine": "tensorrt-llm", "device": H100} | context))


def _applied(values: dict[str, Any], proposal: str) -> dict[str, Any]:
    """``values`` with one ``--set a.b=c`` or ``--tp n`` of a refusal in force."""
    if proposal.startswith("--tp "):
        return values | {"tensor_parallel_size": int(proposal.removeprefix("--tp "))}
    key, _, value = proposal.removeprefix("--set ").partition("=")
    head, _, leaf = key.partition(".")
    number = yaml.safe_load(value)
    return values | ({head: {**values.get(head, {}), leaf: number}} if leaf else {head: number})


def _proposals(refusal: UsageError) -> list[str]:
    return re.findall(r"--(?:set [\w.]+=[\d.]+|tp \d+)", str(refusal))


@pytest.mark.parametrize(
    ("config", "values", "gpu", "words"),
    [
        (LLAMA_3_1_8B, {"max_seq_len": 131072}, "RTX 4090", ["can't hold one sequence of max_seq_len 131072"]),
        (MODELS["nvidia/Llama-3.3-70B-Instruct-FP8"], {}, "L40S", ["doesn't fit", "weights 67.67 GiB", "--tp 2"]),
        (DEEPSEEK_R1, {"tensor_parallel_size": 4}, "H200", ["doesn't fit", "NCCL", "--tp 8"]),
        (QWEN3_8B, {"max_num_tokens": 2_000_000}, "H100", ["doesn't fit", "--set max_num_tokens="]),
        (QWEN3_8B, {"kv_cache_config": {"max_tokens": 10**6}}, "H100", ["max_tokens 1000000 takes 137.33 GiB"]),
        (
            QWEN3_8B,
            {"max_seq_len": 8192, "kv_cache_config": {"max_tokens": 4096}},
            "H100",
            ["max_tokens 4096 can't hold one sequence", "--set max_seq_len=4096"],
        ),
    ],
)
def test_a_refusal_has_the_numbers_and_a_way_out_that_works(
    tmp_path: Path, config: dict[str, Any], values: dict[str, Any], gpu: str, words: list[str]
) -> None:
    device = device_named(gpu)
    with pytest.raises(UsageError) as refused:
        _plan(tmp_path, config, values, device=device)
    for word in words:
        assert word in str(refused.value)
    assert f"per GPU of {device.total_bytes / GIB:.2f} GiB" in str(refused.value)
    proposals = _proposals(refused.value)
    assert proposals
    for proposal in proposals:
        _plan(tmp_path, config, _applied(values, proposal), device=device)


def test_memory_that_other_processes_hold_counts(tmp_path: Path) -> None:
    alone = _plan(tmp_path, QWEN3_8B, {})
    beside = _plan(tmp_path, QWEN3_8B, {}, device=replace(H100, free_bytes=40 * GIB))
    assert beside.others_bytes > 38 * GIB
    assert alone.pool_bytes - beside.pool_bytes == pytest.approx(0.9 * beside.others_bytes, abs=1)
    with pytest.raises(UsageError, match="other processes 6"):
        _plan(tmp_path, QWEN3_8B, {}, device=replace(H100, free_bytes=15 * GIB))


def test_a_host_is_refused_only_what_is_far_beyond_it(tmp_path: Path) -> None:
    host = MemoryDevice("CPU", 64 * GIB, 48 * GIB, is_gpu=False)
    needed, values = 8_190_735_360 * 4 / GIB, {"dtype": "float32"}
    assert _plan(tmp_path, QWEN3_8B, values, engine="torch", device=host).weight_bytes / GIB == pytest.approx(needed)
    _plan(tmp_path, QWEN3_8B, values, engine="torch", device=replace(host, free_bytes=24 * GIB))
    with pytest.raises(UsageError, match=r"weights 30\.51 GiB.*host memory free 16"):
        _plan(tmp_path, QWEN3_8B, values, engine="torch", device=replace(host, free_bytes=16 * GIB))


def test_a_context_beyond_the_pool_is_a_note_where_nobody_asked_for_it(tmp_path: Path) -> None:
    """TensorRT-LLM lowers max_seq_len to what its pool holds, and so does the torch engine."""
    plan = _plan(tmp_path, LLAMA_3_1_8B, {}, device=device_named("RTX 4090"))
    assert plan.capacity_tokens < plan.max_seq_len == 131072
    assert "the engine lowers max_seq_len" in plan.notes[0]
    assert not plan.covers_batch


@pytest.mark.parametrize("name", [name for name in recipe_names() if name != "tiny"])
def test_shipped_configs_fit_on_the_gpus_that_they_name(tmp_path: Path, name: str) -> None:
    for role, path in recipe_files(name).items():
        header = read_header(path.read_text(), str(path))
        assert header is not None
        if role == "encode" or header.model not in MODELS:
            continue
        values = yaml.safe_load(path.read_text())
        for gpu in header.gpu:
            plan = _plan(tmp_path, MODELS[header.model], values, device=device_named(gpu))
            assert plan.gpus == header.gpus
            assert plan.sequences >= 1


DENSE = (LLAMA_3_1_8B, QWEN3_8B)  # all that the torch engine runs
PLANNED = st.sampled_from(
    [("torch", config) for config in DENSE]
    + [("tensorrt-llm", config) for config in (*DENSE, QWEN3_30B_A3B, GEMMA_3_27B)]
)
REUSED_DIRECTORY = settings(
    deadline=None, max_examples=examples(60), suppress_health_check=[HealthCheck.function_scoped_fixture]
)


@REUSED_DIRECTORY
@given(
    planned=PLANNED,
    tokens=st.integers(256, 100_000),
    more=st.integers(1, 100_000),
    fraction=st.floats(0.1, 0.94),
)
def test_capacity_falls_with_the_token_budget_and_grows_with_the_fraction(
    tmp_path: Path, planned: tuple[str, dict[str, Any]], tokens: int, more: int, fraction: float
) -> None:
    engine, config = planned

    def capacity(budget: int, share: float) -> int:
        values = {"max_num_tokens": budget, "kv_cache_config": {"free_gpu_memory_fraction": share}}
        return _plan(tmp_path, config, values, engine=engine, device=device_named("H200")).capacity_tokens

    assert capacity(tokens, fraction) >= capacity(tokens + more, fraction)
    assert capacity(tokens, fraction) <= capacity(tokens, fraction + 0.05)


@REUSED_DIRECTORY
@given(
    planned=PLANNED,
    gpu=st.sampled_from(("L40S", "H100", "H200")),
    block=st.sampled_from((16, 32, 64)),
    fraction=st.sampled_from((0.3, 0.85, 0.9)),
    beyond=st.sampled_from(("max_seq_len", "max_tokens", "max_num_tokens", "max_batch_size")),
)
def test_the_largest_value_fits_and_one_step_more_does_not(
    tmp_path: Path, planned: tuple[str, dict[str, Any]], gpu: str, block: int, fraction: float, beyond: str
) -> None:
    engine, config = planned
    values: dict[str, Any] = {"kv_cache_config": {"tokens_per_block": block, "free_gpu_memory_fraction": fraction}}
    huge, step = 1 << 30, 1 if beyond == "max_batch_size" else block
    if beyond == "max_tokens":
        values["kv_cache_config"]["max_tokens"] = huge
    else:
        values[beyond] = huge

    def attempt(chosen: dict[str, Any]) -> str:
        try:
            _plan(tmp_path, config, chosen, engine=engine, device=device_named(gpu))
        except UsageError as refusal:
            return str(refusal)
        return ""

    refusal = attempt(values)
    assert refusal
    found = re.search(rf"--set (?:kv_cache_config\.)?{beyond}=(\d+)", refusal)
    assume(found is not None)  # where the weights alone are too much
    assert found is not None
    largest, name = int(found.group(1)), found.group(0)
    assert attempt(_applied(values, name)) == ""
    assert attempt(_applied(values, name.replace(str(largest), str(largest + step)))) != ""


@REUSED_DIRECTORY
@given(
    config=st.sampled_from((LLAMA_3_1_8B, QWEN3_8B, QWEN3_30B_A3B, DEEPSEEK_R1)),
    tp=st.sampled_from((1, 2, 4, 8, 16)),
    expert_parallel=st.sampled_from((1, 2, 4)),
    attention_dp=st.booleans(),
)
def test_ranks_together_hold_the_model(
    tmp_path: Path, config: dict[str, Any], tp: int, expert_parallel: int, attention_dp: bool
) -> None:
    """Nothing is lost by splitting, and replication is bounded by a whole copy a rank."""
    roomy = MemoryDevice("roomy", 4000 * GIB)
    whole = _plan(tmp_path, config, {}, device=roomy)
    values = {
        "tensor_parallel_size": tp,
        "moe_expert_parallel_size": min(expert_parallel, tp),
        "enable_attention_dp": attention_dp,
    }
    split = _plan(tmp_path, config, values, device=roomy)
    assert whole.weight_bytes <= split.weight_bytes * tp + tp <= whole.weight_bytes * tp + tp
    assert split.kv_bytes_per_token <= whole.kv_bytes_per_token <= split.kv_bytes_per_token * tp
