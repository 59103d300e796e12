"""What the trainings share: how a run is suspended, resumed and saved, and the steps of its optimizers."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

log = logging.getLogger("training")


def encoder(tokenizer: Any) -> Callable[[str], list[int]]:
    """Returns a function that encodes text without special tokens, faster than transformers does."""
    backend = tokenizer.backend_tokenizer

    def encode(text: str) -> list[int]:
        ids: list[int] = backend.encode(text, add_special_tokens=False).ids
        return ids

    return encode


@dataclass(frozen=True, slots=True)
class Spent:
    """Time and tokens spent on all steps so far, over all runs. ``tokens``: the tokens with a loss."""

    seconds: float = 0.0
    cpu_seconds: float = 0.0
    tokens: int = 0


Optimizers = tuple[tuple[torch.optim.Optimizer, float], ...]


def suspend(state: Path, model: Any, optimizers: Optimizers, step: int, spent: Spent) -> None:
    """Writes the training state to a file atomically."""
    part = state.with_suffix(".part")
    held = {
        "model": model.state_dict(),
        "optimizers": [optimizer.state_dict() for optimizer, _ in optimizers],
        "step": step,
        "spent": asdict(spent),
    }
    torch.save(held, part)
    part.replace(state)


def resume(state: Path, model: Any, optimizers: Optimizers) -> tuple[int, Spent]:
    """Restores the state of an interrupted run, if there is one.

    Returns the next step, and the time and tokens of the previous ones.
    """
    if not state.exists():
        return 0, Spent()
    held = torch.load(state, map_location="cpu")
    model.load_state_dict(held["model"])
    for (optimizer, _), one in zip(optimizers, held["optimizers"], strict=True):
        optimizer.load_state_dict(one)
    log.info("goes on from step %d of %s", held["step"], state)
    return held["step"], Spent(**held["spent"])


def set_rates(optimizers: Optimizers, share: float) -> None:
    """Sets each learning rate to ``share`` of its peak."""
    for optimizer, peak in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = peak * share


def descend(model: Any, optimizers: Optimizers, loss: torch.Tensor) -> None:
    """One step of all optimizers, down the gradient of ``loss``."""
    model.zero_grad(set_to_none=True)
    loss.backward()  # type: ignore[no-untyped-call]
    for optimizer, _ in optimizers:
        optimizer.step()


def save(model: Any, out: Path) -> None:
    """Writes bfloat16 safetensors with Hugging Face tensor names; the tied head is not stored twice."""
    from safetensors.torch import save_file

    state = {name: value.detach().bfloat16().cpu().contiguous() for name, value in model.state_dict().items()}
    state.pop("lm_head.weight", None)
    path = out / "model.safetensors"
    save_file(state, path, metadata={"format": "pt"})
    path.chmod(0o644)
