"""Tiny random Qwen2.5-VL and Qwen3-VL, prompts with pictures for them, and what transformers makes of these."""

from __future__ import annotations

from typing import Any

import torch
from runner_player import VOCAB, random_prompt
from torch import Tensor
from transformers import (
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
)

from trtx.torch_engine.messages import MediaSpan

IMAGE, VIDEO, START, END = VOCAB - 1, VOCAB - 2, VOCAB - 3, VOCAB - 4
MERGE = 2
FAMILIES = ("qwen2.5-vl", "qwen3-vl")
_TEXT: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 512, "initializer_range": 0.2,
}  # fmt: skip
_TOWER: dict[str, Any] = {
    "depth": 3, "hidden_size": 32, "intermediate_size": 48, "num_heads": 2, "out_hidden_size": 64, "patch_size": 4,
    "spatial_merge_size": MERGE, "temporal_patch_size": 2, "initializer_range": 0.3,
}  # fmt: skip
_IDS = {"image_token_id": IMAGE, "video_token_id": VIDEO, "vision_start_token_id": START, "vision_end_token_id": END}


def build_vl(family: str) -> Any:
    rope = {"rope_type": "default", "rope_theta": 1e4}
    torch.manual_seed(5)
    if family == "qwen2.5-vl":
        text = _TEXT | {"rope_parameters": rope | {"mrope_section": [2, 2, 4]}}
        tower = _TOWER | {"window_size": 16, "fullatt_block_indexes": [1]}
        model: Any = Qwen2_5_VLForConditionalGeneration(
            Qwen2_5_VLConfig(text_config=text, vision_config=tower, tie_word_embeddings=False, **_IDS)
        )
    else:
        text = _TEXT | {"head_dim": 24, "rope_parameters": rope | {"mrope_section": [5, 4, 3]}}
        tower = _TOWER | {"num_position_embeddings": 64, "deepstack_visual_indexes": [0, 1]}
        model = Qwen3VLForConditionalGeneration(
            Qwen3VLConfig(text_config=text, vision_config=tower, tie_word_embeddings=False, **_IDS)
        )
    model = model.float().eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name or "bias" in name:
                parameter.add_(torch.randn_like(parameter) * 0.2)
    return model


Grid = tuple[int, int, int]
PROMPTS: dict[str, list[int | Grid]] = {
    "portrait": [4, (1, 3, 2), 5],
    "landscape": [4, (1, 2, 3), 5],
    "several": [2, (1, 4, 1), 1, (1, 2, 2), 7, (1, 1, 5), 3],
    "ends with it": [3, (1, 2, 4)],
    "text": [11],
}


class Seen:
    """One prompt, and what transformers makes of it."""

    def __init__(self, model: Any, parts: list[int | Grid], names: str = "") -> None:
        self.ids: list[int] = []
        self.spans: list[MediaSpan] = []
        pixels, self.grids = [], []
        for at, part in enumerate(parts):
            if isinstance(part, int):
                self.ids += [token % (VOCAB - 5) for token in random_prompt(part, at + part)]
                continue
            t, h, w = part
            rows = t * h * w
            self.spans.append(MediaSpan(len(self.ids), rows, bytes([at, t, h, w]) * 8, part))
            self.ids += [IMAGE] * rows
            self.grids.append((t, h * MERGE, w * MERGE))
            noise = torch.Generator().manual_seed(at * 100 + h * 10 + w)
            pixels.append(torch.randn(rows * MERGE**2, 3 * 2 * 4 * 4, generator=noise))
        self.grid = torch.tensor(self.grids) if self.grids else None
        self.pixels = torch.cat(pixels) if pixels else None
        self.model = model

    def features(self) -> list[Tensor]:
        """Rows of each picture, with those that deepstack adds behind them."""
        if self.pixels is None:
            return []
        with torch.no_grad():
            found = self.model.model.get_image_features(self.pixels, self.grid, return_dict=True)
        sizes = [span.length for span in self.spans]
        rows = torch.cat(list(found.pooler_output))
        stacked = getattr(found, "deepstack_features", None) or []
        levels = [torch.cat(list(level)) if isinstance(level, tuple) else level for level in stacked]
        return list(torch.cat([rows, *levels], dim=1).split(sizes))

    def kinds(self, ids: list[int]) -> Tensor:
        return torch.tensor([[int(token == IMAGE) for token in ids]])

    def positions(self, ids: list[int]) -> tuple[Tensor, int]:
        found, delta = self.model.model.get_rope_index(torch.tensor([ids]), self.kinds(ids), image_grid_thw=self.grid)
        return found[:, 0], int(delta)

    @torch.no_grad()
    def logprobs(self, ids: list[int]) -> Tensor:
        """``[len(ids), vocab]``"""
        more = {} if self.pixels is None else {"pixel_values": self.pixels, "image_grid_thw": self.grid}
        logits = self.model(
            input_ids=torch.tensor([ids]), attention_mask=torch.ones(1, len(ids), dtype=torch.long),
            mm_token_type_ids=self.kinds(ids), **more,
        ).logits[0]  # fmt: skip
        return torch.log_softmax(logits.float(), dim=-1)
