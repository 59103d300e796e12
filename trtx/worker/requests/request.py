"""Converts Dynamo's request, a plain dict, into one validated value with the LLM API's names.

The keys are those that Dynamo's frontend sends (``PreprocessedRequest``); each is in the table of ``fields``. Values
out of range are refused here with field, value and range. An engine would refuse them later and less clearly, or not at
all.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from dynamo.common.backend.health_check import is_probe

from trtx.engine.api import Hints, MediaSpan, ReadyPrompt, stretch
from trtx.worker.requests import fields
from trtx.worker.requests.grammars import RequestGrammar, read_grammar
from trtx.worker.requests.invalid_request import InvalidRequest
from trtx.worker.requests.values import InvalidValue

DEFAULT_RETENTION = 35
"""Retention priority of KV for which no request asked for another, as in TensorRT-LLM."""

if TYPE_CHECKING:
    from trtx.worker.multimodal.images import Picture


@dataclass(frozen=True, slots=True)
class WorkerRequest:
    """One parsed request.

    ``sampling`` holds keyword arguments of the LLM API's ``SamplingParams``. It always contains ``max_tokens``, which
    is at least 1 and clamped to the rest of the context. ``media`` says which of ``token_ids`` are placeholders of
    ``pictures``; see :func:`with_media`.
    """

    token_ids: list[int]
    received_tokens: int  # length of the prompt that the frontend sent
    sampling: dict[str, Any]
    stop_strings: tuple[str, ...]
    includes_stop_string: bool  # whether the client's text includes the stop string
    skip_special_tokens: bool  # for the text that the worker makes when it looks for stop strings
    wants_logprobs: bool
    cache_salt: str | None
    trace_headers: dict[str, str] | None
    hints: Hints
    wants_engine_data: bool = False  # the client gets the worker's engine_data
    media: tuple[MediaSpan, ...] = ()
    pictures: tuple[Picture, ...] = ()  # images and videos in the order of sent_media
    # the prompt as the KV router hashes it, if that is known to differ from token_ids
    routing_token_ids: tuple[int, ...] | None = None
    ready: ReadyPrompt | None = None  # the prompt as prepared by an engine that preprocesses images itself
    grammar: RequestGrammar | None = None  # of the answer
    min_tokens: int = (
        0  # as the client sent it; in ``sampling`` it is at most max_tokens, which is 1 on a prefill worker
    )
    # reason for a refusal that must wait until the engine has the request, because a prefill worker keeps its KV until
    # then
    contradiction: str = ""


def parse(
    request: Mapping[str, Any],
    *,
    context_length: int,
    trace_headers: dict[str, str] | None = None,
    sees: bool = False,
    hands_off: bool = False,
) -> WorkerRequest:
    """Validates ``request`` and resolves its defaults. Raises InvalidRequest.

    ``context_length`` counts prompt and output tokens together. The frontend refuses longer prompts, but not a
    ``max_tokens`` beyond the context, and sends None if the client gave none; in both cases the rest of the context is
    used. ``sees``: this worker takes images, each of which has one placeholder in the prompt so far; see
    :func:`with_media`. ``hands_off``: this is a prefill worker, for which Dynamo has set ``max_tokens`` to 1.

    A fault that only a decode worker can see is returned in ``contradiction`` instead of raised, because the prefill
    worker keeps the request's KV until the engine on decode has received the request.
    """
    for sentence in fields.refusals(request, sees=sees):
        raise InvalidRequest(sentence)
    token_ids = list(request.get("token_ids") or ())
    if not token_ids:
        raise InvalidRequest("the prompt has no tokens; send at least one")
    room = room_of(len(token_ids), context_length)
    stops = request.get("stop_conditions") or {}
    options = request.get("sampling_options") or {}
    outputs = request.get("output_options") or {}
    _refuse_lost_prompt_logprobs(request)
    try:
        sampling = _sampling(request)
    except InvalidValue as error:
        raise InvalidRequest(str(error)) from error
    contradiction = "" if hands_off else _contradiction(sampling)
    if contradiction and not request.get("prefill_result"):
        raise InvalidRequest(contradiction)
    sampling["max_tokens"] = min(sampling.get("max_tokens", room), room)
    if min_tokens := sampling.pop("min_tokens", 0):
        sampling["min_tokens"] = min(min_tokens, sampling["max_tokens"])
    sampling |= {
        **_stops(stops, request.get("eos_token_ids") or ()),
        # The frontend makes text from token ids, and the worker itself finds stop strings in it (see chunks).
        # TensorRT-LLM would match them as token sequences: it would miss text that is tokenized differently, and would
        # stream the beginning of a stop string before it knows whether the rest follows.
        "detokenize": False,
        "return_perf_metrics": True,
    }
    routing = request.get("routing") or {}
    stop_strings = _stop_strings(stops.get("stop"))
    return WorkerRequest(
        token_ids=token_ids,
        received_tokens=len(token_ids),
        sampling=sampling,
        stop_strings=stop_strings,
        grammar=read_grammar(request, stop_strings),
        min_tokens=min_tokens,
        includes_stop_string=bool(options.get("include_stop_str_in_output")),
        skip_special_tokens=outputs.get("skip_special_tokens") is not False,  # same default as the frontend
        wants_logprobs="logprobs" in sampling,
        cache_salt=_cache_salt(request),
        trace_headers=trace_headers,
        wants_engine_data="engine_data" in _extra_fields(request),
        hints=Hints(
            priority=1.0 if is_probe(request) else _priority(routing.get("priority")),
            dp_rank=routing.get("dp_rank"),
            conversation_id=(request.get("agent_context") or {}).get("session_id") or None,
            retention_priority=None if is_probe(request) else _retention(routing.get("priority")),
        ),
        contradiction=contradiction,
    )


def with_media(
    request: WorkerRequest,
    token_ids: list[int],
    media: Sequence[MediaSpan],
    *,
    pictures: Sequence[Picture],
    context_length: int,
    routing: Mapping[str, Any] | None = None,
) -> WorkerRequest:
    """``request`` with the prompt expanded for its images. Raises InvalidRequest if the prompt is too long.

    ``routing`` is Dynamo's ``mm_routing_info``. For models whose processor it knows, the frontend computes the image
    positions itself; its token ids are used if they have the same length.
    """
    room = room_of(len(token_ids), context_length, stretch(media))
    known = (routing or {}).get("routing_token_ids") or ()
    length = (routing or {}).get("expanded_prompt_len")
    is_known = length == len(token_ids) <= len(known)
    return replace(
        _clamped(request, room),
        token_ids=token_ids,
        media=tuple(media),
        pictures=tuple(pictures),
        routing_token_ids=tuple(known[:length]) if is_known else None,
    )


def with_ready(
    request: WorkerRequest, token_ids: list[int], *, context_length: int, ready: ReadyPrompt | None = None
) -> WorkerRequest:
    """``request`` with the prompt that the engine, or a prefill worker's engine, made of it and its images.

    Raises InvalidRequest if the prompt is too long.
    """
    return replace(_clamped(request, room_of(len(token_ids), context_length)), token_ids=token_ids, ready=ready)


def _clamped(request: WorkerRequest, room: int) -> WorkerRequest:
    sampling = dict(request.sampling, max_tokens=min(request.sampling["max_tokens"], room))
    if "min_tokens" in sampling:
        sampling["min_tokens"] = min(sampling["min_tokens"], sampling["max_tokens"])
    return replace(request, sampling=sampling)


def room_of(tokens: int, context_length: int, stretched: int = 0) -> int:
    """Maximum number of output tokens for a prompt of ``tokens`` tokens. Raises InvalidRequest if it is below 1.

    ``stretched``: positions that media take in addition to their tokens.
    """
    room = context_length - tokens - stretched
    if room < 1 and stretched:
        raise InvalidRequest(
            f"the prompt has {tokens} tokens and a video in it plays for {stretched} positions more, and the "
            f"context holds {context_length} together with the output; send a shorter video"
        )
    if room < 1:
        raise InvalidRequest(
            f"the prompt has {tokens} tokens and the context holds {context_length} together with the output; "
            f"send at most {context_length - 1}"
        )
    return room


def _refuse_lost_prompt_logprobs(request: Mapping[str, Any]) -> None:
    """Raises InvalidRequest for prompt log-probabilities that the frontend would drop after they were computed.

    Dynamo's frontend returns them only in ``nvext`` and only on request (ai-dynamo/dynamo #13941). Of OpenAI's
    ``echo``, they are all that reaches a worker.
    """
    count = (request.get("output_options") or {}).get("prompt_logprobs")
    if count is not None and not {"prompt_logprobs", "engine_data"} & _extra_fields(request):
        raise InvalidRequest(
            f"prompt_logprobs is {count}, and the frontend would drop them. Send nvext with extra_fields "
            '["prompt_logprobs"] as well, and leave out echo, which is not served'
        )


def _extra_fields(request: Mapping[str, Any]) -> set[str]:
    """The ``nvext`` fields that the client wants in addition to the answer."""
    nvext = (request.get("extra_args") or {}).get("nvext") or {}
    return set(nvext.get("extra_fields") or ())


def _sampling(request: Mapping[str, Any]) -> dict[str, Any]:
    """The sampling fields for the engine. Absent fields stay absent, so that the engine's own defaults apply."""
    # The LLM API decodes greedily if temperature, top_k and top_p are unset; OpenAI's default is temperature 1.
    found: dict[str, Any] = {"temperature": 1.0}
    for section, rows in fields.FIELDS.items():
        values = request.get(section) or {}
        for name, field in rows.items():
            if field.read is not None and values.get(name) is not None:
                found[name] = field.read(name, values[name])
    return found


def _contradiction(sampling: Mapping[str, Any]) -> str:
    """The reason to refuse a ``min_tokens`` above ``max_tokens``, or "".

    TensorRT-LLM would generate ``max_tokens`` tokens; vLLM and the torch engine refuse. If the client gave no
    ``max_tokens``, the context bounds both.
    """
    min_tokens, max_tokens = sampling.get("min_tokens", 0), sampling.get("max_tokens")
    if max_tokens is None or min_tokens <= max_tokens:
        return ""
    return f"min_tokens is {min_tokens}, expected at most max_tokens, which is {max_tokens}; change one of them"


def _stops(stops: Mapping[str, Any], eos_token_ids: Any) -> dict[str, Any]:
    """The tokens that end a request: the client's stop ids and, unless ``ignore_eos`` is set, the end-of-sequence ids.

    ``stop_token_ids_hidden`` are end-of-sequence ids that the frontend adds.
    """
    stop_ids = {int(i) for i in stops.get("stop_token_ids") or ()}
    result: dict[str, Any] = {}
    if stops.get("ignore_eos"):
        result["ignore_eos"] = True
    else:
        eos = [int(i) for i in eos_token_ids]
        stop_ids.update(int(i) for i in stops.get("stop_token_ids_hidden") or ())
        stop_ids.update(eos[1:])
        if eos:
            result["end_id"] = eos[0]
            stop_ids.discard(eos[0])
    if stop_ids:
        result["stop_token_ids"] = sorted(stop_ids)
    return result


def _stop_strings(value: Any) -> tuple[str, ...]:
    strings = (value,) if isinstance(value, str) else tuple(value or ())
    for string in strings:
        if not isinstance(string, str) or not string:
            raise InvalidRequest(f"stop contains {string!r}, expected strings of at least one character")
    return strings


def _cache_salt(request: Mapping[str, Any]) -> str | None:
    """The cache salt, which the frontend sends among the routing hints.

    Prompts with different salts never share KV blocks.
    """
    salt = (request.get("routing") or {}).get("cache_salt")
    return str(salt) if salt else None


def _priority(hint: Any) -> float | None:
    """The client's priority hint (any integer, higher is more urgent) clamped to the LLM API's range from 0 to 1."""
    return None if not isinstance(hint, (int, float)) else min(1.0, max(0.0, float(hint)))


def _retention(hint: Any) -> int | None:
    """The client's priority hint, converted to the retention priority of the request's KV. A hint of 0 gives the
    default.

    TensorRT-LLM's range is from 0 to 100.
    """
    return None if not isinstance(hint, (int, float)) else round(min(100.0, max(0.0, DEFAULT_RETENTION + hint)))
