"""Fields that a config.json leaves out are those of transformers' config classes."""

from __future__ import annotations

import copy
import dataclasses
import inspect
import json
from pathlib import Path
from typing import Any

import pytest
import transformers
from examples import examples
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import CONFIG_MAPPING, AutoConfig, PretrainedConfig

from trtx.checkpoint.class_defaults import CLASSES, complete
from trtx.checkpoint.facts import context_length_of, read_checkpoint, text_config
from trtx.checkpoint.families import FAMILIES, NESTED_FAMILIES, Family
from trtx.checkpoint.known_fields import WITHOUT_EFFECT
from trtx.checkpoint.model_config import ModelConfig, read_model_config
from trtx.checkpoint.processor import CROP, QWEN
from trtx.checkpoint.shapes import SHAPES
from trtx.checkpoint.vision import WRAPPERS, read_vision_config
from trtx.errors import UsageError
from trtx.memory.shapes import model_shape

transformers.logging.set_verbosity_error()
ROWS = "trtx/checkpoint/families.py"


def default_of(field: Any) -> Any:
    if field.default is not dataclasses.MISSING:
        return field.default
    return None if field.default_factory is dataclasses.MISSING else field.default_factory()


@pytest.mark.parametrize("model_type", CLASSES)
def test_defaults_are_those_of_the_installed_class(model_type: str) -> None:
    theirs, ours = CONFIG_MAPPING[model_type], CLASSES[model_type]
    of_every_class = {field.name for field in dataclasses.fields(PretrainedConfig)}  # type: ignore[arg-type]
    own = {
        field.name: default_of(field)
        for field in dataclasses.fields(theirs)
        if field.name not in of_every_class or field.name in inspect.get_annotations(theirs)
    }
    wanted = {name: value for name, value in own.items() if value is not None and name not in WITHOUT_EFFECT}
    assert ours.fields == {
        name: list(value) if isinstance(value, tuple) else value for name, value in wanted.items()
    }, f"the defaults of {model_type} in {ROWS}, or in trtx/checkpoint/class_defaults.py, are not those of transformers"
    assert ours.aliases == theirs.attribute_map
    nested = theirs.sub_configs_defaults or {}
    assert {name: (one.model_type, one.empty) for name, one in ours.nested.items()} == {
        name: (one.model_type, one.init_kwargs) for name, one in nested.items()
    }
    assert {name: one.is_fixed for name, one in ours.nested.items()} == {
        name: issubclass(one.config_class, PretrainedConfig) for name, one in nested.items()
    }


@pytest.mark.parametrize("family", (*FAMILIES.values(), *NESTED_FAMILIES.values()), ids=lambda one: one.model_type)
def test_the_default_theta_is_that_of_the_installed_class(family: Family) -> None:
    theta = CONFIG_MAPPING[family.model_type].default_theta
    assert not isinstance(theta, float) or family.theta == theta, (
        f"the row of {family.model_type} in {ROWS} has theta={family.theta}; transformers has {theta}"
    )


def test_every_wrapper_that_the_torch_engine_knows_is_covered() -> None:
    assert CLASSES.keys() >= {wrapper.model_type for wrapper in WRAPPERS.values()}


def write(directory: Path, config: dict[str, Any]) -> Path:
    directory.mkdir(exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return directory


def as_transformers_reads_it(directory: Path) -> dict[str, Any]:
    """With every field written out."""
    found = json.loads(json.dumps(AutoConfig.from_pretrained(directory).to_dict()))
    assert isinstance(found, dict)
    return found


def read(directory: Path) -> ModelConfig | None:
    try:
        return read_model_config(directory)
    except UsageError:
        return None


_CLIP_L = {
    "hidden_size": 1024, "image_size": 336, "intermediate_size": 4096, "model_type": "clip_vision_model",
    "num_attention_heads": 16, "num_hidden_layers": 24, "patch_size": 14, "projection_dim": 768, "vocab_size": 32000,
}  # fmt: skip
_LLAVA_1_5: dict[str, Any] = {
    "architectures": ["LlavaForConditionalGeneration"], "ignore_index": -100, "image_token_index": 32000,
    "model_type": "llava", "pad_token_id": 32001, "projector_hidden_act": "gelu", "tie_word_embeddings": False,
    "text_config": {
        "_name_or_path": "lmsys/vicuna-7b-v1.5", "architectures": ["LlamaForCausalLM"], "max_position_embeddings": 4096,
        "model_type": "llama", "rms_norm_eps": 1e-05, "torch_dtype": "float16", "vocab_size": 32064,
    },
    "torch_dtype": "float16", "vision_config": _CLIP_L, "vision_feature_layer": -2,
    "vision_feature_select_strategy": "default", "vocab_size": 32064,
}  # fmt: skip
_13B = {"hidden_size": 5120, "intermediate_size": 13824, "num_attention_heads": 40, "num_hidden_layers": 40,
        "num_key_value_heads": 40}  # fmt: skip
_QWEN_IDS = {"vision_start_token_id": 151652, "vision_end_token_id": 151653, "vision_token_id": 151654,
             "image_token_id": 151655, "video_token_id": 151656}  # fmt: skip
_QWEN_2_5_VL_3B: dict[str, Any] = {
    "architectures": ["Qwen2_5_VLForConditionalGeneration"], "model_type": "qwen2_5_vl", "attention_dropout": 0.0,
    "bos_token_id": 151643, "eos_token_id": 151645, **_QWEN_IDS, "hidden_act": "silu", "hidden_size": 2048,
    "initializer_range": 0.02, "intermediate_size": 11008, "max_position_embeddings": 128000, "max_window_layers": 70,
    "num_attention_heads": 16, "num_hidden_layers": 36, "num_key_value_heads": 2, "rms_norm_eps": 1e-06,
    "rope_theta": 1000000.0, "sliding_window": 32768, "tie_word_embeddings": True, "torch_dtype": "bfloat16",
    "use_cache": True, "use_sliding_window": False,
    "vision_config": {
        "depth": 32, "hidden_act": "silu", "hidden_size": 1280, "intermediate_size": 3420, "num_heads": 16,
        "in_chans": 3, "out_hidden_size": 2048, "patch_size": 14, "spatial_merge_size": 2, "spatial_patch_size": 14,
        "window_size": 112, "fullatt_block_indexes": [7, 15, 23, 31], "tokens_per_second": 2, "temporal_patch_size": 2,
    },
    "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]}, "vocab_size": 151936,
}  # fmt: skip
_QWEN_3_VL_4B: dict[str, Any] = {
    "architectures": ["Qwen3VLForConditionalGeneration"], "model_type": "qwen3_vl", "image_token_id": 151655,
    "text_config": {
        "attention_bias": False, "attention_dropout": 0.0, "bos_token_id": 151643, "dtype": "bfloat16",
        "eos_token_id": 151645, "head_dim": 128, "hidden_act": "silu", "hidden_size": 2560, "initializer_range": 0.02,
        "intermediate_size": 9728, "max_position_embeddings": 262144, "model_type": "qwen3_vl_text",
        "num_attention_heads": 32, "num_hidden_layers": 36, "num_key_value_heads": 8, "rms_norm_eps": 1e-06,
        "rope_scaling": {"mrope_interleaved": True, "mrope_section": [24, 20, 20], "rope_type": "default"},
        "rope_theta": 5000000, "tie_word_embeddings": True, "use_cache": True, "vocab_size": 151936,
    },
    "tie_word_embeddings": True, "video_token_id": 151656, "vision_end_token_id": 151653,
    "vision_config": {
        "deepstack_visual_indexes": [5, 11, 17], "depth": 24, "hidden_act": "gelu_pytorch_tanh", "hidden_size": 1024,
        "in_channels": 3, "initializer_range": 0.02, "intermediate_size": 4096, "model_type": "qwen3_vl",
        "num_heads": 16, "num_position_embeddings": 2304, "out_hidden_size": 2560, "patch_size": 16,
        "spatial_merge_size": 2, "temporal_patch_size": 2,
    },
    "vision_start_token_id": 151652, "dtype": "bfloat16",
}  # fmt: skip
_MISTRAL_7B = {
    "architectures": ["MistralForCausalLM"], "model_type": "mistral", "hidden_size": 4096, "intermediate_size": 14336,
    "max_position_embeddings": 32768, "num_attention_heads": 32, "num_hidden_layers": 32, "num_key_value_heads": 8,
    "rms_norm_eps": 1e-05, "rope_theta": 10000.0, "sliding_window": 4096, "torch_dtype": "bfloat16",
    "vocab_size": 32000,
}  # fmt: skip
_LLAMA_2_7B = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "bos_token_id": 1, "eos_token_id": 2,
    "hidden_act": "silu", "hidden_size": 4096, "intermediate_size": 11008, "max_position_embeddings": 4096,
    "num_attention_heads": 32, "num_hidden_layers": 32, "pretraining_tp": 1, "rms_norm_eps": 1e-05,
    "rope_scaling": None, "torch_dtype": "float16", "vocab_size": 32000,
}  # fmt: skip
_GPT_OSS_20B: dict[str, Any] = {
    "architectures": ["GptOssForCausalLM"], "attention_bias": True, "attention_dropout": 0.0, "eos_token_id": 200002,
    "experts_per_token": 4, "head_dim": 64, "hidden_act": "silu", "hidden_size": 2880, "initial_context_length": 4096,
    "initializer_range": 0.02, "intermediate_size": 2880,
    "layer_types": ["sliding_attention", "full_attention"] * 12, "max_position_embeddings": 131072,
    "model_type": "gpt_oss", "num_attention_heads": 64, "num_experts_per_tok": 4, "num_hidden_layers": 24,
    "num_key_value_heads": 8, "num_local_experts": 32, "output_router_logits": False, "pad_token_id": 199999,
    "quantization_config": {
        "modules_to_not_convert": ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens",
                                   "lm_head"],
        "quant_method": "mxfp4",
    },
    "rms_norm_eps": 1e-05,
    "rope_scaling": {"beta_fast": 32.0, "beta_slow": 1.0, "factor": 32.0, "original_max_position_embeddings": 4096,
                     "rope_type": "yarn", "truncate": False},
    "rope_theta": 150000, "router_aux_loss_coef": 0.9, "sliding_window": 128, "swiglu_limit": 7.0,
    "tie_word_embeddings": False, "use_cache": True, "vocab_size": 201088,
}  # fmt: skip
PUBLISHED: dict[str, dict[str, Any]] = {
    "LLaVA 1.5 7B": _LLAVA_1_5,
    "LLaVA 1.5 13B": {**_LLAVA_1_5, "text_config": _LLAVA_1_5["text_config"] | _13B},
    "BakLLaVA": {
        **_LLAVA_1_5,
        "text_config": {
            "architectures": ["MistralForCausalLM"], "intermediate_size": 14336, "max_position_embeddings": 32768,
            "model_type": "mistral", "num_key_value_heads": 8, "rms_norm_eps": 1e-05, "sliding_window": None,
            "torch_dtype": "float16", "vocab_size": 32064,
        },
    },
    "LLaVA of nothing but class defaults": {
        "architectures": ["LlavaForConditionalGeneration"], "model_type": "llava", "torch_dtype": "float16",
        "image_token_index": 31999,
    },
    "Qwen2.5-VL 3B": _QWEN_2_5_VL_3B,
    "Qwen2.5-VL tied by its decoder": {
        "architectures": ["Qwen2_5_VLForConditionalGeneration"], "model_type": "qwen2_5_vl", "torch_dtype": "bfloat16",
        "text_config": {"tie_word_embeddings": True, "hidden_size": 3584, "num_attention_heads": 28,
                        "num_key_value_heads": 4},
        "vision_config": {"hidden_size": 1280},
    },
    "Qwen3-VL 4B": _QWEN_3_VL_4B,
    "Mistral 7B": _MISTRAL_7B,
    "Llama 2 7B": _LLAMA_2_7B,
    "gpt-oss 20B": _GPT_OSS_20B,
}  # fmt: skip


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_config_is_read_as_transformers_reads_it(tmp_path: Path, name: str) -> None:
    directory = write(tmp_path / "published", PUBLISHED[name])
    found, theirs = read_model_config(directory), AutoConfig.from_pretrained(directory)
    text = theirs.get_text_config()
    assert (
        found.hidden_size, found.num_layers, found.num_heads, found.num_kv_heads, found.vocab_size, found.norm_eps,
        found.intermediate_size, found.max_position, found.rope.theta, found.tied_head,
    ) == (
        text.hidden_size, text.num_hidden_layers, text.num_attention_heads, text.num_key_value_heads, text.vocab_size,
        text.rms_norm_eps, text.intermediate_size, text.max_position_embeddings, text.rope_parameters["rope_theta"],
        theirs.tie_word_embeddings,
    )  # fmt: skip
    assert found == read_model_config(write(tmp_path / "whole", as_transformers_reads_it(directory)))
    assert read_checkpoint(directory, "it").context_length == text.max_position_embeddings


STATED = ("architectures", "model_type", "torch_dtype", "dtype", "trtx_synthetic")
BASES = [
    *(SHAPES[name].config for name in ("tiny", "tiny-vl", "tiny-qwen2.5-vl", "tiny-qwen3-vl")), *PUBLISHED.values(),
]  # fmt: skip


def paths_of(config: Any, parent: tuple[str, ...] = ()) -> list[tuple[str, ...]]:
    found: list[tuple[str, ...]] = []
    for name, value in config.items():
        if name not in STATED:
            found.append((*parent, name))
        if isinstance(value, dict) and name in ("text_config", "vision_config"):
            found += paths_of(value, (*parent, name))
    return found


@settings(max_examples=examples(150), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(base=st.sampled_from(BASES), data=st.data())
def test_whatever_a_config_leaves_out_is_read_as_transformers_reads_it(
    tmp_path: Path, base: dict[str, Any], data: st.DataObject
) -> None:
    """The file with fields taken away means what transformers writes after it has read it, or both are refused."""
    config = copy.deepcopy(dict(base))
    for path in data.draw(st.lists(st.sampled_from(paths_of(config)), max_size=12, unique=True), label="without"):
        place = config
        for name in path[:-1]:
            place = place.get(name, {})
        place.pop(path[-1], None)
    directory = write(tmp_path / "file", config)
    try:
        whole = as_transformers_reads_it(directory)
    except Exception:  # of any class: heads that do not divide the size
        assert read(directory) is None
        return
    assert read(directory) == read(write(tmp_path / "whole", whole))


@pytest.mark.parametrize(
    "text",
    [
        {"model_type": "gemma3_text", "hidden_size": 2560, "num_hidden_layers": 34, "sliding_window": 1024},
        {"model_type": "gemma2", "hidden_size": 2304},
        {"model_type": "gemma"},
    ],
)
def test_gemma_is_planned_with_the_sizes_and_windows_of_its_class(text: dict[str, Any]) -> None:
    theirs = CONFIG_MAPPING[text["model_type"]](**text)
    shape = model_shape(complete({"architectures": ["GemmaForCausalLM"], **text}))
    assert (shape.heads, shape.kv_heads, shape.head_dim, shape.vocab, shape.context_length) == (
        theirs.num_attention_heads, theirs.num_key_value_heads, theirs.head_dim, theirs.vocab_size,
        theirs.max_position_embeddings,
    )  # fmt: skip
    kinds = getattr(theirs, "layer_types", None) or ["full_attention"] * theirs.num_hidden_layers
    assert [window is not None for window in shape.windows] == [kind == "sliding_attention" for kind in kinds]
    assert shape.head == 0


def test_defaults_of_image_processors_are_those_of_the_installed_classes() -> None:
    assert {name: getattr(transformers.Qwen2VLImageProcessorPil, name) for name in QWEN} == {
        name: silent for name, (_, silent) in QWEN.items()
    }
    for theirs in (transformers.CLIPImageProcessorPil, transformers.LlavaImageProcessorPil):
        assert (theirs.crop_size, theirs.do_center_crop) == (CROP, True)


def test_an_image_processor_is_looked_for_where_transformers_looks(tmp_path: Path) -> None:
    """And what it leaves out is its class's: a crop of 224 pixels."""
    config = {**_LLAVA_1_5, "vision_config": _CLIP_L | {"image_size": 224}}
    directory = write(tmp_path, config)
    for name, document in (
        ("preprocessor_config", {"image_processor_type": "CLIPImageProcessor"}),
        ("processor_config", {"image_processor": {"image_processor_type": "CLIPImageProcessor", "crop_size": 336}}),
        ("preprocessor_config", {"image_processor_type": "CLIPImageProcessor", "crop_size": 336}),
        ("processor_config", {"image_processor": {"image_processor_type": "CLIPImageProcessor"}}),
        ("processor_config", {"processor_class": "LlavaProcessor"}),
    ):
        (directory / f"{name}.json").write_text(json.dumps(document), encoding="utf-8")
        made = transformers.AutoImageProcessor.from_pretrained(directory, backend="pil")
        if made.crop_size["height"] == 224:
            assert read_vision_config(directory) is not None
            continue
        with pytest.raises(UsageError, match=r"json: (image_processor\.)?crop_size is 336; expected"):
            read_vision_config(directory)


def test_an_unknown_model_gets_no_defaults() -> None:
    assert complete({"model_type": "new", "a": 1}) == {"model_type": "new", "a": 1}
    assert context_length_of(complete({"model_type": "llama"})) == 2048
    assert text_config(complete({"model_type": "llava"}))["hidden_size"] == 4096
