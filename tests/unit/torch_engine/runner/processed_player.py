"""Logits processors without state, and an engine that serves requests with and without them."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import torch
from engine_player import Answer, Engine, Wish, workload

from trtx.torch_engine.core.logits_processors import LoadedProcessors
from trtx.torch_engine.messages import Submit
from trtx.torch_engine.runner import TorchRunner


class Among:
    """Allows a few tokens, which depend on all tokens so far."""

    def __init__(self, salt: int, count: int = 7) -> None:
        self.salt, self.count = salt, count

    def allowed(self, tokens: list[int], vocab: int) -> list[int]:
        dice = random.Random(f"{self.salt} {tokens}")
        return sorted(dice.sample(range(vocab), self.count))

    def __call__(self, req_id: int, logits: torch.Tensor, token_ids: list[list[int]], *_: object) -> None:
        allowed = self.allowed(token_ids[0], logits.shape[-1])
        kept = logits[..., allowed].clone()
        logits.fill_(-torch.inf)
        logits[..., allowed] = kept


def processed_workload(seed: int) -> tuple[list[Wish], dict[int, Among]]:
    """Requests of every kind that are never aborted, and the processors of about half of them, by request."""
    wishes = [replace(wish, aborts=None) for wish in workload(seed, count=9)]
    dice = random.Random(seed)
    return wishes, {at: Among(at) for at in range(len(wishes)) if dice.random() < 0.5}


def served_processed(
    runner: TorchRunner, wishes: list[Wish], hooks: dict[int, Any], *, overlap: bool, step_tokens: int = 24
) -> tuple[dict[int, Answer], int]:
    """(answers, steps in which a preempted sequence waited)"""
    engine = Engine(runner, overlap=overlap, step_tokens=step_tokens)
    for step in range(wishes[-1].arrives + 1):
        for at, wish in enumerate(wishes):
            if wish.arrives == step:
                own = LoadedProcessors((hooks[at],) if at in hooks else ())
                engine.core.submit(Submit(at, wish.prompt, wish.plan), own)
        engine.step()
    engine.finish()
    return engine.answers, engine.paused
