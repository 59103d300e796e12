"""Dynamo's test hook for logits processors: with ``DYN_ENABLE_TEST_LOGITS_PROCESSOR=1``, all answers are one text.

``python -m dynamo.trtllm`` 1.6.1 has the same hook, and no other way for a request to name a logits processor.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from trtx.text import Tokenizer

if TYPE_CHECKING:
    import torch

VARIABLE = "DYN_ENABLE_TEST_LOGITS_PROCESSOR"
TEXT = "Hello world!"


@dataclass(frozen=True, slots=True)
class ForcedText:
    """The tokens of every answer, and the token that ends it."""

    token_ids: tuple[int, ...]
    end_id: int

    @classmethod
    def of(
        cls, environment: Mapping[str, str], tokenizer: Tokenizer | None, end_ids: Sequence[int]
    ) -> ForcedText | None:
        """The text of Dynamo's hook; None if it is off, or if the model has no tokenizer or no end token."""
        if environment.get(VARIABLE) != "1" or tokenizer is None or not end_ids:
            return None
        return cls(tuple(tokenizer.encode(TEXT, add_special_tokens=False).ids), end_ids[0])

    def after(self, prompt_tokens: int) -> ForcedTokens:
        """The logits processor of a request whose prompt has ``prompt_tokens`` tokens."""
        return ForcedTokens(self, prompt_tokens)


@dataclass(frozen=True, slots=True)
class ForcedTokens:
    """A logits processor without state, so that prefill and decode workers continue each other's text."""

    text: ForcedText
    prompt_tokens: int

    def __call__(
        self,
        req_id: int,
        logits: torch.Tensor,
        token_ids: list[list[int]],
        stream_ptr: int | None = None,
        client_id: int | None = None,
    ) -> None:
        """Leaves one token in ``logits`` [1, 1, vocab]."""
        at = len(token_ids[0]) - self.prompt_tokens
        wanted = self.text.token_ids[at] if at < len(self.text.token_ids) else self.text.end_id
        kept = logits[..., wanted].clone()
        logits.fill_(-math.inf)
        logits[..., wanted] = kept
