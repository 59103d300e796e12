"""Tiny random Qwen2.5-VL and Qwen3-VL, prompts with pictures for them, and what transformers makes of these."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from rope_index import own_rope_index, rope_index
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


def build_vl(family: str, **scaling: Any) -> Any:
    rope = {"rope_type": "default", "rope_theta": 1e4} | scaling
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


class Film(NamedTuple):
    """A video: the grid of its rows, and seconds from one step to the next."""

    grid: Grid
    step_s: float


PROMPTS: dict[str, list[int | Grid | Film]] = {
    "portrait": [4, (1, 3, 2), 5],
    "landscape": [4, (1, 2, 3), 5],
    "several": [2, (1, 4, 1), 1, (1, 2, 2), 7, (1, 1, 5), 3],
    "ends with it": [3, (1, 2, 4)],
    "text": [11],
    "video": [3, Film((3, 2, 1), 1.3), 4],
    "short video": [3, Film((2, 2, 3), 0.2), 4],
    "long video": [3, Film((3, 1, 2), 1.5), 4, Film((2, 2, 1), 2.0), 2],
    "long video at the end": [2, (1, 1, 2), 1, Film((3, 2, 1), 1.7)],
    "slow video and pictures": [2, (1, 2, 2), 1, Film((2, 1, 3), 2.5), 2, (1, 2, 1), 1, Film((2, 2, 2), 0.2)],
}


class Seen:
    """One prompt, and what transformers makes of it."""

    def __init__(self, model: Any, parts: Sequence[int | Grid | Film], names: str = "") -> None:
        self.ids: list[int] = []
        self.spans: list[MediaSpan] = []
        self.model = model
        self.films: list[Film] = []
        self.grids: list[Grid] = []
        self._keys: list[bytes] = []  # of pictures
        self._film_keys: list[bytes] = []
        self._known: dict[tuple[int, ...], Tensor] = {}  # logprobs by ids: most tests ask for the same answer's
        pixels, frames = [], []
        for at, part in enumerate(parts):
            if isinstance(part, int):
                self._say(part, at)
                continue
            t, h, w = grid = part.grid if isinstance(part, Film) else part
            key, rows = bytes([at, t, h, w]) * 8, t * h * w
            noise = torch.Generator().manual_seed(at * 100 + h * 10 + w)
            values = torch.randn(rows * MERGE**2, 3 * 2 * 4 * 4, generator=noise)
            if isinstance(part, Film):
                self._show(part, key)
                self.films.append(part)
                self._film_keys.append(key)
                frames.append(values)
                continue
            self.ids.append(START)
            self.spans.append(MediaSpan(len(self.ids), rows, key, grid))
            self.ids += [*[IMAGE] * rows, END]
            self.grids.append((t, h * MERGE, w * MERGE))
            self._keys.append(key)
            pixels.append(values)
        if not isinstance(parts[-1], int):
            self.ids.pop()  # to end with a placeholder
        self.grid = torch.tensor(self.grids) if self.grids else None
        self.pixels = torch.cat(pixels) if pixels else None
        self._frames = torch.cat(frames) if frames else None

    def _say(self, count: int, at: int) -> None:
        self.ids += [token % (VOCAB - 5) for token in random_prompt(count, at + count)]

    def _show(self, film: Film, key: bytes) -> None:
        """As the processors of the two write it: in one piece, or each step behind text that says when it is."""
        t, h, w = film.grid
        rows = h * w
        if self._is_timed:
            step = np.float32(self.model.config.vision_config.tokens_per_second) * np.float32(film.step_s)
            self.ids.append(START)
            self.spans.append(MediaSpan(len(self.ids), t * rows, key, film.grid, time_step=float(step)))
            self.ids += [*[VIDEO] * t * rows, END]
            return
        for step in range(t):
            self._say(3, step)
            self.ids.append(START)
            self.spans.append(MediaSpan(len(self.ids), rows, key, (1, h, w), first=step * rows, rows=t * rows))
            self.ids += [*[VIDEO] * rows, END]

    @property
    def _is_timed(self) -> bool:
        return hasattr(self.model.config.vision_config, "tokens_per_second")

    def _of_films(self) -> dict[str, Any]:
        if not self.films:
            return {}
        grids = [(film.grid[0], film.grid[1] * MERGE, film.grid[2] * MERGE) for film in self.films]
        found: dict[str, Any] = {"video_grid_thw": torch.tensor(grids)}
        if self._is_timed:
            found["second_per_grid_ts"] = torch.tensor([film.step_s for film in self.films])
        return found

    def features(self) -> dict[bytes, Tensor]:
        """By key, the rows of each picture and video, with those that deepstack adds behind them."""
        found: dict[bytes, Tensor] = {}
        with torch.no_grad():
            if self.pixels is not None:
                made = self.model.model.get_image_features(self.pixels, self.grid, return_dict=True)
                found |= zip(self._keys, _rows(made), strict=True)
            if self._frames is not None:
                grids = self._of_films()["video_grid_thw"]
                made = self.model.model.get_video_features(self._frames, grids, return_dict=True)
                found |= zip(self._film_keys, _rows(made), strict=True)
        return found

    def kinds(self, ids: list[int]) -> Tensor:
        return torch.tensor([[{IMAGE: 1, VIDEO: 2}.get(token, 0) for token in ids]])

    def positions(self, more: int = 0) -> Tensor:
        """``[3, tokens]`` of the prompt and of ``more`` tokens behind it: positions do not depend on which."""
        if not self.spans:
            return torch.arange(len(self.ids) + more).expand(3, -1)
        return rope_index(self.model, self.ids + [0] * more, image_grid_thw=self.grid, **self._of_films())

    def own_positions(self, more: int = 0) -> Tensor:
        """The same by the class of the model itself, wrong for long videos of Qwen2.5-VL: see ``rope_index``."""
        return own_rope_index(self.model, self.ids + [0] * more, image_grid_thw=self.grid, **self._of_films())

    @torch.no_grad()
    def logprobs(self, ids: list[int]) -> Tensor:
        """``[len(ids), vocab]`` of the prompt and an answer."""
        if tuple(ids) not in self._known:
            self._known[tuple(ids)] = self._logprobs(ids)
        return self._known[tuple(ids)]

    def _logprobs(self, ids: list[int]) -> Tensor:
        positions = self.positions(len(ids) - len(self.ids))
        more = {} if self.pixels is None else {"pixel_values": self.pixels, "image_grid_thw": self.grid}
        if self._frames is not None:
            more |= {"pixel_values_videos": self._frames, **self._of_films()}
        logits = self.model(
            input_ids=torch.tensor([ids]), attention_mask=torch.ones(1, len(ids), dtype=torch.long),
            mm_token_type_ids=self.kinds(ids), position_ids=positions[:, None], **more,
        ).logits[0]  # fmt: skip
        return torch.log_softmax(logits.float(), dim=-1)

    @torch.no_grad()
    def generated(self, count: int) -> list[int]:
        """By ``generate()``, greedy."""
        ids = torch.tensor([self.ids])
        more = {} if self.pixels is None else {"pixel_values": self.pixels, "image_grid_thw": self.grid}
        if self._frames is not None:
            more |= {"pixel_values_videos": self._frames, **self._of_films()}
        positions = torch.cat([torch.arange(len(self.ids)).expand(1, -1), self.positions()])[:, None]
        found = self.model.generate(
            input_ids=ids, attention_mask=torch.ones_like(ids), mm_token_type_ids=self.kinds(self.ids),
            position_ids=positions, max_new_tokens=count, do_sample=False, eos_token_id=None, pad_token_id=0, **more,
        )  # fmt: skip
        return found[0, len(self.ids) :].tolist()  # type: ignore[no-any-return]


def _rows(found: Any) -> list[Tensor]:
    """Of each item."""
    each = list(found.pooler_output)
    stacked = getattr(found, "deepstack_features", None) or []
    levels = [torch.cat(list(level)) if isinstance(level, tuple) else level for level in stacked]
    return list(torch.cat([torch.cat(each), *levels], dim=1).split([len(one) for one in each]))
