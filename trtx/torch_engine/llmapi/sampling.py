"""How one request is sampled and when it ends, with TensorRT-LLM's field names."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import Any

from trtx.torch_engine.llmapi.sampling_fields import FIELDS, Unsuitable, shown

GREEDY_CHOICES_VARIABLE = "TLLM_ALLOW_N_GREEDY_DECODING"
"""TensorRT-LLM's own switch: n > 1 without randomness yields n equal choices, which is refused unless it is set."""


@dataclass(slots=True, kw_only=True)
class SamplingParams:
    """TensorRT-LLM's ``SamplingParams``. Raises ValueError naming the field, its value and what it takes.

    Greedy unless one of ``temperature``, ``top_k`` and ``top_p`` is set. ``temperature`` 0 and ``top_k`` 1 are greedy
    too; ``top_k`` 0 means all. What each field does and takes is in ``sampling_fields``. A request checks them again:
    they may have been assigned to.
    """

    end_id: int | None = None  # None: the model's own end-of-sequence ids
    pad_id: int | None = None  # the torch engine does not pad: accepted, without effect
    max_tokens: int | None = 32  # None: the rest of the context
    min_tokens: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool = False
    bad: str | list[str] | None = None
    bad_token_ids: list[int] | None = None
    ignore_eos: bool = False
    truncate_prompt_tokens: int | None = None  # keep this many of the prompt's last tokens

    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    top_p_min: float | None = None
    top_p_reset_ids: int | None = None
    top_p_decay: float | None = None
    min_p: float | None = None
    seed: int | None = None  # None: one is drawn at admission

    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    prompt_ignore_length: int | None = None
    no_repeat_ngram_size: int | None = None
    length_penalty: float | None = None  # of beam search, which is refused: without effect
    early_stopping: int | None = None  # of beam search, which is refused: without effect

    n: int = 1
    best_of: int | None = None
    use_beam_search: bool = False
    beam_search_diversity_rate: float | None = None
    beam_width_array: list[int] | None = None

    logprobs: int | bool | None = None  # how many alternatives per generated token, the chosen one always among them
    prompt_logprobs: int | bool | None = None
    logprobs_mode: Any = "RAW"
    logprobs_simple_format: bool = False
    prompt_logprobs_simple_format: bool = False
    return_context_logits: bool = False
    return_generation_logits: bool = False
    return_encoder_output: bool = False
    exclude_input_from_output: bool = True
    return_perf_metrics: bool = False
    additional_model_outputs: list[str] | None = None

    embedding_bias: Any = None
    logits_processor: Any = None
    apply_batched_logits_processor: bool = False
    lookahead_config: Any = None
    guided_decoding: Any = None

    detokenize: bool = True
    add_special_tokens: bool = True
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True

    _stop_strings: tuple[str, ...] = field(init=False, repr=False, compare=False, default=())

    def __post_init__(self) -> None:
        self.check()

    def check(self) -> None:
        """Checks every field and takes it in its plain form: numpy's numbers as Python's, logprobs True as 1."""
        for name, known in FIELDS.items():
            value = getattr(self, name)
            try:
                plain = known.check(value)
            except Unsuitable as error:
                raise ValueError(f"SamplingParams.{name} is {shown(value)}; expected {error}") from None
            if plain is not value:
                setattr(self, name, plain)
        self._stop_strings = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())
        self._check_choices()

    def _check_choices(self) -> None:
        if self.min_tokens is not None and self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise ValueError(
                f"SamplingParams.min_tokens is {shown(self.min_tokens)}; expected at most max_tokens, "
                f"here {shown(self.max_tokens)}"
            )
        if self.best_of is not None and self.best_of != self.n:
            raise ValueError(
                f"SamplingParams.best_of is {self.best_of}; expected n, which is {self.n}: "
                "the torch engine returns every choice that it runs"
            )
        if self.n > 1 and self.is_greedy and os.environ.get(GREEDY_CHOICES_VARIABLE) != "1":
            raise ValueError(
                f"SamplingParams asks for {self.n} choices without randomness, which would all be equal; "
                f"set temperature, top_k or top_p, or {GREEDY_CHOICES_VARIABLE}=1"
            )

    @property
    def is_greedy(self) -> bool:
        if self.temperature is None and self.top_k is None and self.top_p is None:
            return True
        return self.temperature == 0 or self.top_k == 1 or self.top_p == 0

    @property
    def stop_strings(self) -> tuple[str, ...]:
        return self._stop_strings


def checked_sampling(params: SamplingParams | None) -> SamplingParams:
    """Checked once more, as its fields may have been assigned to; None: the defaults. Raises ValueError."""
    if params is None:
        return SamplingParams()
    if not isinstance(params, SamplingParams):
        raise ValueError(f"sampling_params is {shown(params)}; expected SamplingParams or None")
    params.check()
    return params
