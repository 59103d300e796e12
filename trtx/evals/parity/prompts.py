"""The prompts: of mixed lengths, half of them in families with a shared prefix, and some that will be cancelled."""

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

_FAMILY = 4  # prompts per family
_COMPARED_PER_CANCELLED = 4


@dataclass(frozen=True, slots=True)
class RequestShape:
    """Parameters of a run's requests."""

    prompts: int  # number to compare, in addition to those that are cancelled
    longest: int  # maximum tokens of a prompt
    osl: int  # tokens of every answer
    seed: int


def ordinary_ids(model_path: Path) -> tuple[int, ...]:
    """The vocabulary's token ids for text, without added tokens such as end and control tokens.

    Raises UsageError without a readable ``tokenizer.json``.
    """
    try:
        tokenizer: Any = load_decoder(model_path)
    except UsageError as error:
        raise UsageError(
            f"parity draws its prompts from the vocabulary, so it needs the model's tokenizer.json ({error})"
        ) from error
    added = set(tokenizer.get_added_tokens_decoder())
    return tuple(sorted(set(tokenizer.get_vocab(with_added_tokens=False).values()) - added))


def make_prompts(ids: Sequence[int], shape: RequestShape) -> tuple[Prompt, ...]:
    """The prompts in the order of sending. Equal shapes and ids give equal prompts.

    Lengths are log-uniform from 1 to the maximum, so that there are prompts without a full KV block, with a partial one
    and with many. Every second prompt belongs to a family that shares a prefix of up to three quarters of the maximum.
    Half of each kind requests log-probabilities of its prompt, for which an engine computes the whole prompt without
    reuse.
    """
    draw = random.Random(shape.seed)
    prompts: list[Prompt] = []
    begun: tuple[int, ...] = ()  # prefix of the current family
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
