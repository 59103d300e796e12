"""Dynamo's request, a plain dict, becomes one checked value with the LLM API's names.

The keys are those that the 1.4.2 frontend sends (``PreprocessedRequest``), each of them in the table of ``fields``.
Values outside their range are refused here with field, value and range: an engine would refuse them later and less
clearly, or not at all.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from dynamo.common.backend.health_check import is_probe

from trtx.engine.api import Hints, MediaSpan, ReadyPrompt, stretch
from trtx.worker.requests import fields
from trtx.worker.requests.invalid_request import InvalidRequest
from trtx.worker.requests.values import Unsuitable

if TYPE_CHECKING:
    from trtx.worker.multimodal.images import Picture


@dataclass(frozen=True, slots=True)
class WorkerRequest:
    """What one request asks for. ``sampling`` holds keyword arguments of the LLM API's ``SamplingParams``; of them
    ``max_tokens`` is always there, 1 at least and clamped to what is left of the context.

    ``media`` says which of ``token_ids`` are placeholders of ``pictures``: see :func:`with_media`."""

    token_ids: list[int]
    received_tokens: int  # of the prompt, as the frontend sent it
    sampling: dict[str, Any]
    stop_strings: tuple[str, ...]
    includes_stop_string: bool  # in the text that the client gets
    skip_special_tokens: bool  # in the text that the worker makes, where it looks for stop strings
    wants_logprobs: bool
    cache_salt: str | None
    trace_headers: dict[str, str] | None
    hints: Hints
    wants_engine_data: bool = False  # the frontend hands on what the worker says beside the answer
    media: tuple[MediaSpan, ...] = ()
    pictures: tuple[Picture, ...] = ()  # and videos, as the request brought them
    routing_token_ids: tuple[int, ...] | None = None  # by which a KV router knows this prompt; None: by its own
    ready: ReadyPrompt | None = None  # what an engine that prepares pictures itself made of ``token_ids`` and these
    has_moved: bool = False  # another worker gave tokens of the answer, which are the end of the prompt
    contradiction: str = ""  # why it is refused once the engine has it: a prefill worker keeps its KV until then


def parse(
    request: Mapping[str, Any],
    *,
    context_length: int,
    trace_headers: dict[str, str] | None = None,
    sees: bool = False,
    hands_off: bool = False,
) -> WorkerRequest:
    """Checks ``request`` and resolves its defaults; raises InvalidRequest.

    ``context_length`` counts prompt and output tokens together. The frontend refuses a prompt that is longer, but
    not ``max_tokens`` past the context, and sends None where the client gave none: both mean the rest of it.
    ``sees``: this worker takes images; each has one placeholder in the prompt yet, see :func:`with_media`.
    ``hands_off``: a prefill worker, of whose requests Dynamo has made ``max_tokens`` 1.

    What only a decode worker can see, whose prefill worker keeps KV for the request until it hears of it, is not raised
    but stands in ``contradiction``.
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
    except Unsuitable as error:
        raise InvalidRequest(str(error)) from error
    has_moved = _has_moved(request)
    contradiction = "" if hands_off or has_moved else _contradiction(sampling)
    if contradiction and not request.get("prefill_result"):
        raise InvalidRequest(contradiction)
    sampling["max_tokens"] = min(sampling.get("max_tokens", room), room)
    if min_tokens := sampling.pop("min_tokens", 0):
        sampling["min_tokens"] = min(min_tokens, sampling["max_tokens"])
    sampling |= {
        **_stops(stops, request.get("eos_token_ids") or ()),
        # The frontend makes text from token ids, and the worker itself finds stop strings in it (see chunks). Given to
        # TensorRT-LLM they would be matched as token sequences: text that is spelled with other tokens runs on, and a
        # beginning of one is streamed before it is known to be none.
        "detokenize": False,
        "return_perf_metrics": True,
    }
    routing = request.get("routing") or {}
    return WorkerRequest(
        token_ids=token_ids,
        received_tokens=len(token_ids),
        sampling=sampling,
        stop_strings=_stop_strings(stops.get("stop")),
        includes_stop_string=bool(options.get("include_stop_str_in_output")),
        skip_special_tokens=outputs.get("skip_special_tokens") is not False,  # the frontend's default as well
        wants_logprobs="logprobs" in sampling,
        cache_salt=_cache_salt(request),
        trace_headers=trace_headers,
        wants_engine_data="engine_data" in _extra_fields(request),
        hints=Hints(
            priority=1.0 if is_probe(request) else _priority(routing.get("priority")),
            dp_rank=routing.get("dp_rank"),
            conversation_id=(request.get("agent_context") or {}).get("session_id") or None,
        ),
        has_moved=has_moved,
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
    """``request`` with the prompt that its pictures' embeddings make. Raises InvalidRequest where it is too long.

    ``routing``: Dynamo's ``mm_routing_info``, whose frontend computes the places of pictures itself where it knows the
    model's processor; used where it came to the same length.
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
    """``request`` with the prompt that the engine, or a prefill worker's, made of it and its pictures. Raises
    InvalidRequest where it is too long."""
    return replace(_clamped(request, room_of(len(token_ids), context_length)), token_ids=token_ids, ready=ready)


def _clamped(request: WorkerRequest, room: int) -> WorkerRequest:
    sampling = dict(request.sampling, max_tokens=min(request.sampling["max_tokens"], room))
    if "min_tokens" in sampling:
        sampling["min_tokens"] = min(sampling["min_tokens"], sampling["max_tokens"])
    return replace(request, sampling=sampling)


def room_of(tokens: int, context_length: int, stretched: int = 0) -> int:
    """Tokens that the answer to a prompt of so many may have. ``stretched``: positions that media take beyond their
    tokens. Raises InvalidRequest where it may have none."""
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
    """The 1.4.2 frontend shows them in ``nvext`` alone and when asked to (ai-dynamo/dynamo #13941); else they would be
    computed and dropped. Its ``echo`` arrives as nothing but them."""
    count = (request.get("output_options") or {}).get("prompt_logprobs")
    if count is not None and not {"prompt_logprobs", "engine_data"} & _extra_fields(request):
        raise InvalidRequest(
            f"prompt_logprobs is {count}, and the frontend would drop them; send nvext with extra_fields "
            '["prompt_logprobs"] as well, and leave echo out, which asks for them and is not served'
        )


def _extra_fields(request: Mapping[str, Any]) -> set[str]:
    """What the client asked the frontend for beside the answer."""
    nvext = (request.get("extra_args") or {}).get("nvext") or {}
    return set(nvext.get("extra_fields") or ())


def _sampling(request: Mapping[str, Any]) -> dict[str, Any]:
    """What goes to the engine field by field. Absent fields stay absent: its own defaults hold."""
    # The LLM API decodes greedily when temperature, top_k and top_p are not set; OpenAI's default is temperature 1.
    found: dict[str, Any] = {"temperature": 1.0}
    for section, rows in fields.FIELDS.items():
        values = request.get(section) or {}
        for name, field in rows.items():
            if field.read is not None and values.get(name) is not None:
                found[name] = field.read(name, values[name])
    return found


def _has_moved(request: Mapping[str, Any]) -> bool:
    """Whether another worker had ``request`` and gave tokens of its answer, which are the end of its prompt now: Dynamo
    1.4.2 has taken them off ``max_tokens``, and not off ``min_tokens``. It hands on the link of that worker's chunks
    (:data:`trtx.worker.requests.chunks.NO_TRACE`), and to a decode worker that of prefill's. Where Dynamo
    traces, these have one always, so nothing is known of a decode worker's requests."""
    return request.get("migration_link") is not None


def _contradiction(sampling: Mapping[str, Any]) -> str:
    """TensorRT-LLM would answer ``max_tokens`` tokens, vLLM and the torch engine refuse. Where the client gave no
    ``max_tokens``, both end with the context."""
    min_tokens, max_tokens = sampling.get("min_tokens", 0), sampling.get("max_tokens")
    if max_tokens is None or min_tokens <= max_tokens:
        return ""
    return f"min_tokens is {min_tokens}, expected at most max_tokens, which is {max_tokens}; change one of them"


def _stops(stops: Mapping[str, Any], eos_token_ids: Any) -> dict[str, Any]:
    """Which tokens end a request: the client's stop ids, and end-of-sequence ids unless they are ignored. The hidden
    ones are the frontend's, of those too."""
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
    """Equal prompts with different salts never share KV blocks. The frontend puts it among the routing hints."""
    salt = (request.get("routing") or {}).get("cache_salt")
    return str(salt) if salt else None


def _priority(hint: Any) -> float | None:
    """A client's hint, any integer, higher first, on the LLM API's scale from 0 to 1."""
    return None if not isinstance(hint, (int, float)) else min(1.0, max(0.0, float(hint)))
