"""Resolved ``SamplingParams``: the caller's process resolves them once and sends them to the engine in this form."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

MOST_TOKENS = 2**31 - 1  # larger than any context or vocabulary
LARGEST_FLOAT = 3.4028234663852886e38  # the largest finite float32; penalised logits are clamped to it
SMALLEST_FLOAT = 1.1754943508222875e-38  # the smallest normal float32


GrammarKind = Literal["json", "regex", "grammar", "structural_tag"]


@dataclass(frozen=True, slots=True)
class Grammar:
    """What a sequence's text must match (guided decoding).

    ``text``: a JSON schema, a regular expression, a context-free grammar (Lark or GBNF), or the JSON text of structural
    tags, as ``kind`` says. With ``after``, the grammar holds only for the text after that token, which ends the model's
    thinking. ``opens``: the token that begins thinking; a sequence may sample it in place of the grammar's first token.
    """

    kind: GrammarKind
    text: str
    after: int | None = None  # None: the grammar holds from the first token on
    opens: int | None = None


@dataclass(frozen=True, slots=True)
class SamplingPlan:
    """Sampling parameters with all defaults filled in with neutral values, and all numbers clamped to usable ranges."""

    is_greedy: bool = True
    temperature: float = 1.0
    top_k: int = 0  # 0: all
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int | None = None  # below 2**64; None: drawn at admission
    max_tokens: int = MOST_TOKENS  # the engine clamps it to the rest of the context
    min_tokens: int = 0
    end_ids: tuple[int, ...] = ()  # kept in the output, as on TensorRT-LLM's pytorch backend
    stop_ids: tuple[int, ...] = ()
    keeps_stop_id: bool = False  # keep a stop token id in the output
    logprobs: int | None = None  # number of top tokens besides the sampled one; None: no logprobs
    prompt_logprobs: int | None = None
    grammar: Grammar | None = None
    applies_batched: bool = False  # the engine's batched logits processor edits the logits

    @property
    def has_penalties(self) -> bool:
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0

    @property
    def is_plain(self) -> bool:
        """True if the next token is the argmax of the raw logits, apart from banned ids."""
        return self.is_greedy and not self.has_penalties
