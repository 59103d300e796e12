"""Draft models of a known acceptance rate: the target model with noise in its weights."""

from __future__ import annotations

from pathlib import Path

import torch
from runner_player import VOCAB, save
from tokenizers import Tokenizer, models
from transformers import PreTrainedModel

NOISE = 0.03  # relative to the weights of the target model: about half of the drafted tokens are then right


def with_tokenizer(directory: Path, first: str = "t") -> Path:
    words = {f"{first}{at}": at for at in range(VOCAB)}
    Tokenizer(models.WordLevel(words, unk_token=f"{first}0")).save(str(directory / "tokenizer.json"))
    return directory


def save_noisy(model: PreTrainedModel, directory: Path) -> Path:
    """Writes ``model`` with noise in its weights, and a tokenizer. Changes the weights of ``model``."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * NOISE * parameter.std())
    return with_tokenizer(save(model, directory))
