"""Every field of TensorRT-LLM's ``SamplingParams``: what this engine does with it, and which values it takes.

A field is in exactly one of three states, and ``SamplingParams`` has no other. What an engine could not do exactly is
refused: a value that changes the answer is never dropped.
"""

from __future__ import annotations

import math
import reprlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum
from numbers import Integral, Real
from typing import Any

MAX_CHOICES = 1024
"""``n``: each choice is a sequence of its own, and carries the whole prompt to the engine."""
MAX_LOGPROBS = 1024
"""Alternatives a token. All of a vocabulary would be 150,000 objects a token, made in everybody's step."""
MAX_STOP_STRINGS = 64
MAX_STOP_STRING_LENGTH = 256
"""Characters. Every new token is compared with all of them, in the one thread that hands out everybody's tokens: at
both limits up to 1.3 ms of it a token, measured on one core of an AMD EPYC."""
MAX_TOKEN_ID = 2**31 - 1
"""Ids are 32-bit on every device; which of them a model has, its engine says."""


class Use(Enum):
    HONOURED = "honoured"
    WITHOUT_EFFECT = "without effect"  # whatever it is, it could not change the answer
    REFUSED = "refused"  # it would change the answer, and this engine can't


class Unsuitable(ValueError):
    """What was expected instead."""


@dataclass(frozen=True, slots=True)
class Field:
    """``check`` returns the value in its plain Python type (numpy's numbers become int and float)."""

    use: Use
    check: Callable[[Any], Any]


def shown(value: Any) -> str:
    """A value for a message: short, whatever it is."""
    try:
        text = _SHORT.repr(value)
    except ValueError:  # Python writes out no integer of more than 4,300 digits
        return f"an integer of {value.bit_length()} bits" if isinstance(value, int) else f"a {type(value).__name__}"
    return text if len(text) <= _LONGEST_SHOWN else f"{text[:_LONGEST_SHOWN]}..."


_LONGEST_SHOWN = 200
_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxother = 80


def integer(low: int, high: int | None = None, *, optional: bool = True) -> Callable[[Any], int | None]:
    expected = f"an integer of at least {low}" if high is None else f"an integer from {low} to {high}"

    def check(value: Any) -> int | None:
        if value is None and optional:
            return None
        if isinstance(value, bool) or not isinstance(value, Integral):
            raise Unsuitable(expected)
        number = int(value)
        if number < low or (high is not None and number > high):
            raise Unsuitable(expected)
        return number

    return check


def _count_or_flag(value: Any) -> int | None:
    """TensorRT-LLM's examples write True for 1; False asks for nothing."""
    if isinstance(value, bool):
        return 1 if value else None
    return _COUNT(value)


_COUNT = integer(0, MAX_LOGPROBS)


def number(low: float = -math.inf, high: float = math.inf, *, above: bool = False) -> Callable[[Any], float | None]:
    """Finite numbers; with ``above``, ``low`` itself is none of them."""
    bounds = ""
    if low > -math.inf:
        bounds = f" above {low:g}" if above else f" from {low:g} to {high:g}"
    expected = f"a finite number{bounds}"

    def check(value: Any) -> float | None:
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, Real):
            raise Unsuitable(expected)
        try:
            given = float(value)
        except OverflowError:
            raise Unsuitable(expected) from None
        if not math.isfinite(given) or not low <= given <= high or (above and given == low):
            raise Unsuitable(expected)
        return given

    return check


def _flag(value: Any) -> bool:
    if not isinstance(value, bool):
        raise Unsuitable("True or False")
    return value


def _token_ids(value: Any) -> list[int] | None:
    if value is None:
        return None
    expected = f"a list of token ids from 0 to {MAX_TOKEN_ID}"
    if not isinstance(value, (list, tuple, set, frozenset)):
        raise Unsuitable(expected)
    try:
        return [_TOKEN_ID(token_id) for token_id in value]  # type: ignore[misc]  # not optional: never None
    except Unsuitable:
        raise Unsuitable(expected) from None


_TOKEN_ID = integer(0, MAX_TOKEN_ID, optional=False)


def _strings(value: Any) -> Any:
    """A string or a list of them, as it was given."""
    if value is None:
        return None
    strings = [value] if isinstance(value, str) else value
    fits = isinstance(strings, (list, tuple)) and len(strings) <= MAX_STOP_STRINGS
    if not fits or not all(isinstance(s, str) and 0 < len(s) <= MAX_STOP_STRING_LENGTH and is_text(s) for s in strings):
        raise Unsuitable(
            f"at most {MAX_STOP_STRINGS} non-empty strings of at most {MAX_STOP_STRING_LENGTH} characters each"
        )
    return value if isinstance(value, str) else list(strings)


def is_text(string: str) -> bool:
    """Unicode text: no surrogates, which no tokenizer and no wire takes."""
    return string.isascii() or not any("\ud800" <= character <= "\udfff" for character in string)


def _only(*harmless: Any) -> Callable[[Any], Any]:
    def check(value: Any) -> Any:
        if any(value is allowed or (type(value) is type(allowed) and value == allowed) for allowed in harmless):
            return value
        raise Unsuitable(
            f"{harmless[0]!r}: the torch engine does not support it; leave it out, or use the tensorrt-llm engine"
        )

    return check


def _honoured(check: Callable[[Any], Any]) -> Field:
    return Field(Use.HONOURED, check)


def _without_effect(check: Callable[[Any], Any]) -> Field:
    return Field(Use.WITHOUT_EFFECT, check)


def _refused(*harmless: Any) -> Field:
    return Field(Use.REFUSED, _only(*harmless))


FIELDS: Mapping[str, Field] = {
    # ends
    "end_id": _honoured(integer(-1, MAX_TOKEN_ID)),
    "pad_id": _without_effect(integer(-1, MAX_TOKEN_ID)),  # nothing is padded
    "max_tokens": _honoured(integer(1)),
    "min_tokens": _honoured(integer(0)),
    "stop": _honoured(_strings),
    "stop_token_ids": _honoured(_token_ids),
    "include_stop_str_in_output": _honoured(_flag),
    "bad": _refused(None, []),
    "bad_token_ids": _refused(None, []),
    "ignore_eos": _honoured(_flag),
    "truncate_prompt_tokens": _honoured(integer(1)),
    # sampling
    "temperature": _honoured(number(0.0)),
    "top_k": _honoured(integer(0)),
    "top_p": _honoured(number(0.0, 1.0)),
    "top_p_min": _refused(None),
    "top_p_reset_ids": _refused(None),
    "top_p_decay": _refused(None),
    "min_p": _honoured(number(0.0, 1.0)),
    "seed": _honoured(integer(0, 2**64 - 1)),
    # penalties
    "repetition_penalty": _honoured(number(0.0, above=True)),
    "presence_penalty": _honoured(number()),
    "frequency_penalty": _honoured(number()),
    "prompt_ignore_length": _refused(None, 0),
    "no_repeat_ngram_size": _refused(None, 0),
    "length_penalty": _without_effect(number()),  # of beam search, which is refused
    "early_stopping": _without_effect(integer(0)),  # of beam search, which is refused
    # choices
    "n": _honoured(integer(1, MAX_CHOICES, optional=False)),
    "best_of": _honoured(integer(1, MAX_CHOICES)),
    "use_beam_search": _refused(False),
    "beam_search_diversity_rate": _refused(None),
    "beam_width_array": _refused(None),
    # outputs
    "logprobs": _honoured(_count_or_flag),
    "prompt_logprobs": _honoured(_count_or_flag),
    "logprobs_mode": _refused("RAW", "raw", None),
    "logprobs_simple_format": _refused(False),
    "prompt_logprobs_simple_format": _refused(False),
    "return_context_logits": _refused(False),
    "return_generation_logits": _refused(False),
    "return_encoder_output": _refused(False),
    "exclude_input_from_output": _refused(True),
    "return_perf_metrics": _without_effect(_flag),  # they are always there
    "additional_model_outputs": _refused(None, []),
    # hooks
    "embedding_bias": _refused(None),
    "logits_processor": _refused(None, []),
    "apply_batched_logits_processor": _refused(False),
    "lookahead_config": _refused(None),
    "guided_decoding": _refused(None),
    # text
    "detokenize": _honoured(_flag),
    "add_special_tokens": _honoured(_flag),
    "skip_special_tokens": _honoured(_flag),
    "spaces_between_special_tokens": _without_effect(_flag),  # fast tokenizers have no such switch
}
