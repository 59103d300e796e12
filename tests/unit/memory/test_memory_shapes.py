"""Parameters and KV widths of published models, against what their publishers and TensorRT-LLM's logs say."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import pytest
from published_models import (
    COUNTS,
    DEEPSEEK_R1,
    GEMMA_3_27B,
    GPT_OSS_120B,
    LLAMA_3_1_8B,
    LLAMA_4_MAVERICK,
    LLAMA_4_SCOUT,
    MODELOPT_FP8,
    QWEN2_5_VL_7B,
    QWEN3_8B,
)

from trtx.checkpoint.quantization import read_quantization
from trtx.errors import UsageError
from trtx.memory import MemoryPlan, UnknownShapeError, device_named, plan_memory
from trtx.memory.shapes import model_shape
from trtx.memory.weight_files import stored_weights


def _plan(directory: Path, config: dict[str, Any], **values: Any) -> MemoryPlan:
    (directory / "config.json").write_text(json.dumps(config))
    return plan_memory(directory, "agg", values, engine="tensorrt-llm", device=device_named("B300"))


@pytest.mark.parametrize(("config", "count"), COUNTS.values(), ids=COUNTS)
def test_parameters_are_counted_to_the_last_one(config: dict[str, Any], count: int) -> None:
    assert model_shape(config).parameter_count == count


@pytest.mark.parametrize(
    ("config", "published"),
    [
        (GEMMA_3_27B, 27_432_406_640),  # with its vision tower, which is estimated
        (QWEN2_5_VL_7B, 8_292_166_656),
        (LLAMA_4_MAVERICK, 400.7e9),  # Meta: 400 B and 109 B, vision included
        (LLAMA_4_SCOUT, 107.8e9),
    ],
    ids=["Gemma 3 27B", "Qwen2.5-VL-7B", "Llama 4 Maverick", "Llama 4 Scout"],
)
def test_models_with_images_are_counted_within_a_thousandth(config: dict[str, Any], published: float) -> None:
    shape = model_shape(config)
    assert shape.parameter_count + shape.vision == pytest.approx(published, rel=1e-3)


@pytest.mark.parametrize(
    ("config", "kv", "expected"),
    [
        (LLAMA_3_1_8B, "auto", 131072),
        (QWEN3_8B, "auto", 147456),
        (QWEN3_8B, "fp8", 73728),
        (DEEPSEEK_R1, "auto", 70272),
        (DEEPSEEK_R1, "fp8", 35136),  # "kv size is 35136" in TensorRT-LLM's logs
        (GPT_OSS_120B, "auto", 73728),  # "kv size is 73728"
        (GEMMA_3_27B, "auto", 507904),
    ],
)
def test_kv_bytes_of_a_token(tmp_path: Path, config: dict[str, Any], kv: str, expected: int) -> None:
    values = {"max_seq_len": 4096, "kv_cache_config": {"dtype": kv}, "tensor_parallel_size": 1}
    if config is DEEPSEEK_R1:
        values["tensor_parallel_size"] = 8  # MLA's latent is on every GPU whole
    assert _plan(tmp_path, config, **values).kv_bytes_per_token == expected


def test_more_gpus_than_kv_heads_replicate_a_head(tmp_path: Path) -> None:
    eight, sixteen = (_plan(tmp_path, LLAMA_3_1_8B, tensor_parallel_size=tp) for tp in (8, 16))
    assert eight.kv_bytes_per_token == sixteen.kv_bytes_per_token == 131072 / 8
    assert sixteen.weight_bytes > eight.weight_bytes / 2  # k and v projections come with the head


def test_attention_dp_replicates_attention_and_splits_experts(tmp_path: Path) -> None:
    split = _plan(tmp_path, DEEPSEEK_R1, tensor_parallel_size=8, moe_expert_parallel_size=8)
    replicated = _plan(
        tmp_path, DEEPSEEK_R1, tensor_parallel_size=8, moe_expert_parallel_size=8, enable_attention_dp=True
    )
    assert split.weight_bytes < replicated.weight_bytes < 2 * split.weight_bytes
    assert split.kv_bytes_per_token == replicated.kv_bytes_per_token


def test_spare_expert_slots_take_memory(tmp_path: Path) -> None:
    layout = {"tensor_parallel_size": 8, "moe_expert_parallel_size": 8}
    plain = _plan(tmp_path, DEEPSEEK_R1, **layout)
    spare = _plan(tmp_path, DEEPSEEK_R1, **layout, moe_config={"load_balancer": {"num_slots": 288}})
    experts = 58 * 256 * 3 * 7168 * 2048 * (1 + 4 / 128**2) / 8
    assert spare.weight_bytes - plain.weight_bytes == pytest.approx(experts * 32 / 256, rel=1e-6)


def test_pipeline_ranks_share_layers_and_the_fullest_decides(tmp_path: Path) -> None:
    whole, halved = (_plan(tmp_path, QWEN3_8B, pipeline_parallel_size=pp) for pp in (1, 2))
    assert halved.kv_bytes_per_token == whole.kv_bytes_per_token / 2
    assert whole.weight_bytes / 2 <= halved.weight_bytes < whole.weight_bytes * 0.55
    assert halved.gpus == 2


def test_windows_bound_what_a_layer_holds(tmp_path: Path) -> None:
    limits = {"max_seq_len": 32768, "max_batch_size": 8}
    windows = {"max_attention_window": [1024, 1024, 1024, 1024, 1024, 32768]}
    plain = _plan(tmp_path, GEMMA_3_27B, **limits)
    windowed = _plan(tmp_path, GEMMA_3_27B, **limits, kv_cache_config=windows)
    assert plain.sequence_bytes == 32768 * 507904
    assert windowed.sequence_bytes == (10 * 32768 + 52 * 1024) * 507904 // 62
    assert "hold all tokens unless" in plain.notes[-1]
    assert "52 of 62 layers" in windowed.notes[-1]


def test_mtp_adds_one_layer_of_weights_and_kv(tmp_path: Path) -> None:
    layout = {"tensor_parallel_size": 8, "moe_expert_parallel_size": 8}
    plain = _plan(tmp_path, DEEPSEEK_R1, **layout)
    drafting = _plan(tmp_path, DEEPSEEK_R1, **layout, speculative_config={"decoding_type": "MTP", "max_draft_len": 3})
    assert drafting.kv_bytes_per_token - plain.kv_bytes_per_token == 576 * 2
    assert drafting.weight_bytes > plain.weight_bytes + 1e9


@pytest.mark.parametrize("layer", ["midlayer", "layers.0"])
def test_a_draft_model_on_this_machine_counts(tmp_path: Path, layer: str) -> None:
    target, draft = tmp_path / "target", tmp_path / "draft"
    target.mkdir()
    draft.mkdir()
    names = {f"{layer}.self_attn.q_proj.weight": 4096, "fc.weight": 1024, "lm_head.weight": 2048}
    _write_safetensors(draft / "model.safetensors", names)
    plain = _plan(target, QWEN3_8B)
    speculative = {"decoding_type": "Eagle3", "max_draft_len": 3, "speculative_model": str(draft)}
    drafting = _plan(target, QWEN3_8B, speculative_config=speculative)
    assert drafting.weight_bytes - plain.weight_bytes == 4096 + 1024 + 2048
    assert drafting.kv_bytes_per_token == plain.kv_bytes_per_token * 37 / 36
    elsewhere = _plan(target, QWEN3_8B, speculative_config=speculative | {"speculative_model": "some/eagle3"})
    assert elsewhere.weight_bytes == plain.weight_bytes
    assert "some/eagle3 is not on this machine" in elsewhere.notes[-1]


@pytest.mark.parametrize(
    ("facts", "algorithm", "kv"),
    [
        ({"quant_algo": "FP8", "kv_cache_quant_algo": "FP8"}, "FP8", "FP8"),
        ({"quant_algo": "NVFP4", "exclude_modules": ["lm_head"]}, "NVFP4", None),
        ({"quant_algo": "W4A16_AWQ"}, "W4A16_AWQ", None),
        ({"quant_algo": "W8A8_SQ_PER_CHANNEL"}, "W8A8_SQ_PER_CHANNEL", None),
    ],
)
def test_modelopts_exports_are_recognized(
    tmp_path: Path, facts: dict[str, Any], algorithm: str, kv: str | None
) -> None:
    (tmp_path / "hf_quant_config.json").write_text(json.dumps({"quantization": facts}))
    found = read_quantization(tmp_path, {})
    assert found is not None
    assert (found.algorithm, found.kv_cache_algorithm) == (algorithm, kv)


@pytest.mark.parametrize(
    ("method", "share"),
    [
        ({"quant_method": "modelopt", "quant_algo": "FP8"}, 1 / 2),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, (0.5 + 1 / 16) / 2),
        ({"quant_method": "modelopt", "quant_algo": "W4A16_AWQ"}, (0.5 + 4 / 128) / 2),
        ({"quant_method": "fp8", "weight_block_size": [128, 128]}, (1 + 4 / 128**2) / 2),
    ],
)
def test_quantized_layers_shrink_and_the_head_does_not(tmp_path: Path, method: dict[str, Any], share: float) -> None:
    full = _plan(tmp_path, QWEN3_8B)
    small = _plan(tmp_path, QWEN3_8B | {"quantization_config": method})
    vocabulary = 2 * 2 * 151936 * 4096
    assert small.weight_bytes - vocabulary == pytest.approx((full.weight_bytes - vocabulary) * share, rel=1e-3)


def test_gpt_oss_in_mxfp4_has_its_published_size(tmp_path: Path) -> None:
    """60.8 GiB, as its model card says; attention and vocabulary stay in bfloat16."""
    assert _plan(tmp_path, GPT_OSS_120B).weight_bytes / 2**30 == pytest.approx(60.8, abs=0.1)


@pytest.mark.parametrize(
    ("config", "gib"),
    [
        (LLAMA_3_1_8B, 14.96),  # "model weights take 14.96GiB", vLLM #10511
        (LLAMA_3_1_8B | MODELOPT_FP8, 8.46),  # Llama-3.1-8B-Instruct-FP8, TRT-LLM #6294
    ],
    ids=["bfloat16", "FP8"],
)
def test_weights_are_what_engines_report(tmp_path: Path, config: dict[str, Any], gib: float) -> None:
    assert _plan(tmp_path, config).weight_bytes / 2**30 == pytest.approx(gib, abs=0.005)


def test_activations_of_a_published_profile(tmp_path: Path) -> None:
    """gpt-oss-120b, 8,192 tokens, batch 64, one GPU: 0.85 GiB "dynamically allocated during inference"."""
    plan = _plan(tmp_path, GPT_OSS_120B, max_num_tokens=8192, max_batch_size=64)
    assert plan.activation_bytes / 2**30 == pytest.approx(0.85, abs=0.05)


def _write_safetensors(path: Path, sizes: dict[str, int]) -> None:
    offset, header = 0, {}
    for name, size in sizes.items():
        header[name] = {"dtype": "U8", "shape": [size], "data_offsets": [offset, offset + size]}
        offset += size
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + bytes(offset))


def test_sizes_come_from_the_files_where_they_are(tmp_path: Path) -> None:
    names = {
        "model.embed_tokens.weight": 100, "lm_head.weight": 200, "model.norm.weight": 3,
        "model.layers.0.input_layernorm.weight": 5, "model.layers.0.self_attn.q_proj.weight": 40,
        "model.layers.0.self_attn.k_proj.weight": 16, "model.layers.0.mlp.gate.weight": 7,
        "model.layers.0.mlp.experts.1.down_proj.weight": 64, "model.layers.0.mlp.shared_experts.up_proj.weight": 32,
        "model.layers.0.self_attn.kv_a_proj_with_mqa.weight": 11, "model.layers.0.self_attn.q_norm.weight": 2,
        "visual.blocks.0.attn.qkv.weight": 50,
    }  # fmt: skip
    _write_safetensors(tmp_path / "model.safetensors", names)
    found = stored_weights(tmp_path)
    assert found is not None
    assert found.layers == {
        0: {"heads": 40, "kv_heads": 16, "experts": 64, "mlp": 32, "latent": 11, "whole": 5 + 7 + 2},
    }
    assert (found.embedding, found.head, found.vision, found.other) == (100, 200, 50, 3)


def test_half_a_download_is_counted_and_not_weighed(tmp_path: Path) -> None:
    _write_safetensors(tmp_path / "model-00001-of-00002.safetensors", {"model.embed_tokens.weight": 100})
    index = {"weight_map": {"model.embed_tokens.weight": "model-00001-of-00002.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    _write_safetensors(tmp_path / "consolidated.safetensors", {"tok_embeddings.weight": 100})
    found = stored_weights(tmp_path)
    assert found is not None
    assert (found.files, found.embedding) == (1, 100)
    index["weight_map"]["lm_head.weight"] = "model-00002-of-00002.safetensors"
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert stored_weights(tmp_path) is None
    assert _plan(tmp_path, QWEN3_8B).weight_source.startswith("counted")


def test_a_file_that_is_no_safetensors_is_named(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"version https://git-lfs.github.com/spec/v1\noid sha256:0")
    with pytest.raises(UsageError, match=r"model\.safetensors cannot be read as safetensors"):
        stored_weights(tmp_path)


def test_layers_without_kv_are_no_guess(tmp_path: Path) -> None:
    with pytest.raises(UnknownShapeError, match="linear_attention"):
        model_shape(QWEN3_8B | {"layer_types": ["linear_attention", "full_attention"] * 18})


def test_an_unknown_gpu_names_those_that_are_known() -> None:
    with pytest.raises(UsageError, match=r"H201.*did you mean H20"):
        device_named("H201")
    assert device_named("NVIDIA H100 80GB HBM3") == device_named("h100")
    assert device_named("B300").name.endswith("nominal memory")
