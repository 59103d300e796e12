"""The configs of the synthetic multimodal models, built around a decoder's config, and of their image processors."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from trtx.checkpoint.tokenizer import LLAVA_TOKENS, QWEN_TOKENS

IMAGE_SIZE, PATCH_SIZE = 60, 12

LLAVA_PROCESSOR: Mapping[str, Any] = MappingProxyType(
    {
        # Without torchvision, transformers uses the PIL variant. As in LLaVA 1.5, an image is padded to a square before
        # it is resized, so that the model sees all of it and can distinguish wide images from tall ones.
        "image_processor_type": "LlavaImageProcessor",
        "processor_class": "LlavaProcessor",
        "do_convert_rgb": True,
        "do_pad": True,
        "do_resize": True,
        "size": {"height": IMAGE_SIZE, "width": IMAGE_SIZE},
        "resample": 3,
        "do_center_crop": False,
        "crop_size": {"height": IMAGE_SIZE, "width": IMAGE_SIZE},
        "do_rescale": True,
        "rescale_factor": 1 / 255,
        "do_normalize": True,
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.5, 0.5, 0.5],
    }
)


def llava(text: dict[str, Any], *, width: int = 128, layers: int = 2) -> dict[str, Any]:
    """Returns the config of a LLaVA with the decoder ``text``, after llava-hf/llava-1.5-7b-hf.

    Its CLIP tower takes images of 60 x 60 pixels, in 25 patches of 12 x 12.
    """
    outer = ("torch_dtype", "tie_word_embeddings", "initializer_range")
    return {
        "architectures": ["LlavaForConditionalGeneration"],
        "model_type": "llava",
        "image_seq_length": (IMAGE_SIZE // PATCH_SIZE) ** 2,
        "image_token_index": LLAVA_TOKENS.id_of("<image>"),
        "multimodal_projector_bias": True,
        "projector_hidden_act": "gelu",
        **{name: text[name] for name in outer},
        "text_config": text,
        "vision_config": {
            "model_type": "clip_vision_model",
            "hidden_act": "quick_gelu",
            "hidden_size": width,
            "image_size": IMAGE_SIZE,
            "intermediate_size": 2 * width,
            "layer_norm_eps": 1e-5,
            "num_attention_heads": 4,
            "num_channels": 3,
            "num_hidden_layers": layers,
            "patch_size": PATCH_SIZE,
            "projection_dim": width,
        },
        "vision_feature_layer": -1,
        "vision_feature_select_strategy": "default",
    }


_OPENAI_MEAN, _OPENAI_STD = [0.48145466, 0.4578275, 0.40821073], [0.26862954, 0.26130258, 0.27577711]
_QWEN_PROCESSOR: Mapping[str, Any] = MappingProxyType(
    {
        "image_processor_type": "Qwen2VLImageProcessor",
        "do_convert_rgb": True,
        "do_resize": True,
        "resample": 3,
        "do_rescale": True,
        "rescale_factor": 1 / 255,
        "do_normalize": True,
        "merge_size": 2,
        "temporal_patch_size": 2,
    }
)
QWEN2_5_PROCESSOR: Mapping[str, Any] = MappingProxyType(
    {
        **_QWEN_PROCESSOR,
        "processor_class": "Qwen2_5_VLProcessor",
        "patch_size": 14,
        "min_pixels": 56 * 56,
        "max_pixels": 28 * 28 * 16384,
        "image_mean": _OPENAI_MEAN,
        "image_std": _OPENAI_STD,
    }
)
QWEN3_PROCESSOR: Mapping[str, Any] = MappingProxyType(
    {
        **_QWEN_PROCESSOR,
        "processor_class": "Qwen3VLProcessor",
        "patch_size": 16,
        "size": {"shortest_edge": 64 * 64, "longest_edge": 32 * 32 * 16384},
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.5, 0.5, 0.5],
    }
)


def qwen2_5_vl(text: dict[str, Any], sections: list[int], tower: dict[str, int], full: list[int]) -> dict[str, Any]:
    """Returns the config of a Qwen2.5-VL with the Qwen2 decoder ``text``, after Qwen/Qwen2.5-VL-7B-Instruct.

    The decoder is nested, as transformers 5 writes it. ``tower``: the sizes of the tower; ``full``: its layers with
    full attention.
    """
    return _qwen(text, "Qwen2_5_VLForConditionalGeneration", "qwen2_5_vl", {"mrope_section": sections}) | {
        "vision_config": {
            "model_type": "qwen2_5_vl_vision",
            "hidden_act": "silu",
            "in_channels": 3,
            "out_hidden_size": text["hidden_size"],
            "patch_size": 14,
            "spatial_merge_size": 2,
            "temporal_patch_size": 2,
            "tokens_per_second": 2,
            "window_size": 112,
            "fullatt_block_indexes": full,
            **tower,
        },
    }


def qwen3_vl(text: dict[str, Any], sections: list[int], tower: dict[str, int], deepstack: list[int]) -> dict[str, Any]:
    """Returns the config of a Qwen3-VL with the Qwen3 decoder ``text``, after Qwen/Qwen3-VL-4B-Instruct."""
    switches = ("use_sliding_window", "sliding_window", "max_window_layers")  # its decoder's class lacks these fields
    text = {name: value for name, value in text.items() if name not in switches}
    mrope = {"mrope_section": sections, "mrope_interleaved": True}
    return _qwen(text, "Qwen3VLForConditionalGeneration", "qwen3_vl", mrope) | {
        "vision_config": {
            "model_type": "qwen3_vl_vision",
            "hidden_act": "gelu_pytorch_tanh",
            "in_channels": 3,
            "out_hidden_size": text["hidden_size"],
            "patch_size": 16,
            "spatial_merge_size": 2,
            "temporal_patch_size": 2,
            "num_position_embeddings": 2304,
            "deepstack_visual_indexes": deepstack,
            **tower,
        },
    }


def _qwen(text: dict[str, Any], architecture: str, model_type: str, mrope: dict[str, Any]) -> dict[str, Any]:
    outer = {name: text[name] for name in ("torch_dtype", "tie_word_embeddings", "initializer_range")}
    left_out = ("architectures", "rope_theta", "rope_scaling")
    inner = {name: value for name, value in text.items() if name not in left_out}
    rope = {"rope_type": "default", "rope_theta": text["rope_theta"], **mrope}
    return {
        "architectures": [architecture],
        "model_type": model_type,
        **outer,
        "text_config": inner | {"model_type": f"{model_type}_text", "rope_parameters": rope},
        "image_token_id": QWEN_TOKENS.id_of("<|image_pad|>"),
        "video_token_id": QWEN_TOKENS.id_of("<|video_pad|>"),
        "vision_start_token_id": QWEN_TOKENS.id_of("<|vision_start|>"),
        "vision_end_token_id": QWEN_TOKENS.id_of("<|vision_end|>"),
    }
