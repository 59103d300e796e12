"""The plan against the embedded engine's own arithmetic, and against what it really makes on a CPU."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file

from trtx.checkpoint import resolve_checkpoint
from trtx.checkpoint.facts import read_checkpoint
from trtx.checkpoint.formats import DTYPE_BYTES
from trtx.checkpoint.model_config import read_model_config
from trtx.checkpoint.shapes import SHAPES
from trtx.memory import MemoryDevice, MemoryPlan, device_named, plan_memory
from trtx.memory.processor import cpu_dtype
from trtx.memory.shapes import model_shape
from trtx.torch_engine.kv_layout import KvGeometry
from trtx.torch_engine.runner import kv_sizing
from trtx.torch_engine.runner.args import RunnerArgs
from trtx.torch_engine.runner.create import create_runner

pytestmark = pytest.mark.slow

GIB = 1 << 30
HOST = MemoryDevice("CPU", 64 * GIB, 64 * GIB, is_gpu=False)


def _plan(path: Path, values: dict[str, Any], device: MemoryDevice = HOST) -> MemoryPlan:
    return plan_memory(path, "agg", values, engine="torch", device=device)


@pytest.mark.parametrize("model", ["tiny-trained", "tiny-qwen2", "tiny-llama"])
@pytest.mark.parametrize(
    "kv",
    [{}, {"max_tokens": 4096}, {"max_tokens": 1000, "tokens_per_block": 16}, {"tokens_per_block": 64}],
    ids=["default", "max_tokens", "no whole block", "large blocks"],
)
def test_the_cpu_pool_and_the_weights_are_what_the_runner_makes(model: str, kv: dict[str, int]) -> None:
    path = resolve_checkpoint(f"synthetic:{model}").path
    runner = create_runner(RunnerArgs(model_dir=path, max_batch_size=2, device="cpu", **kv))
    try:
        held = runner.pool.untyped_storage().nbytes()
        blocks = runner.num_blocks
    finally:
        runner.close()
    plan = _plan(path, {"max_batch_size": 2, "kv_cache_config": kv})
    assert (plan.capacity_blocks, plan.pool_bytes) == (blocks, held)
    config = json.loads((path / "config.json").read_text())
    kv_scales = 2 * 4 * config["num_hidden_layers"]
    width = DTYPE_BYTES[cpu_dtype(config["torch_dtype"])]
    assert plan.weight_bytes == model_shape(config).parameter_count * width + kv_scales


@pytest.mark.parametrize("model", ["qwen3-0.6b", "qwen3-8b", "llama-3.1-8b", "qwen2.5-7b"])
def test_the_cuda_pool_follows_the_runners_formula(monkeypatch: pytest.MonkeyPatch, model: str) -> None:
    """The runner asks CUDA what is free once the weights are there; told the plan's figure, it comes to the plan's."""
    path = resolve_checkpoint(f"synthetic:{model}").path
    values = {"max_batch_size": 256, "max_num_tokens": 8192, "kv_cache_config": {"free_gpu_memory_fraction": 0.85}}
    plan = _plan(path, values, device_named("H100"))
    free = plan.total_bytes - plan.context_bytes - plan.weight_bytes
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free, plan.total_bytes))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    shape = read_model_config(path)
    blocks = kv_sizing.num_kv_blocks(
        RunnerArgs(model_dir=path, max_batch_size=256, max_num_tokens=8192, free_gpu_memory_fraction=0.85),
        shape,
        KvGeometry.uniform(shape.num_layers, shape.num_kv_heads, shape.head_dim, 32, "bfloat16"),
        device=torch.device("cuda", 0),
        dtype=torch.bfloat16,
    )
    assert plan.capacity_blocks == blocks


def test_fp8_weights_stay_small_where_the_gpu_multiplies_them(tmp_path: Path) -> None:
    quantized = SHAPES["qwen3-8b"].config | {"quantization_config": {"quant_method": "modelopt", "quant_algo": "FP8"}}
    (tmp_path / "config.json").write_text(json.dumps(dict(quantized)))
    hopper, ampere = (_plan(tmp_path, {}, device_named(name)).weight_bytes for name in ("H100", "A100"))
    assert ampere == pytest.approx(8_190_735_360 * 2)
    assert hopper < 0.6 * ampere


@pytest.mark.parametrize(
    ("algorithm", "gpus"),
    [
        ("FP8_BLOCK_SCALES", {"A100": False, "L40S": False, "H100": True, "B200": False}),
        ("FP8_PER_CHANNEL_PER_TOKEN", {"A100": False, "L40S": False, "H100": True, "B200": True}),
        ("FP8_PB_WO", {"A100": False, "L40S": False, "H100": False, "B200": False}),
    ],
)
def test_formats_take_the_memory_of_16_bits_where_no_matmul_takes_them(
    tmp_path: Path, algorithm: str, gpus: dict[str, bool]
) -> None:
    config = SHAPES["qwen3-8b"].config
    (tmp_path / "config.json").write_text(json.dumps(config))
    whole = {name: _plan(tmp_path, {}, device_named(name)) for name in gpus}
    (tmp_path / "hf_quant_config.json").write_text(json.dumps({"quantization": {"quant_algo": algorithm}}))
    for name, is_kept in gpus.items():
        plan, wide = _plan(tmp_path, {}, device_named(name)), whole[name]
        exact = _plan(tmp_path, {"dtype": "float32"}, device_named(name))
        assert f"counted, {algorithm} dequantized to " in str(exact) and exact.weight_bytes > 1.9 * wide.weight_bytes
        if is_kept:
            assert plan.weight_bytes < 0.6 * wide.weight_bytes, name
            assert f"counted, {algorithm}" in str(plan) and "dequantized" not in str(plan)
        else:
            assert plan.weight_bytes == wide.weight_bytes, name
            assert f"counted, {algorithm} dequantized to 16 bits" in str(plan)


def test_an_input_that_is_quantized_at_run_time_takes_a_byte_an_element_and_its_scales(tmp_path: Path) -> None:
    """At the shape of Qwen3-8B: 8,192 tokens of the widest input. With one static scale, nothing is added."""
    found = {}
    for algorithm in (None, "FP8", "FP8_BLOCK_SCALES"):
        stated = {"quantization_config": {"quant_method": "modelopt", "quant_algo": algorithm}} if algorithm else {}
        (tmp_path / "config.json").write_text(json.dumps(dict(SHAPES["qwen3-8b"].config) | stated))
        found[algorithm] = _plan(tmp_path, {"max_num_tokens": 8192}, device_named("H100")).activation_bytes
    assert found["FP8"] == found[None]
    assert found["FP8_BLOCK_SCALES"] - found[None] == (8192 + 2048) * (12288 + 12288 // 128 * 4)


def test_experts_with_scales_of_blocks_count_as_dequantized(tmp_path: Path) -> None:
    config = dict(SHAPES["qwen3-30b-a3b"].config)
    (tmp_path / "config.json").write_text(json.dumps(config))
    whole = _plan(tmp_path, {}, device_named("H200"))
    stated = {"quant_algo": "FP8_BLOCK_SCALES", "exclude_modules": ["lm_head", "*.mlp.gate"]}
    (tmp_path / "hf_quant_config.json").write_text(json.dumps({"quantization": stated}))
    plan = _plan(tmp_path, {}, device_named("H200"))
    assert "counted, FP8_BLOCK_SCALES with experts dequantized to 16 bits" in str(plan)
    assert 0.9 * whole.weight_bytes < plan.weight_bytes < whole.weight_bytes


def test_what_rounds_its_inputs_leaves_less_for_kv(tmp_path: Path) -> None:
    """NVFP4 at the shape of Qwen3-8B: 8,192 tokens of the widest input, 25 bytes an element while they are rounded."""
    stated = {"quant_method": "modelopt", "quant_algo": "NVFP4"}
    pools = []
    for config in ({}, {"quantization_config": stated}):
        (tmp_path / "config.json").write_text(json.dumps(dict(SHAPES["qwen3-8b"].config) | config))
        pools.append(_plan(tmp_path, {"max_num_tokens": 8192}, device_named("H100")))
    plain, rounding = pools
    assert rounding.activation_bytes - plain.activation_bytes == (8192 + 2048) * 12288 * 25
    assert rounding.pool_bytes < plain.pool_bytes - 2 * GIB


@pytest.mark.parametrize(
    ("kind", "name"), [("Draft_Target", "synthetic:tiny-draft"), ("Eagle3", "synthetic:tiny-eagle3")]
)
def test_a_synthetic_draft_model_counts_and_the_notes_say_so(kind: str, name: str) -> None:
    path = resolve_checkpoint("synthetic:tiny-trained").path
    drafts = {"decoding_type": kind, "max_draft_len": 4, "speculative_model": name}
    plain, drafting = _plan(path, {}), _plan(path, {"speculative_config": drafts})
    assert drafting.weight_bytes > plain.weight_bytes
    assert drafting.kv_bytes_per_token > plain.kv_bytes_per_token
    assert drafting.notes == (*plain.notes, f"weights and layers include those of the draft model {name}")


@pytest.mark.parametrize(
    ("kind", "name"), [("Draft_Target", "synthetic:tiny-draft"), ("Eagle3", "synthetic:tiny-eagle3")]
)
def test_the_draft_model_of_two_ranks_is_whole_on_one_of_them(kind: str, name: str) -> None:
    path = resolve_checkpoint("synthetic:tiny-trained").path
    drafts = {"speculative_config": {"decoding_type": kind, "max_draft_len": 4, "speculative_model": name}}
    one, two = ({"tensor_parallel_size": ranks} for ranks in (1, 2))
    added = [_plan(path, ranks | drafts).weight_bytes - _plan(path, ranks).weight_bytes for ranks in (one, two)]
    assert added[1] == pytest.approx(added[0], rel=0.01)
    kv = [
        _plan(path, ranks | drafts).kv_bytes_per_token - _plan(path, ranks).kv_bytes_per_token for ranks in (one, two)
    ]
    assert kv[1] >= kv[0]


@pytest.mark.parametrize(("batch", "drafted"), [(8, 32), (32, 64), (256, 256)])
def test_drafted_tokens_take_hidden_states_logits_and_masks(batch: int, drafted: int) -> None:
    """At the shape of Qwen3-8B in bfloat16. A step verifies 64 drafted tokens, or one for each slot if that is more."""
    path, vocabulary, hidden = resolve_checkpoint("synthetic:qwen3-8b").path, 151936, 4096
    values: dict[str, Any] = {"max_batch_size": batch, "max_num_tokens": 8192}
    drafts = {"speculative_config": {"decoding_type": "NGram", "max_draft_len": 4}}
    plain, speculating = (_plan(path, values | more, device_named("H100")) for more in ({}, drafts))
    masks = batch * 4 * vocabulary // 8
    more = speculating.activation_bytes - plain.activation_bytes
    assert more == drafted * (hidden + 2 * vocabulary) * 2 + masks
    assert plain.pool_bytes - 2 * more < speculating.pool_bytes < plain.pool_bytes


@pytest.mark.parametrize(("stored", "width"), [("float16", 2), ("float32", 4)])
def test_a_config_without_a_dtype_means_what_is_stored_to_the_plan_and_to_the_runner(
    tmp_path: Path, stored: str, width: int
) -> None:
    config = {name: value for name, value in SHAPES["tiny"].config.items() if name != "torch_dtype"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    save_file({"model.norm.weight": np.zeros(256, dtype=stored)}, tmp_path / "model.safetensors")
    assert read_model_config(tmp_path).dtype == read_checkpoint(tmp_path, "m").dtype == stored
    plan = _plan(tmp_path, {"max_batch_size": 1}, device_named("H100"))
    assert plan.weight_bytes == model_shape(config).parameter_count * width + 2 * 4 * config["num_hidden_layers"]
