"""``SamplingParams`` resolved once, in the caller's process: the one form in which they reach the engine."""

from __future__ import annotations

from dataclasses import dataclass

from trtx.torch_engine.llmapi.sampling import SamplingParams

_MOST = 2**31 - 1  # of tokens: more than any context and any vocabulary has
_LARGEST = 3.4028234663852886e38  # the largest finite float32, as penalised logits are clamped to
_SMALLEST = 1.1754943508222875e-38  # the smallest normal float32


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
    max_tokens: int = _MOST  # the engine clamps it to what is left of the context
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


def resolve_sampling(params: SamplingParams, choice: int = 0) -> SamplingPlan:
    """For choice number ``choice`` of the request; ``params`` have passed their own check.

    What lies beyond a float32 acts as its largest or smallest does, as far beyond a context as the context's length.
    """
    return SamplingPlan(
        is_greedy=params.is_greedy,
        temperature=1.0 if params.temperature is None else params.temperature,
        top_k=min(params.top_k or 0, _MOST),
        top_p=1.0 if params.top_p is None else params.top_p,
        min_p=params.min_p or 0.0,
        repetition_penalty=(
            1.0 if params.repetition_penalty is None else _within(params.repetition_penalty, _SMALLEST, _LARGEST)
        ),
        presence_penalty=_within(params.presence_penalty or 0.0, -_LARGEST, _LARGEST),
        frequency_penalty=_within(params.frequency_penalty or 0.0, -_LARGEST, _LARGEST),
        seed=None if params.seed is None else (params.seed + choice) % 2**64,
        max_tokens=min(params.max_tokens or _MOST, _MOST),
        min_tokens=min(params.min_tokens or 0, _MOST),
        stop_ids=tuple(params.stop_token_ids or ()),
        keeps_stop_id=params.include_stop_str_in_output,
        logprobs=None if params.logprobs is None else int(params.logprobs),
        prompt_logprobs=None if params.prompt_logprobs is None else int(params.prompt_logprobs),
    )


def _within(value: float, low: float, high: float) -> float:
    return min(max(value, low), high)
