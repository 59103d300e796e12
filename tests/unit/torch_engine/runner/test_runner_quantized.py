"""The runner on quantized exports: against transformers with the same products done the plain way, and refusals."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from quantized_export import export
from runner_player import build, save
from safetensors.torch import load_file, save_file
from scored_prompt import logprobs_of, reference

from trtx.checkpoint.experts import EXPERT_FORMATS
from trtx.checkpoint.formats import LOADED
from trtx.errors import UsageError
from trtx.torch_engine.runner import RunnerArgs, create_runner
from trtx.torch_engine.runner.weights import named_tensors

pytestmark = pytest.mark.slow


def args(directory: Path, **changes: Any) -> RunnerArgs:
    values: dict[str, Any] = {"tokens_per_block": 8, "max_tokens": 512, "max_batch_size": 4} | changes
    return RunnerArgs(model_dir=directory, device="cpu", **values)


def prompt_logprobs(directory: Path, *, chunk: int = 10_000, **changes: Any) -> torch.Tensor:
    """Of the prompt's own tokens."""
    return logprobs_of(create_runner(args(directory, **changes)), chunk=chunk)


def edit(directory: Path, **changes: Any) -> None:
    path = directory / "hf_quant_config.json"
    found = json.loads(path.read_text())
    found["quantization"] |= changes
    path.write_text(json.dumps(found))


@pytest.mark.parametrize(
    ("algorithm", "family"),
    [
        *((algorithm, family) for algorithm in LOADED for family in ("qwen2", "qwen3", "llama")),
        *((algorithm, "qwen3_moe") for algorithm in EXPERT_FORMATS),
    ],
)
def test_a_quantized_export_computes_what_its_format_promises(tmp_path: Path, algorithm: str, family: str) -> None:
    exact = reference(build(family))
    expected = reference(export(build(family), algorithm, tmp_path))
    ours = prompt_logprobs(tmp_path)
    assert (ours - expected).abs().mean() < 1e-4, (
        f"an export of {algorithm} is computed otherwise than in the plain way: see its class in "
        "trtx/torch_engine/runner/formats.py, and its packing in quantized_export.py"
    )
    lost = float((expected - exact).abs().mean())
    assert lost > 0.01, (
        f"{algorithm} changes log probabilities by {lost:.3g}; expected 0.03 and more, even of weights of 8 bits: "
        "quantized_export.py leaves the weights as they were, so nothing is compared"
    )


def test_excluded_modules_are_in_full_precision(tmp_path: Path) -> None:
    model, names = build("qwen3", tie_word_embeddings=False), ("lm_head", "model.layers.1.mlp.down_proj")
    expected = reference(export(model, "FP8", tmp_path, excluded=names))
    edit(tmp_path, exclude_modules=["lm_head", "*layers.1.mlp.down*"])
    all_quantized = reference(export(build("qwen3", tie_word_embeddings=False), "FP8", tmp_path / "all"))
    assert (prompt_logprobs(tmp_path) - expected).abs().mean() < 1e-4 < 0.01 < (expected - all_quantized).abs().mean()
    edit(tmp_path, exclude_modules=["lm_head", "model.layers.0.self_attn.k_proj"])
    with pytest.raises(UsageError, match=r"quantizes model.*q_proj and excludes .*k_proj, one product here"):
        create_runner(args(tmp_path))


def test_the_quantization_may_stand_in_config_json_alone(tmp_path: Path) -> None:
    expected = reference(export(build("qwen3"), "FP8", tmp_path, kv_scales=True))
    (tmp_path / "hf_quant_config.json").unlink()
    path = tmp_path / "config.json"
    stated = {
        "quant_method": "modelopt", "quant_algo": "FP8", "ignore": ["lm_head"],
        "kv_cache_scheme": {"dynamic": False, "num_bits": 8, "type": "float"},
    }  # fmt: skip
    path.write_text(json.dumps(json.loads(path.read_text()) | {"quantization_config": stated}))
    assert create_runner(args(tmp_path)).geometry.dtype == "float8_e4m3fn"
    assert (prompt_logprobs(tmp_path, kv_dtype="float32") - expected).abs().mean() < 1e-4


def test_a_half_precision_engine_computes_the_same_but_for_rounding(tmp_path: Path) -> None:
    exact, expected = reference(build("llama")), reference(export(build("llama"), "FP8", tmp_path))
    rounding = (prompt_logprobs(tmp_path, dtype="bfloat16") - expected).abs().mean()
    assert 0.01 < rounding < 0.3 < (expected - exact).abs().mean()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"quant_algo": "W4A8_AWQ"}, r"hf_quant_config\.json: .* does not load W4A8_AWQ weights; expected a ModelOpt"),
        ({"quant_algo": "MIXED_PRECISION"}, "does not load MIXED_PRECISION weights"),
        ({"kv_cache_quant_algo": "NVFP4"}, r"no NVFP4 KV cache; set kv_cache_config\.dtype to fp8 or bfloat16"),
        ({"quant_algo": "NVFP4"}, r"tensor .*weight has shape \[.*\], .*hf_quant_config\.json says \["),
        ({"quant_algo": "W8A8_SQ_PER_CHANNEL"}, r"tensor .* is float8_e4m3fn, .*hf_quant_config\.json says int8"),
        (
            {"quant_algo": None},
            r"holds the tensor .*_scale, but according to .*hf_quant_config\.json a .* has no such tensor",
        ),
    ],
)
def test_a_quantization_that_does_not_fit_is_refused_by_name(
    tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    export(build("qwen3"), "FP8", tmp_path)
    edit(tmp_path, **changes)
    with pytest.raises(UsageError, match=message):
        create_runner(args(tmp_path))


@pytest.mark.parametrize(
    ("stated", "message"),
    [
        ({"quant_method": "awq", "bits": 4}, "does not load awq weights"),
        ({"quant_method": "gptq", "bits": 4}, "does not load gptq weights"),
        ({"quant_method": "mxfp4"}, "does not load mxfp4 weights"),
        ({"quant_method": "fp8", "activation_scheme": "static"}, "does not load fp8 weights"),
        ({"quant_method": "compressed-tensors", "config_groups": {}}, "does not load compressed-tensors weights"),
        ({"load_in_8bit": True}, "does not load unnamed weights"),
    ],
)
def test_other_peoples_formats_are_refused_by_name(tmp_path: Path, stated: Any, message: str) -> None:
    save(build("qwen3"), tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"quantization_config": stated}))
    with pytest.raises(UsageError, match=f"quantization_config in .*{message}.*quantize the original.*tensorrt-llm"):
        create_runner(args(tmp_path))


@pytest.mark.parametrize(("kept", "name"), [(False, "o_proj.input_scale"), (True, "k_proj.weight_scale")])
def test_scales_that_are_missing_or_misshapen_are_named(tmp_path: Path, kept: bool, name: str) -> None:
    export(build("qwen3"), "FP8", tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    full = f"model.layers.2.self_attn.{name}"
    scale = tensors.pop(full)
    if kept:
        tensors[full] = scale.expand(48).clone()
    save_file(tensors, tmp_path / "model.safetensors")
    lacks = rf"model\.safetensors holds .*o_proj\.weight in float8_e4m3fn, and no file holds {full}"
    expected = rf"{full} has shape \[48\], .* says \[\]" if kept else lacks
    with pytest.raises(UsageError, match=expected):
        create_runner(args(tmp_path))


def test_smoothing_that_differs_between_modules_of_one_input_is_refused(tmp_path: Path) -> None:
    export(build("qwen3"), "W8A8_SQ_PER_CHANNEL", tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["model.layers.0.self_attn.v_proj.pre_quant_scale"] *= 2
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(UsageError, match=r"q_proj.*pre_quant_scale differs between modules.*ModelOpt"):
        create_runner(args(tmp_path))


def test_a_broken_quantization_file_is_named_and_named_tensors_wants_the_original(tmp_path: Path) -> None:
    export(build("qwen3"), "NVFP4", tmp_path)
    with pytest.raises(UsageError, match="quantized already, to NVFP4; expected the original"):
        next(named_tensors(tmp_path, device=torch.device("cpu"), dtype=torch.float32))
    (tmp_path / "hf_quant_config.json").write_text('{"quantization": 5}')
    with pytest.raises(UsageError, match=r"hf_quant_config\.json is no ModelOpt quantization config"):
        create_runner(args(tmp_path))
