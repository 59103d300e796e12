"""Configurations of the synthetic models that see, around a decoder's own, and of their image processors."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from trtx.checkpoint.tokenizer import LLAVA_TOKENS, SPECIAL_TOKENS

IMAGE_SIZE, PATCH_SIZE = 84, 14

LLAVA_PROCESSOR: Mapping[str, Any] = MappingProxyType(
    {
        # transformers takes its PIL variant where torchvision is not installed. Of LLaVA 1.5: a picture is padded to a
        # square before it is resized, so that all of it is seen, and wide ones look other than tall ones.
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
    """LLaVA after llava-hf/llava-1.5-7b-hf: CLIP of 84 pixels a side, 36 patches of 14, around the decoder ``text``."""
    outer = ("torch_dtype", "tie_word_embeddings", "initializer_range")
    return {
        "architectures": ["LlavaForConditionalGeneration"],
        "model_type": "llava",
        "image_seq_length": (IMAGE_SIZE // PATCH_SIZE) ** 2,
        "image_token_index": len(SPECIAL_TOKENS) + LLAVA_TOKENS.tokens.index("<image>"),
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
