"""``SamplingParams`` resolved once, when a sequence takes its slot, so that a step only looks at flags."""

from __future__ import annotations

from dataclasses import dataclass

from trtx.torch_engine.batch import ScheduledSequence
from trtx.torch_engine.sampling import SamplingParams


@dataclass(frozen=True, slots=True)
class SamplingPlan:
    """Every None of the request replaced by the value that changes nothing."""

    is_greedy: bool
    temperature: float
    top_k: int  # 0: all
    top_p: float
    min_p: float
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    min_tokens: int
    logprobs: int | None  # how many beside the chosen token; None: not asked for
    prompt_logprobs: int | None

    @property
    def has_penalties(self) -> bool:
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0

    @property
    def is_plain(self) -> bool:
        """The argmax of the model's logits is the answer, once ``min_tokens`` is reached."""
        return self.is_greedy and not self.has_penalties

    def bans_stops(self, sequence: ScheduledSequence) -> bool:
        return bool(sequence.allowed_stop_ids) and len(sequence.output_token_ids) < self.min_tokens


def resolve_sampling(params: SamplingParams) -> SamplingPlan:
    """``params`` was validated by its own class."""
    return SamplingPlan(
        is_greedy=params.is_greedy,
        temperature=1.0 if params.temperature is None else params.temperature,
        top_k=params.top_k or 0,
        top_p=1.0 if params.top_p is None else params.top_p,
        min_p=params.min_p or 0.0,
        repetition_penalty=1.0 if params.repetition_penalty is None else params.repetition_penalty,
        presence_penalty=params.presence_penalty or 0.0,
        frequency_penalty=params.frequency_penalty or 0.0,
        min_tokens=params.min_tokens or 0,
        logprobs=params.logprobs,
        prompt_logprobs=params.prompt_logprobs,
    )
