"""Dynamo's request, a plain dict, becomes one checked value with the LLM API's names.

The keys are those that the 1.4.2 frontend sends (``PreprocessedRequest``), each of them in the table of ``fields``.
Values outside their range are refused here with field, value and range: an engine would refuse them later and less
clearly, or not at all.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from dynamo.common.backend.health_check import is_probe

from trtx.engine.api import Hints
from trtx.errors import TrtxError
from trtx.worker import fields

_SEED_LIMIT = 2**63


class InvalidRequest(TrtxError):
    """The client's fault: the message names field, value and range, and reaches the client."""


@dataclass(frozen=True, slots=True)
class WorkerRequest:
    """What one request asks for. ``sampling`` holds keyword arguments of the LLM API's ``SamplingParams``."""

    token_ids: list[int]
    sampling: dict[str, Any]
    max_tokens: int  # clamped to what is left of the context, >= 1
    min_tokens: int
    stop_strings: tuple[str, ...]
    includes_stop_string: bool  # in the text that the client gets
    skip_special_tokens: bool  # in the text that the worker makes, where it looks for stop strings
    wants_logprobs: bool
    cache_salt: str | None
    trace_headers: dict[str, str] | None
    hints: Hints


def parse(
    request: Mapping[str, Any], *, context_length: int, trace_headers: dict[str, str] | None = None
) -> WorkerRequest:
    """Checks ``request`` and resolves its defaults; raises InvalidRequest.

    ``context_length`` counts prompt and output tokens together. The frontend refuses a prompt that is longer, but
    not ``max_tokens`` past the context, and sends None where the client gave none: both mean the rest of it.
    """
    for sentence in fields.refusals(request):
        raise InvalidRequest(sentence)
    token_ids = list(request.get("token_ids") or ())
    if not token_ids:
        raise InvalidRequest("the prompt has no tokens; send at least one")
    room = context_length - len(token_ids)
    if room < 1:
        raise InvalidRequest(
            f"the prompt has {len(token_ids)} tokens and the context holds {context_length} together with the output; "
            f"send at most {context_length - 1}"
        )
    stops = request.get("stop_conditions") or {}
    options = request.get("sampling_options") or {}
    outputs = request.get("output_options") or {}
    _refuse_lost_prompt_logprobs(request)
    max_tokens = _integer("max_tokens", stops.get("max_tokens"), low=1)
    max_tokens = room if max_tokens is None else min(max_tokens, room)
    sampling = {
        **_sampling(options),
        **_stops(stops, request.get("eos_token_ids") or (), max_tokens),
        **_outputs(outputs),
        "max_tokens": max_tokens,
        # The frontend makes text from token ids, and the worker itself finds stop strings in it (see chunks). Given to
        # TensorRT-LLM they would be matched as token sequences: text that is spelled with other tokens runs on, and a
        # beginning of one is streamed before it is known to be none.
        "detokenize": False,
        "return_perf_metrics": True,
    }
    routing = request.get("routing") or {}
    return WorkerRequest(
        token_ids=token_ids,
        sampling=sampling,
        max_tokens=max_tokens,
        min_tokens=sampling.get("min_tokens", 0),
        stop_strings=_stop_strings(stops.get("stop")),
        includes_stop_string=bool(options.get("include_stop_str_in_output")),
        skip_special_tokens=outputs.get("skip_special_tokens") is not False,  # the frontend's default as well
        wants_logprobs="logprobs" in sampling,
        cache_salt=_cache_salt(request),
        trace_headers=trace_headers,
        hints=Hints(
            priority=1.0 if is_probe(request) else _priority(routing.get("priority")),
            dp_rank=routing.get("dp_rank"),
            conversation_id=(request.get("agent_context") or {}).get("session_id") or None,
        ),
    )


def _refuse_lost_prompt_logprobs(request: Mapping[str, Any]) -> None:
    """The 1.4.2 frontend shows them in ``nvext`` alone and when asked to (ai-dynamo/dynamo #13941); else they would be
    computed and dropped. Its ``echo`` arrives as nothing but them."""
    count = (request.get("output_options") or {}).get("prompt_logprobs")
    nvext = (request.get("extra_args") or {}).get("nvext") or {}
    if count is not None and not {"prompt_logprobs", "engine_data"} & set(nvext.get("extra_fields") or ()):
        raise InvalidRequest(
            f"prompt_logprobs is {count}, and the frontend would drop them; send nvext with extra_fields "
            '["prompt_logprobs"] as well, and leave echo out, which asks for them and is not served'
        )


def _sampling(options: Mapping[str, Any]) -> dict[str, Any]:
    """Temperature to penalties. Absent fields stay absent: the engine's own defaults hold."""
    temperature = _number("temperature", options.get("temperature"), 0.0, 100.0)
    top_k = _integer("top_k", options.get("top_k"), low=-1)
    sampling = {
        # The LLM API decodes greedily when none of the three is set; OpenAI's default is temperature 1.
        "temperature": 1.0 if temperature is None else temperature,
        "top_p": _number("top_p", options.get("top_p"), 0.0, 1.0),
        "top_k": 0 if top_k == -1 else top_k,  # -1: OpenAI's habit for "all"; the LLM API says 0
        "min_p": _number("min_p", options.get("min_p"), 0.0, 1.0),
        "presence_penalty": _number("presence_penalty", options.get("presence_penalty"), -2.0, 2.0),
        "frequency_penalty": _number("frequency_penalty", options.get("frequency_penalty"), -2.0, 2.0),
        "repetition_penalty": _number("repetition_penalty", options.get("repetition_penalty"), 0.01, 100.0),
        "seed": _integer("seed", options.get("seed"), low=-_SEED_LIMIT, high=_SEED_LIMIT - 1),
    }
    seed = sampling["seed"]
    if isinstance(seed, int) and seed < 0:
        sampling["seed"] = seed + 2 * _SEED_LIMIT  # OpenAI's seed is signed, the engines' is not: one to one
    return {name: value for name, value in sampling.items() if value is not None}


def _stops(stops: Mapping[str, Any], eos_token_ids: Any, max_tokens: int) -> dict[str, Any]:
    """What ends a request beside its length: end-of-sequence ids, the client's stop ids, and what holds them off."""
    ignore_eos = bool(stops.get("ignore_eos"))
    eos = [int(i) for i in eos_token_ids]
    stop_ids = {int(i) for i in stops.get("stop_token_ids") or ()}
    stop_ids.update(int(i) for i in stops.get("stop_token_ids_hidden") or ())
    stop_ids.update(eos[1:])
    result: dict[str, Any] = {}
    if ignore_eos:
        result["ignore_eos"] = True
    elif eos:
        result["end_id"] = eos[0]
        stop_ids.discard(eos[0])
    if stop_ids:
        result["stop_token_ids"] = sorted(stop_ids)
    min_tokens = _integer("min_tokens", stops.get("min_tokens"), low=0)
    if min_tokens:
        result["min_tokens"] = min(min_tokens, max_tokens)
    return result


def _outputs(outputs: Mapping[str, Any]) -> dict[str, Any]:
    logprobs = _integer("logprobs", outputs.get("logprobs"), low=0, high=20)
    result = {
        # 0 asks for the chosen token's alone, and TensorRT-LLM takes 0 for none at all.
        "logprobs": None if logprobs is None else max(1, logprobs),
        "prompt_logprobs": _integer("prompt_logprobs", outputs.get("prompt_logprobs"), low=0, high=20),
    }
    return {name: value for name, value in result.items() if value is not None}


def _stop_strings(value: Any) -> tuple[str, ...]:
    strings = (value,) if isinstance(value, str) else tuple(value or ())
    for string in strings:
        if not isinstance(string, str) or not string:
            raise InvalidRequest(f"stop contains {string!r}, expected strings of at least one character")
    return strings


def _cache_salt(request: Mapping[str, Any]) -> str | None:
    """Equal prompts with different salts never share KV blocks. The frontend puts it among the routing hints."""
    salt = (request.get("routing") or {}).get("cache_salt")
    return str(salt) if salt else None


def _priority(hint: Any) -> float | None:
    """A client's hint, any integer, higher first, on the LLM API's scale from 0 to 1."""
    return None if not isinstance(hint, (int, float)) else min(1.0, max(0.0, float(hint)))


def _number(name: str, value: Any, low: float, high: float) -> float | None:
    """A float in ``[low, high]``. The wire is float32 (0.7 arrives as 0.699999988): 7 digits are all it holds."""
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise InvalidRequest(f"{name} is {value!r}, expected a number from {low:g} to {high:g}")
    rounded = float(f"{value:.7g}")
    if not math.isfinite(rounded) or not low <= rounded <= high:
        raise InvalidRequest(f"{name} is {rounded:g}, expected a number from {low:g} to {high:g}")
    return rounded


def _integer(name: str, value: Any, *, low: int, high: int | None = None) -> int | None:
    if value is None:
        return None
    span = f"at least {low}" if high is None else f"from {low} to {high}"
    if isinstance(value, bool) or not isinstance(value, int):
        raise InvalidRequest(f"{name} is {value!r}, expected an integer {span}")
    if value < low or (high is not None and value > high):
        raise InvalidRequest(f"{name} is {value}, expected an integer {span}")
    return value
