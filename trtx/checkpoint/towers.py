"""Lists the tensors of a vision tower and its projector, from a wrapper's config.

Random weights are generated for this list, and the memory plan counts it. The names are those that transformers writes
(5.23). The tower itself is transformers' module, which checks the names at load time.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

Tensors = dict[str, tuple[int, ...]]


def _linear(name: str, rows: int, columns: int, *, bias: bool = True) -> Tensors:
    return {f"{name}.weight": (rows, columns)} | ({f"{name}.bias": (rows,)} if bias else {})


def _layer_norm(name: str, width: int) -> Tensors:
    return {f"{name}.weight": (width,), f"{name}.bias": (width,)}


def _llava(config: Mapping[str, Any]) -> Tensors:
    """Returns the tensors of the whole CLIP tower and of the two linear modules of LLaVA's projector."""
    tower, text = config["vision_config"], config["text_config"]
    width, inner, patch = tower["hidden_size"], tower["intermediate_size"], tower["patch_size"]
    at = "vision_tower.embeddings"
    found: Tensors = {
        f"{at}.class_embedding": (width,),
        f"{at}.patch_embedding.weight": (width, 3, patch, patch),
        f"{at}.position_embedding.weight": ((tower["image_size"] // patch) ** 2 + 1, width),
    }
    found |= _layer_norm("vision_tower.pre_layrnorm", width)  # CLIP's own spelling
    for layer in range(tower["num_hidden_layers"]):
        at = f"vision_tower.encoder.layers.{layer}"
        for name in ("q_proj", "k_proj", "v_proj", "out_proj"):
            found |= _linear(f"{at}.self_attn.{name}", width, width)
        found |= _linear(f"{at}.mlp.fc1", inner, width) | _linear(f"{at}.mlp.fc2", width, inner)
        found |= _layer_norm(f"{at}.layer_norm1", width) | _layer_norm(f"{at}.layer_norm2", width)
    found |= _layer_norm("vision_tower.post_layernorm", width)
    chosen, hidden = config.get("vision_feature_layer", -2), text["hidden_size"]
    has_bias = config.get("multimodal_projector_bias", True)
    columns = width * (len(chosen) if isinstance(chosen, list) else 1)
    found |= _linear("multi_modal_projector.linear_1", hidden, columns, bias=has_bias)
    return found | _linear("multi_modal_projector.linear_2", hidden, hidden, bias=has_bias)


def _qwen2_5_vl(config: Mapping[str, Any]) -> Tensors:
    """Returns the tensors of the blocks (RMS norms, gated MLP) and of the merger."""
    tower, at = config["vision_config"], "visual"
    width, inner = tower["hidden_size"], tower["intermediate_size"]
    found = _patches(at, tower)
    for layer in range(tower["depth"]):
        block = f"{at}.blocks.{layer}"
        found |= {f"{block}.norm1.weight": (width,), f"{block}.norm2.weight": (width,)}
        found |= _linear(f"{block}.attn.qkv", 3 * width, width) | _linear(f"{block}.attn.proj", width, width)
        found |= _linear(f"{block}.mlp.gate_proj", inner, width) | _linear(f"{block}.mlp.up_proj", inner, width)
        found |= _linear(f"{block}.mlp.down_proj", width, inner)
    merged = width * tower["spatial_merge_size"] ** 2
    found[f"{at}.merger.ln_q.weight"] = (width,)
    found |= _linear(f"{at}.merger.mlp.0", merged, merged)
    return found | _linear(f"{at}.merger.mlp.2", tower["out_hidden_size"], merged)


def _qwen3_vl(config: Mapping[str, Any]) -> Tensors:
    """Returns the tensors of the blocks (layer norms), the learned positions, the merger and the deepstack mergers."""
    tower, at = config["vision_config"], "model.visual"
    width, inner = tower["hidden_size"], tower["intermediate_size"]
    found = _patches(at, tower) | {f"{at}.patch_embed.proj.bias": (width,)}
    found[f"{at}.pos_embed.weight"] = (tower["num_position_embeddings"], width)
    for layer in range(tower["depth"]):
        block = f"{at}.blocks.{layer}"
        found |= _layer_norm(f"{block}.norm1", width) | _layer_norm(f"{block}.norm2", width)
        found |= _linear(f"{block}.attn.qkv", 3 * width, width) | _linear(f"{block}.attn.proj", width, width)
        found |= _linear(f"{block}.mlp.linear_fc1", inner, width) | _linear(f"{block}.mlp.linear_fc2", width, inner)
    merged = width * tower["spatial_merge_size"] ** 2
    levels = [f"deepstack_merger_list.{level}" for level in range(len(tower["deepstack_visual_indexes"]))]
    for merger in ("merger", *levels):
        found |= _layer_norm(f"{at}.{merger}.norm", width if merger == "merger" else merged)
        found |= _linear(f"{at}.{merger}.linear_fc1", merged, merged)
        found |= _linear(f"{at}.{merger}.linear_fc2", tower["out_hidden_size"], merged)
    return found


def _patches(at: str, tower: Mapping[str, Any]) -> Tensors:
    patch = tower["patch_size"]
    return {f"{at}.patch_embed.proj.weight": (tower["hidden_size"], 3, tower["temporal_patch_size"], patch, patch)}


_TOWERS: MappingProxyType[str, Callable[[Mapping[str, Any]], Tensors]] = MappingProxyType(
    {
        "LlavaForConditionalGeneration": _llava,
        "Qwen2_5_VLForConditionalGeneration": _qwen2_5_vl,
        "Qwen3VLForConditionalGeneration": _qwen3_vl,
    }
)


def tower_tensors(config: Mapping[str, Any]) -> Tensors:
    """Returns the tensor shapes by stored name; empty for an architecture without a vision tower.

    ``config``: a whole ``config.json`` that :func:`trtx.checkpoint.vision.parse_vision` has accepted.
    """
    tensors = _TOWERS.get(str(config["architectures"][0]))
    return tensors(config) if tensors is not None else {}
