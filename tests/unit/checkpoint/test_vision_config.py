"""A config.json of a model that sees: the decoder that it nests, and the rows that stand for a picture."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from examples import examples
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import AutoConfig, AutoModelForImageTextToText

from trtx.checkpoint.dense import checkpoint_tensors
from trtx.checkpoint.facts import is_tied as facts_is_tied
from trtx.checkpoint.facts import read_checkpoint, read_config
from trtx.checkpoint.model_config import read_model_config
from trtx.checkpoint.shapes import SHAPES
from trtx.checkpoint.towers import tower_tensors
from trtx.checkpoint.vision import WRAPPERS, decoder_name, read_vision_config, stored_name
from trtx.errors import UsageError

LLAVA, QWEN2_5, QWEN3 = (dict(SHAPES[name].config) for name in ("tiny-vl", "tiny-qwen2.5-vl", "tiny-qwen3-vl"))


def changed(config: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """``changes`` by path, such as ``text_config.hidden_size``; "…" takes a field away."""
    config = copy.deepcopy(config)
    for path, value in changes.items():
        *outer, name = path.split(".")
        place = config
        for one in outer:
            place = place[one]
        if value == "…":
            del place[name]
        else:
            place[name] = value
    return config


def write(directory: Path, config: dict[str, Any]) -> Path:
    (directory / "config.json").write_text(json.dumps(config))
    return directory


def refusal(directory: Path, config: dict[str, Any]) -> str:
    with pytest.raises(UsageError) as refused:
        read_model_config(write(directory, config))
    said = str(refused.value)
    assert str(directory) in said and len(said) < 1000 and "\n" not in said
    return said.replace(str(directory / "config.json"), "FILE")


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"text_config": [1]}, "FILE: text_config is [1]; expected a JSON object"),
        ({"model_type": "llava_next"}, "model_type is 'llava_next'; expected 'llava', as architectures says"),
        ({"architectures": ["LlavaNextForConditionalGeneration"]}, "is not known to the torch engine; expected one of"),
        ({"text_config.model_type": "mamba"}, "text_config.model_type is 'mamba'; expected one of llama, qwen2, qwen3"),
        ({"text_config.architectures": ["LlamaForCausalLM"]}, "text_config.architectures is ['LlamaForCausalLM']"),
        ({"text_config.num_hidden_layers": 0}, "text_config.num_hidden_layers is 0; expected an integer from 1"),
        ({"text_config.rope_theta": None}, "FILE: text_config.rope_theta is None; expected a number above 0"),
        ({"text_config.new_field": 3}, "text_config.new_field is 3; expected no such field"),
        ({"text_config.hidden_act": "gelu"}, "text_config.hidden_act is 'gelu'; expected 'silu'"),
        ({"text_config.rope_scaling": {"rope_type": "dynamic"}}, "text_config.rope_scaling.rope_type is 'dynamic'"),
        ({"text_config.quantization_config": {"quant_method": "fp8"}}, "is a quantized LlavaForConditionalGeneration"),
        ({"text_config.torch_dtype": "float16"}, "text_config.torch_dtype is 'float16'; expected 'float32' as outside"),
        ({"rope_theta": 5.0}, "FILE: rope_theta is 5.0; expected no such field beside the text_config"),
        ({"vocab_size": 5}, "FILE: vocab_size is 5; expected 4096 as in text_config"),
        ({"image_token_index": "…"}, "FILE has no image_token_index, which transformers takes for 32000; expected the"),
        ({"image_token_index": 4096}, "image_token_index is 4096; expected the id of the placeholder"),
        ({"image_token_index": True}, "image_token_index is True; expected the id of the placeholder"),
        ({"image_token_id": 7}, "image_token_id is 7; expected 5 as in image_token_index"),
        ({"vision_feature_select_strategy": "all"}, "vision_feature_select_strategy is 'all'; expected 'default'"),
        ({"vision_feature_layer": -4}, "vision_feature_layer is -4; expected a layer of the tower from -3 to 2"),
        ({"vision_feature_layer": 0}, "vision_feature_layer is 0; expected -3, which is the same layer"),
        ({"vision_feature_layer": []}, "vision_feature_layer is []; expected a layer of the tower"),
        ({"projector_hidden_act": 3}, "projector_hidden_act is 3; expected the name of an activation"),
        ({"multimodal_projector_bias": 1}, "multimodal_projector_bias is 1; expected true or false"),
        ({"vision_config.model_type": "siglip_vision_model"}, "vision_config.model_type is 'siglip_vision_model'"),
        ({"vision_config.num_channels": 1}, "vision_config.num_channels is 1; expected 3"),
        ({"vision_config.patch_size": 61}, "vision_config.patch_size is 61; expected an integer from 1 to 60"),
        ({"vision_config.image_size": [60, 60]}, "vision_config.image_size is [60, 60]; expected an integer"),
        ({"vision_config.num_attention_heads": 3}, "vision_config.num_attention_heads is 3; expected a divisor of"),
    ],
)
def test_what_is_wrong_in_a_llava_is_named_with_its_path(tmp_path: Path, changes: dict[str, Any], says: str) -> None:
    assert says in refusal(tmp_path, changed(LLAVA, changes))


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"text_config.rope_parameters.mrope_section": [4, 6]}, "mrope_section is [4, 6]; expected three integers"),
        ({"text_config.rope_parameters.mrope_section": [4, 6, 7]}, "(time, height, width) with the sum 16"),
        ({"text_config.rope_parameters.mrope_section": "…"}, "transformers takes [16, 24, 24] where it is missing"),
        ({"text_config.rope_parameters.mrope_interleaved": True}, "mrope_interleaved is True; expected false"),
        ({"text_config.rope_parameters.rope_type": "dynamic"}, "rope_type is 'dynamic'; expected one of default"),
        ({"text_config.model_type": "qwen2"}, "text_config.model_type is 'qwen2'; expected one of qwen2_5_vl_text"),
        ({"text_config.head_dim": 64}, "text_config.head_dim is 64; expected 32, hidden_size / num_attention_heads"),
        ({"vision_config.out_hidden_size": 64}, "vision_config.out_hidden_size is 64; expected 128, hidden_size of"),
        ({"vision_config.fullatt_block_indexes": [2]}, "fullatt_block_indexes is [2]; expected a list of layers"),
        ({"vision_config.spatial_merge_size": None}, "FILE: vision_config.spatial_merge_size is None; expected an"),
        ({"vision_config.fullatt_block_indexes": "…"}, "which transformers takes for [7, 15, 23, 31]; expected a list"),
        ({"vision_config.model_type": "clip_vision_model"}, "expected 'qwen2_5_vl' or 'qwen2_5_vl_vision'"),
        ({"video_token_id": 7}, "video_token_id is 7; expected another id than image_token_id, 7"),
        ({"text_config.use_sliding_window": True, "text_config.sliding_window": 8,
          "text_config.max_window_layers": 0}, "text_config.sliding_window is 8; expected null"),
    ],
)  # fmt: skip
def test_what_is_wrong_in_a_qwen_is_named_with_its_path(tmp_path: Path, changes: dict[str, Any], says: str) -> None:
    assert says in refusal(tmp_path, changed(QWEN2_5, changes))


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"text_config.rope_parameters.mrope_interleaved": False}, "mrope_interleaved is False; expected true"),
        ({"tie_word_embeddings": False, "text_config.tie_word_embeddings": True}, "is False; expected true, as in"),
        ({"vision_config.num_position_embeddings": 60}, "num_position_embeddings is 60; expected the square of"),
        ({"vision_config.deepstack_visual_indexes": [0, 0]}, "deepstack_visual_indexes is [0, 0]; expected a list of"),
        ({"vision_config.deepstack_visual_indexes": [0, 1, 2, 1]}, "expected a list of layers of the tower"),
    ],
)
def test_what_is_wrong_in_a_qwen3_is_named_with_its_path(tmp_path: Path, changes: dict[str, Any], says: str) -> None:
    assert says in refusal(tmp_path, changed(QWEN3, changes))


@pytest.mark.parametrize(
    ("name", "changes", "says"),
    [
        ("tiny-vl", {}, None),
        ("tiny-vl", {"do_center_crop": True, "crop_size": 60}, None),
        (
            "tiny-vl",
            {"size": {"height": 84, "width": 60}},
            "size is {'height': 84, 'width': 60}; expected {\"height\": 60",
        ),
        ("tiny-vl", {"size": {"shortest_edge": 60}}, "size is {'shortest_edge': 60}; expected"),
        ("tiny-vl", {"size": 60}, "size is 60; expected"),
        ("tiny-vl", {"do_center_crop": True, "crop_size": 84}, "crop_size is 84; expected"),
        ("tiny-vl", {"do_center_crop": None, "crop_size": None}, "crop_size is None; expected"),
        ("tiny-qwen2.5-vl", {}, None),
        ("tiny-qwen2.5-vl", {"merge_size": 1}, "merge_size is 1; expected 2, spatial_merge_size of the tower"),
        ("tiny-qwen3-vl", {}, None),
        ("tiny-qwen3-vl", {"patch_size": None}, "patch_size is None; expected 16, patch_size of the tower"),
    ],
)
def test_an_image_processor_that_makes_other_sizes_than_the_tower_takes_is_refused(
    tmp_path: Path, name: str, changes: dict[str, Any], says: str | None
) -> None:
    write(tmp_path, dict(SHAPES[name].config))
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(dict(SHAPES[name].processor or {}) | changes))
    if says is None:
        assert read_vision_config(tmp_path) is not None
        return
    with pytest.raises(UsageError) as refused:
        read_vision_config(tmp_path)
    assert f"preprocessor_config.json: {says}" in str(refused.value)


def test_a_text_model_has_no_vision(tmp_path: Path) -> None:
    assert read_vision_config(write(tmp_path, dict(SHAPES["tiny"].config))) is None
    assert read_model_config(tmp_path).vision is None


def test_a_published_qwen_with_its_decoders_fields_outside_is_the_same_model(tmp_path: Path) -> None:
    nested = read_model_config(write(tmp_path, QWEN2_5))
    text = {
        name: value for name, value in QWEN2_5["text_config"].items() if name not in ("model_type", "rope_parameters")
    }
    flat = {name: value for name, value in QWEN2_5.items() if name != "text_config"} | text
    flat |= {"rope_theta": 10000.0, "rope_scaling": {"type": "mrope", "mrope_section": [4, 6, 6]}}
    flat["vision_config"] = QWEN2_5["vision_config"] | {"model_type": "qwen2_5_vl", "in_chans": 3}
    assert read_model_config(write(tmp_path, flat)) == nested
    theirs = AutoConfig.from_pretrained(tmp_path).get_text_config()
    assert (theirs.hidden_size, theirs.num_hidden_layers) == (nested.hidden_size, nested.num_layers)
    assert theirs.rope_parameters["mrope_section"] == [4, 6, 6]
    assert "rope_theta is 'x'" in refusal(tmp_path, flat | {"rope_theta": "x"})
    assert "new_field is 1; expected no such field" in refusal(tmp_path, flat | {"new_field": 1})


# --- against transformers ---

TEXT = st.fixed_dictionaries(
    {
        "num_key_value_heads": st.sampled_from([1, 2, 4]),
        "head_dim": st.sampled_from([8, 16]),
        "tie_word_embeddings": st.booleans(),
        "attention_bias": st.booleans(),
        "num_hidden_layers": st.integers(1, 2),
    }
)
OUTER = st.fixed_dictionaries(
    {
        "tie_word_embeddings": st.booleans(),
        "vision_feature_layer": st.sampled_from([-1, -2, -3, 2, [-1, -2], [0]]),
        "vision_feature_select_strategy": st.sampled_from(["default", "full"]),
        "multimodal_projector_bias": st.booleans(),
        "image_token_index": st.integers(0, 60),
        "image_seq_length": st.integers(1, 600),
    }
)
TOWER = st.fixed_dictionaries(
    {
        "image_size": st.integers(8, 30),
        "patch_size": st.integers(3, 8),
        "intermediate_size": st.integers(4, 20),
        "num_hidden_layers": st.integers(2, 3),
        "hidden_size": st.sampled_from([8, 16]),
        "num_attention_heads": st.sampled_from([1, 2]),
    }
)


@settings(max_examples=examples(10), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(kind=st.sampled_from(["qwen3", "qwen2", "llama"]), text=TEXT, outer=OUTER, tower=TOWER)
def test_any_llava_that_is_accepted_has_the_rows_head_and_tensors_of_transformers(
    tmp_path: Path, kind: str, text: dict[str, Any], outer: dict[str, Any], tower: dict[str, Any]
) -> None:
    transformers.logging.set_verbosity_error()
    small = {"model_type": kind, "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "vocab_size": 61}
    if kind == "qwen2":  # whose heads have no size of their own to transformers' class
        text = text | {"head_dim": 8, "attention_bias": False}
    config = changed(LLAVA, outer | {f"text_config.{name}": value for name, value in (small | text).items()})
    del config["text_config"]["architectures"]
    config["vision_config"] |= tower
    read = read_model_config(write(tmp_path, config))
    assert read.vision is not None and read.vision == read_vision_config(tmp_path)
    model = AutoModelForImageTextToText.from_config(AutoConfig.from_pretrained(tmp_path)).eval()
    pixels = torch.zeros(1, 3, tower["image_size"], tower["image_size"])
    with torch.no_grad():
        (rows,) = model.get_image_features(pixel_values=pixels).pooler_output
    assert tuple(rows.shape) == (read.vision.tokens_per_image, read.vision.hidden_size)
    assert model.config.image_token_id == read.vision.image_token_id
    assert read.tied_head == facts_is_tied(config) == (model.lm_head.weight is model.get_input_embeddings().weight)
    check_tensors(model, tmp_path)


def check_tensors(model: Any, directory: Path) -> None:
    """By the names that modules have; that files hold the names of tower_tensors is shown where one is loaded."""
    read = read_model_config(directory)
    decoder, tower = {}, {}
    for name, value in model.named_parameters():
        own = decoder_name(read.architecture, name)
        (tower if own is None else decoder)[own or name.removeprefix("model.")] = tuple(value.shape)
    assert decoder == {name: stored.shape for name, stored in checkpoint_tensors(read).items()}
    assert tower == {name.removeprefix("model."): s for name, s in tower_tensors(read_config(directory)).items()}


QWEN_TOWER = st.fixed_dictionaries(
    {
        "patch_size": st.sampled_from([2, 4]),
        "spatial_merge_size": st.sampled_from([1, 2, 3]),
        "temporal_patch_size": st.sampled_from([1, 2]),
        "depth": st.integers(1, 3),
        "hidden_size": st.sampled_from([16, 32]),
        "intermediate_size": st.integers(4, 20),
    }
)


@settings(max_examples=examples(6), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    base=st.sampled_from([QWEN2_5, QWEN3]), tower=QWEN_TOWER, tied=st.booleans(), height=st.integers(1, 3),
    width=st.integers(1, 3),
)  # fmt: skip
def test_any_qwen_that_is_accepted_has_the_rows_head_and_tensors_of_transformers(
    tmp_path: Path, base: dict[str, Any], tower: dict[str, Any], tied: bool, height: int, width: int
) -> None:
    transformers.logging.set_verbosity_error()
    listed = "fullatt_block_indexes" if base is QWEN2_5 else "deepstack_visual_indexes"
    tower = tower | {listed: [0], "window_size": 4 * tower["patch_size"] * tower["spatial_merge_size"]}
    config = changed(base, {"tie_word_embeddings": tied, "text_config.tie_word_embeddings": tied})
    config["vision_config"] |= tower
    read = read_model_config(write(tmp_path, config))
    vision = read.vision
    assert vision is not None and vision == read_vision_config(tmp_path)
    model = AutoModelForImageTextToText.from_config(AutoConfig.from_pretrained(tmp_path)).eval()
    grid = torch.tensor([[1, height * vision.spatial_merge, width * vision.spatial_merge]])
    columns = 3 * vision.temporal_patch * tower["patch_size"] ** 2
    with torch.no_grad():
        found = model.model.get_image_features(torch.zeros(int(grid.prod()), columns), image_grid_thw=grid)
    (rows,) = found.pooler_output
    assert tuple(rows.shape) == (height * width, vision.hidden_size)
    assert len(getattr(found, "deepstack_features", None) or ()) == vision.deepstack_levels
    assert (model.config.image_token_id, model.config.video_token_id) == (vision.image_token_id, vision.video_token_id)
    rotary = model.model.language_model.rotary_emb
    assert tuple(rotary.mrope_section) == read.rope.mrope_section
    assert read.tied_head == facts_is_tied(config) == (model.lm_head.weight is model.get_input_embeddings().weight)
    check_tensors(model, tmp_path)


@pytest.mark.parametrize("architecture", WRAPPERS)
def test_a_decoders_tensor_is_found_again_by_the_name_that_it_is_stored_under(architecture: str) -> None:
    for name in (
        "model.embed_tokens.weight",
        "model.layers.3.mlp.up_proj.weight",
        "model.norm.weight",
        "lm_head.weight",
    ):
        assert decoder_name(architecture, stored_name(architecture, name)) == name


def test_names_of_a_llava() -> None:
    architecture = "LlavaForConditionalGeneration"
    for stored in ("language_model.model.norm.weight", "model.language_model.norm.weight"):
        assert decoder_name(architecture, stored) == "model.norm.weight"
    assert decoder_name(architecture, "language_model.lm_head.weight") == "lm_head.weight"
    for stored in ("vision_tower.vision_model.post_layernorm.bias", "model.multi_modal_projector.linear_1.weight"):
        assert decoder_name(architecture, stored) is None
    # A text model's file, or a stranger's, has no place in it.
    for stored in ("model.norm.weight", "audio_tower.norm.weight"):
        assert decoder_name(architecture, stored) not in ("model.norm.weight", None)
    assert decoder_name("Qwen3ForCausalLM", "vision_tower.x") == "vision_tower.x"


@pytest.mark.parametrize("name", ["qwen2.5-vl-7b"])
def test_weights_that_are_drawn_are_counted_with_the_tower(tmp_path: Path, name: str) -> None:
    write(tmp_path, dict(SHAPES[name].config) | {"trtx_synthetic": {"seed": 0, "init_std": 0.02}})
    with torch.device("meta"):
        model = AutoModelForImageTextToText.from_config(AutoConfig.from_pretrained(tmp_path))
    assert read_checkpoint(tmp_path, name).weight_bytes == 2 * sum(p.numel() for p in model.parameters())
