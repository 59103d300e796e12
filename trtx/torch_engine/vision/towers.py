"""transformers' own vision models without their decoders: from pixels to embedding rows."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModel, PreTrainedModel
from transformers.models.llava.modeling_llava import LlavaModel, LlavaMultiModalProjector, LlavaPreTrainedModel
from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import (
    Qwen2_5_VisionTransformerPretrainedModel,
    Qwen2_5_VLModel,
    Qwen2_5_VLPreTrainedModel,
)
from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLModel, Qwen3VLPreTrainedModel

from trtx.ipc.encoder_messages import Grid

_RGB = 3


class UnsuitableImage(Exception):
    """These pixels do not fit this model; the text is for the client."""


@dataclass(frozen=True, slots=True)
class Pixels:
    """Pixels of one item, validated by :meth:`Tower.check`."""

    values: Tensor  # float32, on the CPU
    grid: Grid | None  # in patches
    rows: int  # rows of the embedding

    @property
    def patches(self) -> int:
        """Number of tokens in the tower's matmuls."""
        return self.rows if self.grid is None else prod(self.grid)


class Tower(ABC):
    """A loaded vision tower with its projector. ``width``: columns of a row; ``dtype``: of rows and weights."""

    def __init__(self, model: PreTrainedModel, width: int) -> None:
        self._model = model
        self.width = width
        self.dtype: torch.dtype = model.dtype
        self.device: torch.device = model.device

    @abstractmethod
    def check(self, values: Tensor, grid: Grid | None) -> Pixels:
        """Validates pixels. Raises UnsuitableImage if this model's image processor could not have produced them."""

    @abstractmethod
    def merged(self, grid: Grid | None) -> Grid | None:
        """Converts a grid in patches to the grid of the embedding's rows."""

    def _values(self, batch: Sequence[Pixels]) -> Tensor:
        """Pixels of all items, on the device in the tower's dtype.

        They are concatenated and rounded there, because each pass over an image on the CPU costs milliseconds.
        """
        return torch.cat([one.values.to(self.device) for one in batch]).to(self.dtype)

    @abstractmethod
    def encode(self, batch: Sequence[Pixels]) -> list[Tensor]:
        """Returns rows ``[rows, width]`` for each item, on the device."""


class LlavaWithoutDecoder(LlavaModel):  # type: ignore[misc]
    """transformers' LlavaModel with only what :meth:`get_image_features` needs, without the language model."""

    def __init__(self, config: Any) -> None:
        LlavaPreTrainedModel.__init__(self, config)
        self.vision_tower = AutoModel.from_config(config.vision_config)
        self.multi_modal_projector = LlavaMultiModalProjector(config)
        self.post_init()


class LlavaTower(Tower):
    """CLIP with LLaVA's projector: images of one size, a fixed number of rows."""

    def __init__(self, model: PreTrainedModel, rows: int) -> None:
        config = model.config
        super().__init__(model, config.text_config.hidden_size)
        side = config.vision_config.image_size
        self.shape = (_RGB, side, side)
        self._rows = rows

    def check(self, values: Tensor, grid: Grid | None) -> Pixels:
        if values.shape != (1, *self.shape) or grid is not None:
            expected = " x ".join(map(str, (1, *self.shape)))
            has = " x ".join(map(str, values.shape))
            raise UnsuitableImage(
                f"pixels of shape {has}{'' if grid is None else ' with a grid'}; expected {expected} and no grid, as "
                "the model's image processor gives for one image"
            )
        return Pixels(values, None, self._rows)

    def merged(self, grid: Grid | None) -> None:
        return None

    def encode(self, batch: Sequence[Pixels]) -> list[Tensor]:
        values = self._values(batch)
        # transformers' own forward uses the two parameters in its config for each image.
        return list(self._model.get_image_features(values).pooler_output)


class Qwen25WithoutDecoder(Qwen2_5_VLModel):  # type: ignore[misc]
    """Like :class:`LlavaWithoutDecoder`, for Qwen2.5-VL."""

    def __init__(self, config: Any) -> None:
        Qwen2_5_VLPreTrainedModel.__init__(self, config)
        self.visual = Qwen2_5_VisionTransformerPretrainedModel._from_config(config.vision_config)
        self.post_init()


class Qwen3WithoutDecoder(Qwen3VLModel):  # type: ignore[misc]
    """Like :class:`LlavaWithoutDecoder`, for Qwen3-VL."""

    def __init__(self, config: Any) -> None:
        Qwen3VLPreTrainedModel.__init__(self, config)
        self.visual = AutoModel.from_config(config.vision_config)
        self.post_init()


class QwenTower(Tower):
    """Towers of Qwen2.5-VL and Qwen3-VL: images of any size, as patches with their grid.

    With deepstack, a row has all its vectors side by side: first its own, then those for the decoder's first layers in
    order.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        tower = model.config.vision_config
        levels = len(getattr(tower, "deepstack_visual_indexes", ()))
        super().__init__(model, tower.out_hidden_size * (1 + levels))
        self.columns = _RGB * tower.temporal_patch_size * tower.patch_size**2
        self._merge = int(tower.spatial_merge_size)

    def check(self, values: Tensor, grid: Grid | None) -> Pixels:
        if grid is None or min(grid) < 1 or grid[1] % self._merge or grid[2] % self._merge:
            raise UnsuitableImage(
                f"pixels have the grid {grid}; expected time, height and width in patches, the last two multiples of "
                f"{self._merge}"
            )
        if values.shape != (prod(grid), self.columns):
            has = " x ".join(map(str, values.shape))
            raise UnsuitableImage(
                f"pixels have the shape {has} and a grid of {' x '.join(map(str, grid))}; expected {prod(grid)} x "
                f"{self.columns}, a row for each patch, as the model's image processor gives"
            )
        return Pixels(values, grid, prod(grid) // self._merge**2)

    def merged(self, grid: Grid | None) -> Grid:
        assert grid is not None, "see check"
        time, height, width = grid
        return time, height // self._merge, width // self._merge

    def encode(self, batch: Sequence[Pixels]) -> list[Tensor]:
        values = self._values(batch)
        grids = torch.tensor([one.grid for one in batch], device=self.device)  # [items, 3]
        found = self._model.get_image_features(values, grids)
        rows = [one.rows for one in batch]
        levels = [  # rows by item, for each level; transformers 5.17 returns one tensor for all items, 5.23 a list
            torch.split(level, rows) if isinstance(level, Tensor) else level
            for level in getattr(found, "deepstack_features", None) or ()
        ]
        return [torch.cat(vectors, dim=1) for vectors in zip(found.pooler_output, *levels, strict=True)]
