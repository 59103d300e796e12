"""Two checkpoints of one config with different weights, and what shows with which of them a runner computes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from runner_player import Player, build, random_prompt, save

from trtx.torch_engine.llmapi.sampling import SamplingParams
from trtx.torch_engine.step import ModelRunner

PROMPTS = [random_prompt(length, length) for length in (3, 20, 41)]


def logprobs(one: ModelRunner) -> list[list[Any]]:
    """Greedy tokens with their log-probabilities, so that each weight counts."""
    player = Player(one)
    playing = [player.add(prompt, room=8, sampling=SamplingParams(logprobs=2)) for prompt in PROMPTS]
    player.finish(playing, 8)
    return [[result.logprobs for result in each.results] for each in playing]


def pair_of(family: str, directory: Path) -> tuple[Path, Path]:
    model = build(family)
    first = save(model, directory / "first")
    mirror(model)
    return first, save(model, directory / "second")


def mirror(model: torch.nn.Module) -> None:
    """Gives every tensor other values, each tensor the values that it has now."""
    with torch.no_grad():
        for weight in model.parameters():
            weight.copy_(weight.flip(0))
