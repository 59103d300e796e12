"""Sampling parameters and end conditions of a request, with TensorRT-LLM's field names.

Each field of TensorRT-LLM's ``SamplingParams`` is one row of the class below: how the torch engine and the paced engine
use it, and which values it accepts. A value that would change the answer is never ignored: if an engine can't apply it
exactly, it is refused. :func:`resolve_sampling` turns all fields into the single form in which they travel to the
engine.
"""
# ruff: noqa: RUF009  # each row is a call that makes a dataclasses.field

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from enum import Enum
from typing import Any, Literal

from trtx.torch_engine.llmapi.guided_decoding import GuidedDecodingParams, guided_decoding
from trtx.torch_engine.llmapi.processors import logits_processors
from trtx.torch_engine.llmapi.values import (
    MAX_TOKEN_ID,
    Unsuitable,
    count_or_flag,
    flag,
    integer,
    number,
    only,
    shown,
    strings,
    token_ids,
)
from trtx.torch_engine.sampling_plan import LARGEST_FLOAT, MOST_TOKENS, SMALLEST_FLOAT, SamplingPlan

GREEDY_CHOICES_VARIABLE = "TLLM_ALLOW_N_GREEDY_DECODING"
"""TensorRT-LLM's own switch: n > 1 without randomness yields n equal choices, which is refused unless it is set."""
MAX_CHOICES = 1024
"""Limit of ``n``: each choice is a separate sequence and sends the whole prompt to the engine."""


class FieldUse(Enum):
    """How an engine uses a field."""

    HONOURED = "honoured"
    WITHOUT_EFFECT = "without effect"  # no value could change the answer
    REFUSED = "refused"  # it would change the answer and this engine can't apply it: only neutral values pass


@dataclass(frozen=True, slots=True)
class SamplingField:
    """``check`` returns the value in its plain Python type, or raises ``Unsuitable``. Every engine calls it first."""

    torch: FieldUse
    paced: FieldUse
    check: Callable[[Any], Any]


def _honoured(check: Callable[[Any], Any], default: Any = None, *, paced: FieldUse = FieldUse.HONOURED) -> Any:
    return field(default=default, metadata={"field": SamplingField(FieldUse.HONOURED, paced, check)})


def _without_effect(check: Callable[[Any], Any], default: Any = None) -> Any:
    return field(
        default=default, metadata={"field": SamplingField(FieldUse.WITHOUT_EFFECT, FieldUse.WITHOUT_EFFECT, check)}
    )


def _refused(default: Any, *harmless: Any) -> Any:
    """``harmless``: neutral values besides the default."""
    refuses = only(default, *harmless)
    return field(default=default, metadata={"field": SamplingField(FieldUse.REFUSED, FieldUse.REFUSED, refuses)})


_NOT_DRAWN = FieldUse.WITHOUT_EFFECT  # the paced engine's tokens come from a clock, without sampling or probabilities
_NOT_MADE = FieldUse.REFUSED


@dataclass(slots=True, kw_only=True)
class SamplingParams:
    """TensorRT-LLM's ``SamplingParams``. Raises ValueError with the field, its value and the accepted values.

    Greedy unless ``temperature``, ``top_k`` or ``top_p`` is set. ``temperature`` 0 and ``top_k`` 1 are greedy too;
    ``top_k`` 0 means all. Each request validates the fields again, since they can be assigned to.
    """

    # ends
    end_id: int | None = _honoured(integer(-1, MAX_TOKEN_ID))  # None: the model's own end-of-sequence ids
    pad_id: int | None = _without_effect(integer(-1, MAX_TOKEN_ID))  # nothing is padded
    max_tokens: int | None = _honoured(integer(1), 32)  # None: the rest of the context
    min_tokens: int | None = _honoured(integer(0))
    stop: str | list[str] | None = _honoured(strings)
    stop_token_ids: list[int] | None = _honoured(token_ids)
    include_stop_str_in_output: bool = _honoured(flag, False)
    bad: str | list[str] | None = _refused(None, [])
    bad_token_ids: list[int] | None = _refused(None, [])
    ignore_eos: bool = _honoured(flag, False)
    truncate_prompt_tokens: int | None = _honoured(integer(1))  # keep this many of the prompt's last tokens

    # sampling
    temperature: float | None = _honoured(number(0.0), paced=_NOT_DRAWN)
    top_k: int | None = _honoured(integer(0), paced=_NOT_DRAWN)
    top_p: float | None = _honoured(number(0.0, 1.0), paced=_NOT_DRAWN)
    top_p_min: float | None = _refused(None)
    top_p_reset_ids: int | None = _refused(None)
    top_p_decay: float | None = _refused(None)
    min_p: float | None = _honoured(number(0.0, 1.0), paced=_NOT_DRAWN)
    seed: int | None = _honoured(integer(0, 2**64 - 1), paced=_NOT_DRAWN)  # None: drawn at admission

    # penalties
    repetition_penalty: float | None = _honoured(number(0.0, above=True), paced=_NOT_DRAWN)
    presence_penalty: float | None = _honoured(number(), paced=_NOT_DRAWN)
    frequency_penalty: float | None = _honoured(number(), paced=_NOT_DRAWN)
    prompt_ignore_length: int | None = _refused(None, 0)
    no_repeat_ngram_size: int | None = _refused(None, 0)
    length_penalty: float | None = _without_effect(number())  # of beam search, which is refused
    early_stopping: int | None = _without_effect(integer(0))  # of beam search, which is refused

    # choices
    n: int = _honoured(integer(1, MAX_CHOICES, optional=False), 1, paced=_NOT_MADE)
    best_of: int | None = _honoured(integer(1, MAX_CHOICES), paced=_NOT_MADE)  # the n likeliest of so many are returned
    use_beam_search: bool = _refused(False)
    beam_search_diversity_rate: float | None = _refused(None)
    beam_width_array: list[int] | None = _refused(None)

    # outputs
    logprobs: int | bool | None = _honoured(count_or_flag, paced=_NOT_MADE)  # top tokens besides the chosen one
    prompt_logprobs: int | bool | None = _honoured(count_or_flag, paced=_NOT_MADE)
    logprobs_mode: Any = _refused("RAW", "raw", None)
    logprobs_simple_format: bool = _refused(False)
    prompt_logprobs_simple_format: bool = _refused(False)
    return_context_logits: bool = _refused(False)
    return_generation_logits: bool = _refused(False)
    return_encoder_output: bool = _refused(False)
    exclude_input_from_output: bool = _refused(True)
    return_perf_metrics: bool = _without_effect(flag, False)  # metrics are always present
    additional_model_outputs: list[str] | None = _refused(None, [])

    # hooks
    embedding_bias: Any = _refused(None)
    logits_processor: Any = _honoured(logits_processors, paced=_NOT_MADE)  # one or a list, called in its order
    apply_batched_logits_processor: bool = _honoured(flag, False, paced=_NOT_MADE)  # after the request's own
    lookahead_config: Any = _refused(None)
    guided_decoding: GuidedDecodingParams | None = _honoured(guided_decoding, paced=_NOT_MADE)

    # text
    detokenize: bool = _honoured(flag, True)
    add_special_tokens: bool = _honoured(flag, True, paced=FieldUse.WITHOUT_EFFECT)  # its prompts are token ids
    skip_special_tokens: bool = _honoured(flag, True)
    spaces_between_special_tokens: bool = _without_effect(flag, True)  # fast tokenizers have no such switch

    def __post_init__(self) -> None:
        self.check()

    def check(self) -> None:
        """Validates every field and stores it in its plain form: numpy numbers as Python's, logprobs True as 1."""
        for name, known in FIELDS.items():
            value = getattr(self, name)
            if value is _DEFAULTS[name]:
                continue  # most are: checking all fields twice took a fifth of a request's cost here
            try:
                plain = known.check(value)
            except Unsuitable as error:
                raise ValueError(f"SamplingParams.{name} is {shown(value)}; expected {error}") from None
            if plain is not value:
                setattr(self, name, plain)
        self._check_choices()

    def _check_choices(self) -> None:
        if self.min_tokens is not None and self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise ValueError(
                f"SamplingParams.min_tokens is {shown(self.min_tokens)}; expected at most max_tokens, "
                f"here {shown(self.max_tokens)}"
            )
        if self.best_of is not None and self.best_of < self.n:
            raise ValueError(f"SamplingParams.best_of is {self.best_of}; expected at least n, which is {self.n}")
        if self.num_sequences > 1 and self.is_greedy and os.environ.get(GREEDY_CHOICES_VARIABLE) != "1":
            raise ValueError(
                f"SamplingParams asks for {self.num_sequences} choices without randomness, which would all be equal; "
                f"set temperature, top_k or top_p, or {GREEDY_CHOICES_VARIABLE}=1"
            )

    @property
    def num_sequences(self) -> int:
        """Number of sequences that are generated, of which the ``n`` likeliest are returned."""
        return max(self.n, self.best_of or self.n)

    @property
    def selects(self) -> bool:
        """Whether only some of the generated sequences are returned."""
        return self.num_sequences > self.n

    @property
    def processors(self) -> list[Callable[..., None]]:
        """The request's own logits processors."""
        given = self.logits_processor
        return given if isinstance(given, list) else [] if given is None else [given]

    @property
    def is_greedy(self) -> bool:
        if self.temperature is None and self.top_k is None and self.top_p is None:
            return True
        return self.temperature == 0 or self.top_k == 1 or self.top_p == 0

    @property
    def stop_strings(self) -> tuple[str, ...]:
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())


FIELDS: Mapping[str, SamplingField] = {row.name: row.metadata["field"] for row in fields(SamplingParams)}
_DEFAULTS = {row.name: row.default for row in fields(SamplingParams)}


def checked_sampling(params: SamplingParams | None, engine: Literal["torch", "paced"] = "torch") -> SamplingParams:
    """Validates again, as fields can be assigned to. None: the defaults. Raises ValueError."""
    if params is None:
        return SamplingParams()
    if not isinstance(params, SamplingParams):
        raise ValueError(f"sampling_params is {shown(params)}; expected SamplingParams or None")
    params.check()
    if engine == "paced":
        for name, known in FIELDS.items():
            value = getattr(params, name)
            if name == "best_of" and value == params.n:
                continue  # the same as its default
            if known.paced is FieldUse.REFUSED and known.torch is not FieldUse.REFUSED and value != _DEFAULTS[name]:
                raise ValueError(
                    f"SamplingParams.{name} is {shown(value)}; expected {_DEFAULTS[name]}: the paced engine makes one "
                    "choice without logits; leave it out, or use the torch engine"
                )
    return params


def resolve_sampling(params: SamplingParams, choice: int = 0, model_end_ids: tuple[int, ...] = ()) -> SamplingPlan:
    """Resolves the parameters of choice number ``choice``. ``params`` must have passed their own check.

    ``model_end_ids`` end the choice unless the request sets its own. Numbers beyond float32 act like its largest or
    smallest value; limits beyond a context act like its length.
    """
    return SamplingPlan(
        is_greedy=params.is_greedy,
        temperature=1.0 if params.temperature is None else params.temperature,
        top_k=min(params.top_k or 0, MOST_TOKENS),
        top_p=1.0 if params.top_p is None else params.top_p,
        min_p=params.min_p or 0.0,
        repetition_penalty=(
            1.0
            if params.repetition_penalty is None
            else _within(params.repetition_penalty, SMALLEST_FLOAT, LARGEST_FLOAT)
        ),
        presence_penalty=_within(params.presence_penalty or 0.0, -LARGEST_FLOAT, LARGEST_FLOAT),
        frequency_penalty=_within(params.frequency_penalty or 0.0, -LARGEST_FLOAT, LARGEST_FLOAT),
        seed=None if params.seed is None else (params.seed + choice) % 2**64,
        max_tokens=min(params.max_tokens or MOST_TOKENS, MOST_TOKENS),
        min_tokens=min(params.min_tokens or 0, MOST_TOKENS),
        end_ids=_end_ids(params, model_end_ids),
        stop_ids=tuple(params.stop_token_ids or ()),
        keeps_stop_id=params.include_stop_str_in_output,
        logprobs=_logprobs(params),
        prompt_logprobs=None if params.prompt_logprobs is None else int(params.prompt_logprobs),
        grammar=None if params.guided_decoding is None else params.guided_decoding.resolved(),
        applies_batched=params.apply_batched_logits_processor,
    )


def _logprobs(params: SamplingParams) -> int | None:
    """Returns the number of top tokens to report for each token. Selecting sequences needs the logprobs of their own
    tokens.
    """
    if params.logprobs is None:
        return 0 if params.selects else None
    return int(params.logprobs)


def _end_ids(params: SamplingParams, model_end_ids: tuple[int, ...]) -> tuple[int, ...]:
    if params.ignore_eos or params.end_id == -1:  # TensorRT-LLM's other way to set ignore_eos
        return ()
    return model_end_ids if params.end_id is None else (params.end_id,)


def _within(value: float, low: float, high: float) -> float:
    return min(max(value, low), high)
