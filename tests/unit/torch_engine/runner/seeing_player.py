"""A random LLaVA around a Qwen3, prompts with pictures for it, and what transformers' whole model answers to them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from engine_player import Engine
from runner_player import VOCAB, random_prompt
from torch import Tensor
from transformers import CLIPVisionConfig, LlavaConfig, LlavaForConditionalGeneration, Qwen3Config

from trtx.torch_engine.core.engine_core import EngineCore
from trtx.torch_engine.llmapi.sampling import SamplingParams, resolve_sampling
from trtx.torch_engine.messages import Handoff, MediaSpan, Submit
from trtx.torch_engine.step import StepEmbedding

IMAGE = VOCAB - 2
ROWS = 9  # 24 pixels in patches of 8


def build_llava() -> LlavaForConditionalGeneration:
    text = Qwen3Config(
        vocab_size=VOCAB, hidden_size=64, intermediate_size=96, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, head_dim=24, max_position_embeddings=512, initializer_range=0.2,
    )  # fmt: skip
    vision = CLIPVisionConfig(
        hidden_size=32, intermediate_size=48, num_hidden_layers=3, num_attention_heads=2, image_size=24, patch_size=8,
        initializer_range=0.3,
    )  # fmt: skip
    torch.manual_seed(3)
    config = LlavaConfig(text_config=text, vision_config=vision, image_token_id=IMAGE, tie_word_embeddings=False)
    model = LlavaForConditionalGeneration(config).float().eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name or "layrnorm" in name:
                parameter.add_(torch.randn_like(parameter) * 0.2)
    return model


@dataclass
class Sight:
    """``parts``: numbers of text tokens, and numbers of pictures (seeds of their pixels)."""

    parts: tuple[int | str, ...]
    seed: int = 0

    @property
    def prompt(self) -> list[int]:
        found: list[int] = []
        for at, part in enumerate(self.parts):
            found += [IMAGE] * ROWS if isinstance(part, str) else _text(part, self.seed + at)
        return found

    @property
    def pictures(self) -> list[str]:
        return [part for part in self.parts if isinstance(part, str)]

    @property
    def spans(self) -> list[MediaSpan]:
        found, at = [], 0
        for part in self.parts:
            if isinstance(part, str):
                found.append(MediaSpan(at, ROWS, part.encode() * 32))
            at += ROWS if isinstance(part, str) else part
        return found

    def submit(self, core: EngineCore, sequence_id: int, count: int, handoff: Handoff | None = None) -> None:
        plan = resolve_sampling(SamplingParams(max_tokens=count, ignore_eos=True))
        core.submit(Submit(sequence_id, self.prompt, plan, handoff=handoff, media=self.spans))


def _text(length: int, seed: int) -> list[int]:
    return [token % (VOCAB - 3) for token in random_prompt(length, seed)]


def pixels(name: str) -> Tensor:
    return torch.randn(1, 3, 24, 24, generator=torch.Generator().manual_seed(ord(name)))


class Oracle:
    """transformers' model of it all."""

    def __init__(self, directory: Path) -> None:
        self.model = build_llava()
        self.directory = directory
        self.model.save_pretrained(directory)
        self._rows: dict[str, Tensor] = {}

    @torch.no_grad()
    def rows(self, name: str) -> Tensor:
        """What its tower and projector make of a picture, ``[ROWS, hidden]``."""
        if name not in self._rows:
            found = self.model.model.get_image_features(pixel_values=pixels(name), return_dict=True).pooler_output
            self._rows[name] = torch.cat(list(found)).reshape(ROWS, -1)
        return self._rows[name]

    def put(self, engine: Engine, names: str = "abc") -> None:
        for name in names:
            engine.core.scheduler.media.put(name.encode() * 32, StepEmbedding(ROWS, self.rows(name)))

    @torch.no_grad()
    def tokens(self, sight: Sight, count: int) -> list[int]:
        ids = torch.tensor([sight.prompt])
        more = {"pixel_values": torch.cat([pixels(name) for name in sight.pictures])} if sight.pictures else {}
        out = self.model.generate(
            input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=count, do_sample=False,
            eos_token_id=None, pad_token_id=0, **more,
        )  # fmt: skip
        return out[0, len(sight.prompt) :].tolist()  # type: ignore[no-any-return]
