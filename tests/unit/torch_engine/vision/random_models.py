"""Small models with random weights as transformers itself builds and stores them: what an encoder is held against."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from transformers import CLIPVisionConfig, LlavaConfig, LlavaForConditionalGeneration, Qwen3Config

SIDE, PATCH = 28, 7
HIDDEN = 32
ROWS = (SIDE // PATCH) ** 2


def text_config(**changed: Any) -> Qwen3Config:
    return Qwen3Config(
        vocab_size=64,
        hidden_size=HIDDEN,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=256,
        **changed,
    )


def save_llava(directory: Path, **changed: Any) -> LlavaForConditionalGeneration:
    """The model whose checkpoint is now in ``directory``, float32. ``changed``: fields of LlavaConfig."""
    tower = CLIPVisionConfig(
        hidden_size=24,
        intermediate_size=40,
        num_hidden_layers=3,
        num_attention_heads=3,
        image_size=SIDE,
        patch_size=PATCH,
        projection_dim=24,
    )
    torch.manual_seed(11)
    config = LlavaConfig(vision_config=tower, text_config=text_config(), image_token_index=5, **changed)
    model = LlavaForConditionalGeneration(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():  # transformers' own draw is so small that pictures hardly differ
            parameter.add_(0.2 * torch.randn_like(parameter))
    model.save_pretrained(directory)
    return model


def write_processor(directory: Path) -> None:
    """LLaVA 1.5's, for pictures of this size."""
    size = {"height": SIDE, "width": SIDE}
    options = {"image_processor_type": "LlavaImageProcessor", "do_pad": True, "do_center_crop": False}
    options |= {"size": size, "crop_size": size, "image_mean": [0.5] * 3, "image_std": [0.5] * 3}
    (directory / "preprocessor_config.json").write_text(json.dumps(options))


def picture(seed: int) -> torch.Tensor:
    """``[1, 3, SIDE, SIDE]`` float32"""
    return torch.randn(1, 3, SIDE, SIDE, generator=torch.Generator().manual_seed(seed))
