"""What is sent: prompts of mixed lengths, half of them in families that begin alike, and some to be cancelled."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trtx.errors import UsageError
from trtx.evals.parity.forms import Prompt
from trtx.text import load_decoder

_FAMILY = 4  # prompts that begin alike
_COMPARED_PER_CANCELLED = 4


@dataclass(frozen=True, slots=True)
class Shape:
    """Of all requests of a run."""

    prompts: int  # that are compared; those to be cancelled come on top
    longest: int  # tokens of a prompt, at most
    osl: int  # tokens of every answer
    seed: int


def ordinary_ids(model_path: Path) -> tuple[int, ...]:
    """The token ids of a checkpoint's vocabulary that are text: none of those added to it, which end or steer.

    Raises UsageError where it has no ``tokenizer.json`` that can be read.
    """
    try:
        tokenizer: Any = load_decoder(model_path)
    except UsageError as error:
        raise UsageError(
            f"parity makes its prompts of token ids: bring the model's tokenizer.json ({error})"
        ) from error
    added = set(tokenizer.get_added_tokens_decoder())
    return tuple(sorted(set(tokenizer.get_vocab(with_added_tokens=False).values()) - added))


def make_prompts(ids: Sequence[int], shape: Shape) -> tuple[Prompt, ...]:
    """In the order in which they are sent. Equal shapes and ids give equal prompts.

    Lengths are log-uniform from 1 to the longest, so that blocks are empty, part full and many. Every second prompt is
    of a family whose members share up to three quarters of the longest. Every second one of each kind asks for its
    prompt's log-probabilities, for which an engine computes the whole prompt and reuses none of it.
    """
    draw = random.Random(shape.seed)
    prompts: list[Prompt] = []
    begun: tuple[int, ...] = ()  # of the family that grows
    families = 0

    def tokens(most: int) -> tuple[int, ...]:
        count = min(most, max(1, round(math.exp(draw.uniform(0, math.log(most + 0.5))))))
        return tuple(draw.choices(ids, k=count))

    for number in range(shape.prompts):
        if number % (2 * _FAMILY) == 0 and shape.longest >= _FAMILY:
            begun = tuple(draw.choices(ids, k=draw.randint(shape.longest // 4, 3 * shape.longest // 4)))
            families += 1
        is_kin = bool(begun) and number % 2 == 0
        own = begun + tokens(shape.longest - len(begun)) if is_kin else tokens(shape.longest)
        family = families - 1 if is_kin else None
        prompts.append(Prompt(len(prompts), own, family, asks_prompt_logprobs=number % 4 < 2, cancel_after=None))
        if number % _COMPARED_PER_CANCELLED == _COMPARED_PER_CANCELLED - 1:
            after = draw.choice((0, 0, 1, max(1, shape.osl // 4), max(1, shape.osl // 2)))
            left = begun + tokens(shape.longest - len(begun))
            kin = families - 1 if begun else None
            prompts.append(Prompt(len(prompts), left, kin, asks_prompt_logprobs=False, cancel_after=after))
    return tuple(prompts)
