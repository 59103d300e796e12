"""``SamplingParams`` resolved once, in the caller's process: the one form in which they cross to the engine."""

from __future__ import annotations

from dataclasses import dataclass

MOST_TOKENS = 2**31 - 1  # more than any context and any vocabulary has
LARGEST_FLOAT = 3.4028234663852886e38  # the largest finite float32, as penalised logits are clamped to
SMALLEST_FLOAT = 1.1754943508222875e-38  # the smallest normal float32


@dataclass(frozen=True, slots=True)
class SamplingPlan:
    """Every None of the request replaced by the value that changes nothing, every number one that a step can use."""

    is_greedy: bool = True
    temperature: float = 1.0
    top_k: int = 0  # 0: all
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int | None = None  # below 2**64; None: one is drawn at admission
    max_tokens: int = MOST_TOKENS  # the engine clamps it to what is left of the context
    min_tokens: int = 0
    stop_ids: tuple[int, ...] = ()
    keeps_stop_id: bool = False  # in the client's tokens
    logprobs: int | None = None  # how many beside the chosen token; None: not asked for
    prompt_logprobs: int | None = None

    @property
    def has_penalties(self) -> bool:
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0

    @property
    def is_plain(self) -> bool:
        """The argmax of the model's logits is the answer, unless ids are banned."""
        return self.is_greedy and not self.has_penalties
