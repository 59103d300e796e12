"""The quantization configs of FP8 checkpoints that ModelOpt did not export: what is honoured, and what is refused."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from transformers.quantizers.quantizers_utils import should_convert_module

from trtx.checkpoint.dense import layer_products
from trtx.checkpoint.facts import read_config
from trtx.checkpoint.model_config import read_model_config
from trtx.checkpoint.quantization import Quantization, read_quantization
from trtx.checkpoint.shapes import SHAPES
from trtx.errors import UnsupportedModel, UsageError
from trtx.memory.weights import parameter_bytes

QWEN3 = dict(SHAPES["tiny"].config)
# As in config.json of Qwen3-8B-FP8 and of Llama-3.1-8B-Instruct-FP8-dynamic.
BLOCKS: Mapping[str, Any] = {
    "activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8", "weight_block_size": [128, 128],
    "modules_to_not_convert": ["lm_head", "model.layers.0.input_layernorm"],
}  # fmt: skip
WEIGHTS: Mapping[str, Any] = {
    "actorder": None, "block_structure": None, "dynamic": False, "group_size": None, "num_bits": 8,
    "observer": "minmax", "observer_kwargs": {}, "strategy": "channel", "symmetric": True, "type": "float",
}  # fmt: skip
INPUTS: Mapping[str, Any] = {**WEIGHTS, "dynamic": True, "observer": None, "strategy": "token"}
STATIC = {"strategy": "tensor", "dynamic": False}
BLOCK_WEIGHTS = {"strategy": "block", "block_structure": [128, 128]}
GROUPED = {"strategy": "group", "group_size": 128}


def compressed(weights: Any = None, inputs: Any = None, group: Any = None, **changes: Any) -> dict[str, Any]:
    one = {
        "input_activations": {**INPUTS, **(inputs or {})}, "output_activations": None, "targets": ["Linear"],
        "weights": {**WEIGHTS, **(weights or {})}, **(group or {}),
    }  # fmt: skip
    return {
        "config_groups": {"group_0": one}, "format": "float-quantized", "global_compression_ratio": 1.24,
        "ignore": ["lm_head"], "kv_cache_scheme": None, "quant_method": "compressed-tensors",
        "quantization_status": "compressed", "sparsity_config": {}, "transform_config": {}, "version": "0.9.1",
    } | changes  # fmt: skip


def write(directory: Path, stated: Any) -> None:
    (directory / "config.json").write_text(json.dumps(QWEN3 | {"quantization_config": stated}))


def read(directory: Path, stated: Any) -> Quantization:
    write(directory, stated)
    found = read_model_config(directory).quantization
    assert found is not None
    return found


@pytest.mark.parametrize(
    ("stated", "algorithm", "suffixes"),
    [
        (BLOCKS, "FP8_BLOCK_SCALES", {"weight": (256, 200), "weight_scale_inv": (2, 2)}),
        (compressed(), "FP8_PER_CHANNEL_PER_TOKEN", {"weight": (256, 200), "weight_scale": (256,)}),
        (
            compressed(STATIC, STATIC, format="naive-quantized", quantization_status="frozen"),
            "FP8",
            {"weight": (256, 200), "weight_scale": (), "input_scale": ()},
        ),
        (
            compressed(BLOCK_WEIGHTS, GROUPED), "FP8_BLOCK_SCALES",
            {"weight": (256, 200), "weight_scale": (2, 2)},
        ),
    ],
)  # fmt: skip
def test_published_configs_are_loaded(
    tmp_path: Path, stated: Any, algorithm: str, suffixes: dict[str, tuple[int, ...]]
) -> None:
    found = read(tmp_path, stated)
    assert found.algorithm == algorithm and not found.covers("lm_head")
    assert found.covers("model.layers.0.self_attn.q_proj")
    assert {suffix: tensor.shape for suffix, tensor in found.stored(256, 200).items()} == suffixes


@pytest.mark.parametrize(
    ("stated", "says"),
    [
        ({**BLOCKS, "activation_scheme": "static"}, "activation_scheme is 'static'; expected 'dynamic'"),
        ({**BLOCKS, "weight_block_size": [64, 128]}, "weight_block_size is [64, 128]; expected [128, 128]"),
        ({**BLOCKS, "weight_block_size": 128}, "weight_block_size is 128; expected [128, 128]"),
        ({**BLOCKS, "fmt": "e5m2"}, "fmt is 'e5m2'; expected 'e4m3'"),
        ({**BLOCKS, "scale_fmt": "ue8m0"}, "scale_fmt is 'ue8m0'; expected 'float'"),
        ({**BLOCKS, "expert_dtype": "fp4"}, "expert_dtype is 'fp4'; expected 'fp8'"),
        ({**BLOCKS, "dequantize": True}, "dequantize is True; expected False"),
        ({**BLOCKS, "modules_to_convert": ["embed"]}, "modules_to_convert is ['embed']; expected []"),
        ({**BLOCKS, "kv_cache_scheme": {"num_bits": 8}}, "kv_cache_scheme is {'num_bits': 8}; expected no such field"),
        ({**BLOCKS, "modules_to_not_convert": ["a(b"]}, "expected regular expressions, which 'a(b' is not"),
        (compressed(format="pack-quantized"), "format is 'pack-quantized'; expected 'float-quantized' or"),
        (compressed(quantization_status="initialized"), "quantization_status is 'initialized'; expected 'compressed'"),
        (
            compressed(kv_cache_scheme={"num_bits": 8, "type": "float"}),
            "kv_cache_scheme is {'num_bits': 8, 'type': 'float'}; expected no such field",
        ),
        (
            compressed(sparsity_config={"format": "sparse-24"}),
            "sparsity_config.format is 'sparse-24'; expected 'dense'",
        ),
        (compressed(transform_config={"a": 1}), "transform_config is {'a': 1}; expected {}"),
        (compressed(moe_sparsity_config={"a": 1}), "moe_sparsity_config is {'a': 1}; expected no such field"),
        (compressed(novelty=1), "novelty is 1; expected no such field"),
        (compressed(ignore=["re:*x"]), "expected regular expressions, which 're:*x' is not"),
        (compressed(group={"targets": ["re:.*q_proj"]}), "group_0.targets is ['re:.*q_proj']; expected ['Linear']"),
        (compressed(group={"output_activations": {"num_bits": 8}}), "output_activations is {'num_bits': 8}; expected"),
        (compressed({"symmetric": False}), "group_0.weights.symmetric is False; expected True"),
        (compressed({"actorder": "group"}), "weights.actorder is 'group'; expected no such field"),
        (compressed({"group_size": 64}), "weights.group_size is 64; expected no such field"),
        (compressed({"dynamic": True}), "weights.dynamic is True; expected False"),
        (
            compressed({"scale_dtype": "torch.float8_e8m0fnu"}),
            "weights.scale_dtype is 'torch.float8_e8m0fnu'; expected",
        ),
        (compressed(inputs={"symmetric": False}), "input_activations.symmetric is False; expected True"),
        (compressed(inputs={"num_bits": 4}), "input_activations.num_bits is 4; expected 8"),
        (compressed(inputs={"type": "int"}), "input_activations.type is 'int'; expected 'float'"),
        (
            compressed(BLOCK_WEIGHTS | {"block_structure": [64, 64]}, GROUPED),
            "weights.block_structure is [64, 64]; expected [128, 128]",
        ),
        (compressed(BLOCK_WEIGHTS, GROUPED | {"group_size": 64}), "input_activations.group_size is 64; expected 128"),
    ],
)
def test_what_else_a_config_asks_for_is_refused_by_field(tmp_path: Path, stated: Any, says: str) -> None:
    with pytest.raises(UsageError) as refused:
        read(tmp_path, stated)
    said = str(refused.value)
    assert said.startswith(f"quantization_config in {tmp_path / 'config.json'}: ") and says in said and "\n" not in said


@pytest.mark.parametrize(
    "stated",
    [
        compressed({"num_bits": 4, "type": "int"}),
        compressed({"strategy": "group"}),
        compressed({"strategy": ["channel"]}),
        compressed(STATIC),  # tensor weights with inputs per token
        compressed(inputs=STATIC),
        compressed(group={"input_activations": None}),  # weights alone
        compressed(config_groups={"FP8_DYNAMIC": ["Linear"]}),
        compressed(config_groups=[1]),
        compressed() | {"config_groups": {name: compressed()["config_groups"]["group_0"] for name in ("one", "two")}},
        {"quant_method": "fp8", "activation_scheme": "static"},  # AutoFP8, with one scale for each tensor
        {"quant_method": "fp8", "weight_block_size": None},
    ],
)
def test_other_schemes_of_the_same_exporters_are_refused_as_a_whole(tmp_path: Path, stated: Any) -> None:
    with pytest.raises(UnsupportedModel, match=rf"does not load {stated['quant_method']} weights; expected a ModelOpt"):
        read(tmp_path, stated)


NAMES = (
    "model.layers.1.mlp.gate", "model.layers.1.mlp.gate_proj", "model.layers.11.mlp.gate",
    "model.layers.1.self_attn.q_proj", "model.layers.1.mlp.experts.1.down_proj", "lm_head",
)  # fmt: skip


@pytest.mark.parametrize(
    "patterns",
    [
        ["model.layers.1.mlp.gate"], ["model.layers.1"], ["gate"], ["q_proj", "lm_head"], ["model.layers.*"],
        [r"model.layers.(1|2).mlp"], ["model.layers.1.", "x"], ["a|lm_head"], [],
    ],
)  # fmt: skip
def test_block_scales_exclude_the_modules_that_transformers_excludes(tmp_path: Path, patterns: list[str]) -> None:
    found = read(tmp_path, {**BLOCKS, "modules_to_not_convert": patterns})
    assert {name for name in NAMES if found.covers(name)} == {
        name for name in NAMES if should_convert_module(name, patterns)
    }


def test_the_older_name_of_exclusions_counts_where_the_newer_is_missing(tmp_path: Path) -> None:
    stated = {**BLOCKS, "modules_to_not_convert": None, "ignored_layers": ["model.layers.0"]}
    assert not read(tmp_path, stated).covers("model.layers.0.mlp.gate_proj")
    assert read(tmp_path, stated | {"modules_to_not_convert": ["lm_head"]}).covers("model.layers.0.mlp.gate_proj")


@pytest.mark.parametrize(
    ("ignored", "excluded"),
    [
        (["model.layers.1.mlp.gate"], {"model.layers.1.mlp.gate"}),
        (["model.layers.1"], set()),
        (["gate"], set()),
        (["re:.*mlp.gate$", "lm_head"], {"model.layers.1.mlp.gate", "model.layers.11.mlp.gate", "lm_head"}),
        (["re:mlp"], set()),
        (["re:model.layers.1.*"], {name for name in NAMES if name.startswith("model")}),
        (["Linear"], set(NAMES)),
    ],
)
def test_compressed_tensors_ignores_whole_names_expressions_and_the_class(
    tmp_path: Path, ignored: list[str], excluded: set[str]
) -> None:
    found = read(tmp_path, compressed(ignore=ignored))
    assert {name for name in NAMES if not found.covers(name)} == excluded


def test_a_part_of_a_merged_product_can_not_be_excluded(tmp_path: Path) -> None:
    write(tmp_path, compressed(ignore=["re:.*k_proj"]))
    with pytest.raises(UnsupportedModel, match=r"quantizes .*q_proj and excludes .*k_proj, one product here"):
        layer_products(read_model_config(tmp_path), 0)


@pytest.mark.parametrize(
    ("stated", "algorithm", "cache"),
    [
        ({**BLOCKS, "activation_scheme": "static"}, "FP8_BLOCK_SCALES", None),
        (compressed(kv_cache_scheme={"num_bits": 8, "type": "float"}), "FP8_PER_CHANNEL_PER_TOKEN", "FP8"),
        (compressed(config_groups=[1]), "compressed-tensors", None),
        ({"quant_method": "fp8"}, "FP8", None),
    ],
)
def test_for_tensorrt_llm_any_config_is_only_read(
    tmp_path: Path, stated: Any, algorithm: str, cache: str | None
) -> None:
    write(tmp_path, stated)
    found = read_quantization(tmp_path, read_config(tmp_path))
    assert found is not None and (found.algorithm, found.kv_cache_algorithm) == (algorithm, cache)


@pytest.mark.parametrize(
    ("ignored", "width"),
    [([], 1.0), (["re:.*mlp.*"], 2.0), (["re:*"], 1.0), (["lm_head"], 1.0), (["model.layers.0.mlp.down_proj"], 2.0)],
)
def test_for_tensorrt_llm_weights_that_are_not_here_are_counted_by_the_format(
    tmp_path: Path, ignored: list[str], width: float
) -> None:
    write(tmp_path, compressed(ignore=ignored))
    assert parameter_bytes(read_quantization(tmp_path, read_config(tmp_path)), "mlp", 2.0) == width


def test_blocks_of_modelopt_have_one_size(tmp_path: Path) -> None:
    write(tmp_path, None)
    own = {"quant_algo": "fp8_pb_wo", "exclude_modules": ["lm_head"]}
    (tmp_path / "hf_quant_config.json").write_text(json.dumps({"quantization": own}))
    found = read_model_config(tmp_path).quantization
    assert found is not None and found.algorithm == "FP8_PB_WO"
    (tmp_path / "hf_quant_config.json").write_text(json.dumps({"quantization": own | {"group_size": 64}}))
    with pytest.raises(UnsupportedModel, match=r"group_size is 64; expected 128, the only size of blocks in FP8_PB_WO"):
        read_model_config(tmp_path)
