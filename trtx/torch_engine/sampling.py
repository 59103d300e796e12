"""How one request is sampled and when it ends, with TensorRT-LLM's field names."""

from __future__ import annotations

import math
import os
from dataclasses import MISSING, dataclass, field, fields
from typing import Any

GREEDY_CHOICES_VARIABLE = "TLLM_ALLOW_N_GREEDY_DECODING"
"""TensorRT-LLM's own switch: n > 1 without randomness yields n equal choices, which is refused unless it is set."""

# Field -> the values that mean "not asked for". Whatever else is set would change the answer, so it is refused by name.
_UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "bad": (None, []),
    "bad_token_ids": (None, []),
    "top_p_min": (None,),
    "top_p_reset_ids": (None,),
    "top_p_decay": (None,),
    "no_repeat_ngram_size": (None, 0),
    "prompt_ignore_length": (None, 0),
    "use_beam_search": (False,),
    "beam_search_diversity_rate": (None,),
    "beam_width_array": (None,),
    "return_context_logits": (False,),
    "return_generation_logits": (False,),
    "return_encoder_output": (False,),
    "exclude_input_from_output": (True,),
    "additional_model_outputs": (None, []),
    "embedding_bias": (None,),
    "logits_processor": (None, []),
    "apply_batched_logits_processor": (False,),
    "lookahead_config": (None,),
    "guided_decoding": (None,),
    "logprobs_mode": (None, "RAW", "raw"),
    "logprobs_simple_format": (False,),
    "prompt_logprobs_simple_format": (False,),
}


@dataclass(slots=True, kw_only=True)
class SamplingParams:
    """TensorRT-LLM's ``SamplingParams``. Raises ValueError naming the field, its value and what it takes.

    Greedy unless one of ``temperature``, ``top_k`` and ``top_p`` is set. ``temperature`` 0 and ``top_k`` 1 are greedy
    too; ``top_k`` 0 means all. Change a copy with ``dataclasses.replace``, which checks again.
    """

    end_id: int | None = None  # None: the model's own end-of-sequence ids
    pad_id: int | None = None  # the torch engine does not pad: accepted, without effect
    max_tokens: int = 32
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

    logprobs: int | None = None  # how many alternatives per generated token, the chosen one always among them
    prompt_logprobs: int | None = None
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
        self._check_integers()
        self._check_numbers()
        stops = [self.stop] if isinstance(self.stop, str) else list(self.stop or ())
        if not all(isinstance(stop, str) and stop for stop in stops):
            raise ValueError(f"SamplingParams.stop is {self.stop!r}; expected non-empty strings")
        self._stop_strings = tuple(stops)
        self._check_choices()
        for name, harmless in _UNSUPPORTED.items():
            value = getattr(self, name)
            if not any(value is allowed or (type(value) is type(allowed) and value == allowed) for allowed in harmless):
                raise ValueError(
                    f"SamplingParams.{name} is {value!r}, which the torch engine does not support; "
                    "leave it out, or use the tensorrt-llm engine"
                )

    def _check_integers(self) -> None:
        for name, low in (
            ("max_tokens", 1),
            ("min_tokens", 0),
            ("truncate_prompt_tokens", 1),
            ("top_k", 0),
            ("seed", 0),
            ("n", 1),
            ("best_of", 1),
            ("logprobs", 0),
            ("prompt_logprobs", 0),
        ):
            value = getattr(self, name)
            if value is None and name not in ("max_tokens", "n"):
                continue
            if not isinstance(value, int) or isinstance(value, bool) or value < low:
                raise ValueError(f"SamplingParams.{name} is {value!r}; expected an integer of at least {low}")

    def _check_numbers(self) -> None:
        for name, low, high in (
            ("temperature", 0.0, math.inf),
            ("top_p", 0.0, 1.0),
            ("min_p", 0.0, 1.0),
            ("presence_penalty", -math.inf, math.inf),
            ("frequency_penalty", -math.inf, math.inf),
            ("repetition_penalty", 0.0, math.inf),
        ):
            value = getattr(self, name)
            if value is None:
                continue
            number = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
            if not number or not low <= value <= high:
                bounds = "a finite number" if low == -math.inf else f"a finite number from {low:g} to {high:g}"
                raise ValueError(f"SamplingParams.{name} is {value!r}; expected {bounds}")
        if self.repetition_penalty == 0:
            raise ValueError("SamplingParams.repetition_penalty is 0; expected more than 0, 1 means no penalty")

    def _check_choices(self) -> None:
        if self.min_tokens is not None and self.min_tokens > self.max_tokens:
            raise ValueError(
                f"SamplingParams.min_tokens is {self.min_tokens}; expected at most max_tokens, here {self.max_tokens}"
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

    def asked(self) -> dict[str, Any]:
        """The fields that differ from their defaults: what travels to the engine's process."""
        return {name: value for name, default in _DEFAULTS if (value := getattr(self, name)) != default}


_DEFAULTS: tuple[tuple[str, Any], ...] = tuple(
    (f.name, f.default) for f in fields(SamplingParams) if f.init and f.default is not MISSING
)
