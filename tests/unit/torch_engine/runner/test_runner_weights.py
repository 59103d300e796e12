"""What the loader reads, and what it says about what it cannot."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from runner_player import Player, build, random_prompt, reference_tokens, save
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from trtx.checkpoint.formats import NO_PRODUCTS
from trtx.checkpoint.model_config import read_model_config
from trtx.errors import UsageError
from trtx.memory import processor
from trtx.torch_engine.runner import RunnerArgs, create_runner
from trtx.torch_engine.runner.weights import load_weights, named_tensors

pytestmark = pytest.mark.slow


def args(directory: Path, **changes: Any) -> RunnerArgs:
    values: dict[str, Any] = {"tokens_per_block": 8, "max_tokens": 512, "max_batch_size": 4, "dtype": "float32"}
    values |= changes
    return RunnerArgs(model_dir=directory, device="cpu", **values)


def greedy(directory: Path, prompt: list[int], count: int = 12) -> list[int]:
    player = Player(create_runner(args(directory)))
    return player.finish([player.add(prompt)], count)[0]


def edit_config(directory: Path, **changes: Any) -> None:
    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def drop_from_config(directory: Path, *names: str) -> None:
    path = directory / "config.json"
    path.write_text(json.dumps({k: v for k, v in json.loads(path.read_text()).items() if k not in names}))


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return save(build("qwen3"), tmp_path / "model")


def test_experts_of_a_layer_in_one_tensor_give_the_tokens_of_single_experts(tmp_path: Path) -> None:
    model = build("qwen3_moe")
    save(model, tmp_path, save_original_format=False)
    stack = "model.layers.1.mlp.experts.gate_up_proj"
    assert stack in load_file(tmp_path / "model.safetensors")
    prompt = random_prompt(20, 0)
    assert greedy(tmp_path, prompt) == reference_tokens(model, prompt, 12)
    edit_config(tmp_path, moe_intermediate_size=40)
    with pytest.raises(UsageError, match=r"down_proj has shape \[8, 64, 48\], and config.json wants \[8, 64, 40\]"):
        create_runner(args(tmp_path))


def test_an_expert_that_the_checkpoint_lacks_is_named(tmp_path: Path) -> None:
    path = save(build("qwen3_moe"), tmp_path) / "model.safetensors"
    tensors, lost = load_file(path), "model.layers.2.mlp.experts.5.up_proj.weight"
    save_file({name: value for name, value in tensors.items() if name != lost}, path, metadata={"format": "pt"})
    with pytest.raises(UsageError, match=f"lacks 1 tensors of Qwen3MoeForCausalLM, first {lost}; download"):
        create_runner(args(tmp_path))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_checkpoints_are_computed_in_float32_or_as_the_cpu_says(
    tmp_path: Path, dtype: torch.dtype
) -> None:
    model = build("qwen2").to(dtype)
    save(model, tmp_path)
    prompt = random_prompt(20, 0)
    assert create_runner(args(tmp_path)).geometry.dtype == "float32"
    for has, computed in ((False, "float32"), (True, "bfloat16" if dtype is torch.bfloat16 else "float32")):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(processor, "multiplies_bfloat16", lambda has=has: has)
            assert create_runner(args(tmp_path, dtype="auto")).geometry.dtype == computed
    assert greedy(tmp_path, prompt) == reference_tokens(model.float(), prompt, 12)


def test_a_sharded_checkpoint_gives_the_tokens_of_a_single_file(tmp_path: Path) -> None:
    model = build("llama", tie_word_embeddings=False)
    one, many = save(model, tmp_path / "one"), save(model, tmp_path / "many", max_shard_size="60KB")
    assert len(list(many.glob("*.safetensors"))) > 2
    assert greedy(one, random_prompt(20, 0)) == greedy(many, random_prompt(20, 0))


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("family", ["qwen3", "llama"])
def test_tied_and_untied_heads_equal_transformers(tmp_path: Path, family: str, tied: bool) -> None:
    model = build(family, tie_word_embeddings=tied)
    save(model, tmp_path)
    assert ("lm_head.weight" in load_file(tmp_path / "model.safetensors")) != tied
    prompt = random_prompt(20, 0)
    assert greedy(tmp_path, prompt) == reference_tokens(model, prompt, 12)


def test_attention_biases_equal_transformers(tmp_path: Path) -> None:
    model = build("llama", attention_bias=True)
    save(model, tmp_path)
    prompt = random_prompt(20, 0)
    assert greedy(tmp_path, prompt) == reference_tokens(model, prompt, 12)


def test_rope_settings_in_the_form_before_transformers_5_mean_the_same(tmp_path: Path) -> None:
    model = build("llama")
    save(model, tmp_path)
    prompt = random_prompt(100, 0)
    rope = json.loads((tmp_path / "config.json").read_text())["rope_parameters"]
    drop_from_config(tmp_path, "rope_parameters", "dtype")
    theta = rope.pop("rope_theta")
    edit_config(tmp_path, rope_theta=theta, rope_scaling=rope, torch_dtype="float32")
    assert greedy(tmp_path, prompt) == reference_tokens(model, prompt, 12)
    edit_config(tmp_path, rope_theta=theta * 3)
    assert greedy(tmp_path, prompt) != reference_tokens(model, prompt, 12)


def test_synthetic_weights_are_drawn_by_seed(directory: Path) -> None:
    (directory / "model.safetensors").unlink()
    prompt = random_prompt(20, 0)
    edit_config(directory, trtx_synthetic={"seed": 1, "init_std": 0.3})
    first = greedy(directory, prompt)
    assert greedy(directory, prompt) == first
    edit_config(directory, trtx_synthetic={"seed": 2, "init_std": 0.3})
    assert greedy(directory, prompt) != first


def test_synthetic_weights_are_as_wide_as_the_checkpoint_says(directory: Path) -> None:
    edit_config(directory, initializer_range=0.05, trtx_synthetic={"seed": 1, "init_std": 0.3})
    assert read_model_config(directory).synthetic_std == 0.3
    edit_config(directory, trtx_synthetic={"seed": 1})
    assert read_model_config(directory).synthetic_std == 0.05


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architectures": ["MixtralForCausalLM"]}, "MixtralForCausalLM is not known.*LlamaForCausalLM, Qwen2"),
        (
            {"rope_parameters": {"rope_type": "longrope", "rope_theta": 1e4}},
            "rope_type is 'longrope'; expected .*default, linear, llama3, yarn: .*does not compute",
        ),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantization_config in .* does not load fp8 weights"),
        (
            {"use_sliding_window": True, "sliding_window": -64, "max_window_layers": 2, "layer_types": None},
            "sliding_window is -64; expected a whole number of positions, at least 1, or null",
        ),
        ({"intermediate_size": 97}, r"tensor .* has shape \[.*96.*its config.json says \[.*97"),
        ({"num_hidden_layers": 2, "layer_types": None}, r"holds the tensor model\.layers\.2"),
        (
            {"num_hidden_layers": 4, "layer_types": None},
            r"lacks 11 tensors of Qwen3ForCausalLM, first model\.layers\.3",
        ),
        ({"dtype": "int8"}, "dtype is 'int8'; expected one of float32, bfloat16"),
    ],
)
def test_a_checkpoint_that_cannot_be_computed_is_refused_by_name(
    directory: Path, changes: dict[str, Any], message: str
) -> None:
    edit_config(directory, **changes)
    with pytest.raises(UsageError, match=message):
        create_runner(args(directory))


def test_missing_and_broken_files_are_named(directory: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"nowhere/config\.json can't be read \(No such file"):
        create_runner(args(tmp_path / "nowhere"))
    (directory / "model.safetensors").write_bytes(b"not a tensor")
    with pytest.raises(UsageError, match=r"model\.safetensors cannot be read as safetensors"):
        create_runner(args(directory))
    (directory / "model.safetensors").unlink()
    with pytest.raises(UsageError, match="has no safetensors weights"):
        create_runner(args(directory))
    index = {"weight_map": {"lm_head.weight": "model-00001-of-00002.safetensors"}}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(
        UsageError, match=r"lacks model-00001-of-00002\.safetensors, which model\.safetensors\.index\.json names"
    ):
        create_runner(args(directory))


def test_a_broken_config_is_named(directory: Path) -> None:
    drop_from_config(directory, "hidden_size")
    # Qwen3's config class fills in 4,096.
    with pytest.raises(UsageError, match=r"lm_head\.weight has shape \[211, 64\], .* \[211, 4096\]"):
        create_runner(args(directory))
    (directory / "config.json").write_text("{")
    with pytest.raises(UsageError, match="is not JSON"):
        create_runner(args(directory))


def test_a_tensor_that_the_checkpoint_lacks_is_named(directory: Path) -> None:
    tensors = load_file(directory / "model.safetensors")
    del tensors["model.norm.weight"]
    save_file(tensors, directory / "model.safetensors")
    with pytest.raises(UsageError, match="lacks 1 tensors of Qwen3ForCausalLM, first model.norm.weight"):
        create_runner(args(directory))


def test_files_beside_the_weights_are_none_of_the_models(directory: Path) -> None:
    """A second copy in another form, an adapter, an optimizer's state, and an index that something left there."""
    before = _norm(directory)
    zeros = torch.zeros_like(before)
    for name in ("consolidated", "adapter_model", "optimizer", "model-00001-of-00001"):
        save_file({"model.norm.weight": zeros, "foreign": zeros.clone()}, directory / f"{name}.safetensors")
    index = {"metadata": {}, "weight_map": {"model.norm.weight": "model-00001-of-00001.safetensors"}}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    create_runner(args(directory))
    assert torch.equal(_norm(directory), before) and torch.equal(_norm_of_transformers(directory), before)


def test_of_a_tensor_in_two_parts_the_last_counts_as_for_transformers(directory: Path) -> None:
    tensors = load_file(directory / "model.safetensors")
    twice = {"model.norm.weight": torch.full_like(tensors["model.norm.weight"], 3.0)}
    (directory / "model.safetensors").unlink()
    parts = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")
    save_file(tensors, directory / parts[0], metadata={"format": "pt"})
    save_file(twice, directory / parts[1], metadata={"format": "pt"})
    weight_map = dict.fromkeys(tensors, parts[0]) | dict.fromkeys(list(tensors)[:1], parts[1])
    index = {"metadata": {}, "weight_map": weight_map}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    assert torch.equal(_norm(directory), _norm_of_transformers(directory)) and _norm(directory).eq(3).all()


def _norm(directory: Path) -> torch.Tensor:
    tensors = dict(named_tensors(directory, device=torch.device("cpu"), dtype=torch.float32))
    return tensors["model.norm.weight"]


def _norm_of_transformers(directory: Path) -> torch.Tensor:
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    weight: torch.Tensor = model.model.norm.weight.detach()
    return weight


def test_a_wrong_flag_is_told_from_a_download_that_was_cut(directory: Path) -> None:
    edit_config(directory, attention_bias=True)
    cure = "no layer has that tensor, so attention_bias or architectures in its config.json describes another model; "
    with pytest.raises(UsageError, match=rf"first .*\.bias; {cure}use the config.json of these weights$") as refused:
        create_runner(args(directory))
    assert "download" not in str(refused.value)
    edit_config(directory, attention_bias=False)
    tensors = load_file(directory / "model.safetensors")
    bias = "model.layers.0.self_attn.q_proj.bias"
    save_file(tensors | {bias: torch.zeros(8)}, directory / "model.safetensors")
    with pytest.raises(
        UsageError, match=rf"holds the tensor {bias}, .*no such tensor; expected another attention_bias"
    ):
        create_runner(args(directory))
    save_file({name: one for name, one in tensors.items() if "layers.1" not in name}, directory / "model.safetensors")
    with pytest.raises(UsageError, match=r"first model\.layers\.1.*; download the checkpoint whole"):
        create_runner(args(directory))


@pytest.mark.parametrize(
    ("changes", "blocks"),
    [({"num_blocks": 7}, 7), ({"max_tokens": 100}, 12), ({"max_tokens": None}, 8192), ({"num_blocks": 3}, 3)],
)
def test_the_pool_has_the_blocks_that_were_asked_for(directory: Path, changes: dict[str, Any], blocks: int) -> None:
    runner = create_runner(args(directory, **changes))
    assert runner.num_blocks == blocks == runner.pool.shape[0]
    assert (
        runner.pool.shape[1:] == runner.geometry.block_shape == (2, 3, 2, 8, 24)
        and runner.max_position == 512
        and runner.vocab_size == 211
    )


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"max_tokens": 7}, "the KV pool has no block: max_tokens is 7"),
        ({"tokens_per_block": 24}, "tokens_per_block is 24; expected a power of two"),
        ({"max_batch_size": 0}, "max_batch_size is 0; expected at least 1"),
        ({"max_seq_len": 0}, "max_seq_len is 0; expected at least 2"),
        ({"cuda_graph_batch_sizes": (0, 4)}, r"cuda_graph_batch_sizes is \(0, 4\)"),
        ({"dtype": "float64"}, "dtype is 'float64'; expected one of auto, float32, bfloat16, float16"),
        ({"kv_dtype": "nvfp4"}, "kv_cache_config.dtype is 'nvfp4'; expected one of auto, .*float16, fp8"),
        ({"free_gpu_memory_fraction": 0.0}, "free_gpu_memory_fraction is 0.0"),
    ],
)
def test_sizes_that_cannot_work_are_refused_with_their_value(
    directory: Path, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        create_runner(args(directory, **changes))


def test_an_unknown_device_is_refused(directory: Path) -> None:
    with pytest.raises(UsageError, match="device 'abacus' is not known"):
        create_runner(RunnerArgs(model_dir=directory, device="abacus"))


def test_named_tensors_are_the_files_own_or_what_a_runner_draws(directory: Path) -> None:
    cpu = torch.device("cpu")
    stored = load_file(directory / "model.safetensors")
    named = dict(named_tensors(directory, device=cpu, dtype=torch.float32))
    assert named.keys() == stored.keys()
    assert all(torch.equal(named[name], stored[name]) for name in stored)

    (directory / "model.safetensors").unlink()
    edit_config(directory, trtx_synthetic={"seed": 1, "init_std": 0.3})
    prompt = random_prompt(20, 0)
    drawn = greedy(directory, prompt)
    save_file(dict(named_tensors(directory, device=cpu, dtype=torch.float32)), directory / "model.safetensors")
    assert greedy(directory, prompt) == drawn


def test_a_head_that_the_config_ties_and_the_weights_do_not_is_refused(tmp_path: Path) -> None:
    """transformers 5.23 unties them then, with a warning; a repeated head that is the same is no matter."""
    directory = save(build("qwen3", tie_word_embeddings=True), tmp_path)
    weights = load_file(directory / "model.safetensors")
    prompt, expected = random_prompt(9, 0), greedy(directory, random_prompt(9, 0))
    save_file(
        weights | {"lm_head.weight": weights["model.embed_tokens.weight"].clone()}, directory / "model.safetensors"
    )
    assert greedy(directory, prompt) == expected
    save_file(weights | {"lm_head.weight": weights["model.embed_tokens.weight"] * 2}, directory / "model.safetensors")
    with pytest.raises(UsageError, match=r"lm_head\.weight that differs from model\.embed_tokens.*tie_word_embeddings"):
        create_runner(args(directory))


@pytest.mark.parametrize("algorithm", ["FP8_BLOCK_SCALES", "FP8_PER_CHANNEL_PER_TOKEN", "FP8"])
def test_drawn_weights_of_an_fp8_format_have_the_deviation_of_the_config(tmp_path: Path, algorithm: str) -> None:
    model = build("qwen3")
    model.config.architectures = [type(model).__name__]
    model.config.save_pretrained(tmp_path)
    edit_config(tmp_path, trtx_synthetic={"seed": 3, "init_std": 0.05})
    quantization = {"quant_algo": algorithm, "exclude_modules": ["lm_head"]}
    (tmp_path / "hf_quant_config.json").write_text(json.dumps({"quantization": quantization}))
    config, device = read_model_config(tmp_path), torch.device("cpu")
    first, again = (
        load_weights(tmp_path, config, device=device, dtype=torch.float32, scaled_products=NO_PRODUCTS)
        for _ in range(2)
    )
    weight = first.layers[0].qkv.weight
    assert torch.equal(weight, again.layers[0].qkv.weight)
    assert weight.std().item() == pytest.approx(0.05, rel=0.05)
    edit = quantization | {"quant_algo": "NVFP4", "group_size": 16}
    (tmp_path / "hf_quant_config.json").write_text(json.dumps({"quantization": edit}))
    with pytest.raises(UsageError, match="NVFP4 weights can't be drawn from a seed; expected FP8, "):
        create_runner(args(tmp_path))
