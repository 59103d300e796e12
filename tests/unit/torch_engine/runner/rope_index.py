"""Positions of a prompt with images and videos, by transformers' own code.

Of a video in a Qwen2.5-VL prompt, text begins behind its largest position: so Qwen trains the model
(``get_rope_index_25`` of ``qwen-vl-finetune/qwenvl/data/rope2d.py`` in their repository), and so transformers up to
5.2, vLLM and TensorRT-LLM compute it. transformers 5.3 rewrote ``Qwen2_5_VLModel.get_rope_index``, which leaves the
time of a video out there (seen in 5.23). Its Qwen2.5-Omni, whose time positions are Qwen2.5-VL's, still has it: that
function answers for models with ``tokens_per_second``.
``test_where_transformers_own_rule_differs`` fails once transformers has it in Qwen2.5-VL too: then this module can go.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from transformers.models.qwen2_5_omni.modeling_qwen2_5_omni import Qwen2_5OmniPreTrainedModelForConditionalGeneration


def rope_index(
    model: Any,
    ids: list[int],
    *,
    image_grid_thw: Tensor | None = None,
    video_grid_thw: Tensor | None = None,
    second_per_grid_ts: Tensor | None = None,
) -> Tensor:
    """``[3, len(ids)]`` of a Qwen2.5-VL or Qwen3-VL."""
    if second_per_grid_ts is None:
        return own_rope_index(model, ids, image_grid_thw=image_grid_thw, video_grid_thw=video_grid_thw)
    config, tower = model.config, model.config.vision_config
    # It wants a mark behind the last image or video, as each has in a real prompt.
    ends_with_media = ids[-1] in (config.image_token_id, config.video_token_id)
    omni: Any = Qwen2_5OmniPreTrainedModelForConditionalGeneration
    own = SimpleNamespace(
        spatial_merge_size=tower.spatial_merge_size,
        get_llm_pos_ids_for_vision=lambda *given: omni.get_llm_pos_ids_for_vision(None, *given),
        config=SimpleNamespace(
            image_token_id=config.image_token_id,
            video_token_id=config.video_token_id,
            vision_start_token_id=config.vision_start_token_id,
            audio_token_id=-1,
            audio_start_token_id=-1,
            position_id_per_seconds=tower.tokens_per_second,
            seconds_per_chunk=None,
        ),
    )
    found, _ = omni.get_rope_index(
        own,
        torch.tensor([[*ids, config.vision_end_token_id] if ends_with_media else ids]),
        image_grid_thw,
        video_grid_thw,
        second_per_grids=second_per_grid_ts,
    )
    return found[:, 0, : len(ids)].long()


def own_rope_index(model: Any, ids: list[int], **grids: Any) -> Tensor:
    """The same by the model's own class."""
    config = model.config
    kinds = {config.image_token_id: 1, config.video_token_id: 2}
    types = torch.tensor([[kinds.get(token, 0) for token in ids]])
    found, _ = model.model.get_rope_index(torch.tensor([ids]), types, **grids)
    return found[:, 0]
