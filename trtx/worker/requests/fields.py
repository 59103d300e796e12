"""The table of all fields of Dynamo's request: honoured, without effect on the answer, or refused by name.

The names are those of ``PreprocessedRequest`` in Dynamo 1.6.1 and of the mappings inside it. An unknown field with a
value is refused, because a later frontend may send one that changes answers. docs/request-fields.md describes how
OpenAI's fields are converted on the way here, or dropped.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from trtx.worker.requests import values
from trtx.worker.requests.values import Reader

Fate = Literal["honoured", "without effect", "refused"]

SHOWN_CHARACTERS = 60
"""Maximum length of a value in a refusal: enough to recognise it, while an image may have megabytes."""


@dataclass(frozen=True, slots=True)
class RequestField:
    """What the worker does with one field.

    ``why`` names the component that honours the field, or says why the field has no effect, or is the message of the
    refusal, with a placeholder ``{value}``. ``asks_nothing`` lists values without effect, in addition to None and empty
    ones. ``asks_when_empty``: an empty list has an effect too. ``read`` converts the value of a field that
    SamplingParams has under the same name; None for fields that are handled elsewhere. ``sees`` replaces this record on
    workers that take images; None: no difference.
    """

    fate: Fate
    why: str
    asks_nothing: tuple[Any, ...] = ()
    asks_when_empty: bool = False
    read: Reader | None = None
    sees: RequestField | None = None


def refusals(request: Mapping[str, Any], *, sees: bool = False) -> Iterator[str]:
    """Yields a sentence for each field of ``request`` that has a value and is refused or unknown.

    ``sees``: this worker's model and engine take images.
    """
    yield from _refusals(request, "", sees)


def _refusals(held: Mapping[str, Any], section: str, sees: bool) -> Iterator[str]:
    for name, value in held.items():
        path = f"{section}.{name}" if section else name
        if name and path in FIELDS and isinstance(value, Mapping):
            yield from _refusals(value, path, sees)
            continue
        field = FIELDS[section].get(name)
        if sees and field is not None:
            field = field.sees or field
        if value is None or (_is_empty(value) and not (field is not None and field.asks_when_empty)):
            continue
        if field is None:
            yield (
                f"{path} is {_shown(value)}, and this worker does not know the field: an answer without it may not be "
                "what was asked for; leave it out"
            )
        elif field.fate == "refused" and value not in field.asks_nothing:
            yield field.why.format(value=_shown(value))


def _is_empty(value: Any) -> bool:
    """Whether ``value`` is an empty string or list, or a mapping without keys other than null ones.

    Dynamo sends unused keys as null. Values of keys are not examined further, because they may be the client's: a JSON
    schema of ``{}`` is a value, not an empty section.
    """
    if isinstance(value, Mapping):
        return all(inner is None for inner in value.values())
    return isinstance(value, (str, list)) and not value


def _shown(value: Any) -> str:
    """A value as shown in a refusal, shortened: ``true`` for True, the non-null keys of a mapping, else its repr."""
    if isinstance(value, bool):
        return str(value).lower()
    is_mapping = isinstance(value, Mapping)
    text = ", ".join(sorted(name for name in value if value[name] is not None)) if is_mapping else repr(value)
    return text if len(text) <= SHOWN_CHARACTERS else text[:SHOWN_CHARACTERS] + "…"


def _honoured(by: str) -> RequestField:
    return RequestField("honoured", by)


def _without_effect(reason: str) -> RequestField:
    return RequestField("without effect", reason)


def _refused(sentence: str, *asks_nothing: Any) -> RequestField:
    return RequestField("refused", sentence, asks_nothing)


def _not_taken(name: str, *asks_nothing: Any, asks_when_empty: bool = False) -> RequestField:
    sentence = f"{name} is {{value}}, expected none: no engine of this worker takes it; leave it out"
    return RequestField("refused", sentence, asks_nothing, asks_when_empty)


def _sampling(read: Reader) -> RequestField:
    return RequestField("honoured", "the engine, through SamplingParams", read=read)


_NO_MEDIA = (
    "the request has media ({value}), but this model, or the engine that runs it, accepts text only; send the text "
    "without images"
)
_BY_ITS_BYTES = _without_effect("the worker identifies an image by its bytes; it refuses a uuid without an image")


def _media(sees: RequestField) -> RequestField:
    return RequestField("refused", _NO_MEDIA, sees=sees)


_ENDS = _honoured("the engine, through SamplingParams, with the other tokens that end a request")
_STOPS = _honoured("the engine, and the worker where it looks for stop strings")
_GRAMMAR = _honoured("the engine, through GuidedDecodingParams")
_ROUTER = _without_effect("used by the router already: it decides where and when a request runs, not the answer")
_FRONTEND = _honoured("the frontend, when it makes the answer")
# By section; "" is the request itself. A mapping whose path is a section is searched recursively.
FIELDS: Mapping[str, Mapping[str, RequestField]] = {
    "": {
        "model": _without_effect("the frontend has chosen this worker by it"),
        "token_ids": _honoured("the engine: the prompt"),
        "eos_token_ids": _STOPS,
        "prompt_embeds": _refused("prompt_embeds is given, expected a prompt of text or token ids; send one of them"),
        "multi_modal_data": _media(_honoured("the worker, which refuses what the model does not take")),
        "multi_modal_uuids": _media(_BY_ITS_BYTES),
        "mm_processor_kwargs": _refused(
            "mm_processor_kwargs is given ({value}), expected none: images are prepared as the checkpoint says; leave "
            "it out"
        ),
        "media_io_kwargs": _refused(
            "media_io_kwargs is given ({value}), expected none: media are decoded as the checkpoint says; leave it out"
        ),
        "mm_routing_info": _media(_honoured("the engine, in its KV events for blocks with images")),
        "encoder_result": _refused(
            "encoder_result is given ({value}), expected none: a worker of trtx asks encode workers itself; send images"
        ),
        "mdc_sum": _without_effect("checksum of the model's card"),
        "annotations": _FRONTEND,
        "image_cache_scope": _without_effect(
            "it limits which decoded images the frontend shares; workers don't use it"
        ),
        "router": _ROUTER,
        "router_config_override": _ROUTER,
        "kv_hint": _without_effect("a hint which cached blocks to evict; answers do not depend on the cache"),
        "bootstrap_info": _refused(
            "bootstrap_info is given ({value}), expected prefill_result in its place: no worker here announces a "
            "bootstrap address; start all workers of this topology with trtx"
        ),
        "migration_link": _without_effect("for traces; the lengths in stop_conditions are those that remain"),
        "request_timestamp_ms": _without_effect("for traces"),
        "require_reasoning": _without_effect("the worker sees in the prompt whether the model thinks first"),
        "_HEALTH_CHECK": _honoured("the worker: a canary runs first, on one worker, and is not counted"),
    },
    "stop_conditions": {
        "max_tokens": _sampling(values.integer(1)),
        "min_tokens": _sampling(values.integer(0)),
        "ignore_eos": _ENDS,
        "stop": _honoured("the worker"),
        "stop_token_ids": _ENDS,
        "stop_token_ids_hidden": _ENDS,
        "stop_token_ids_visible": _refused(
            "stop_token_ids_visible is {value}, expected none: an answer ends before its stop token; use stop_token_ids"
        ),
        "max_thinking_tokens": _refused(
            "max_thinking_tokens is {value}, expected none: no worker limits thinking separately; use max_tokens"
        ),
    },
    "sampling_options": {
        "n": _refused(
            "n is {value}, expected 1: Dynamo 1.6.1 ends a request at the first choice that finishes and would cut the "
            "others short; send one request for each answer",
            1,
        ),
        "best_of": _refused(
            "best_of is {value}, expected 1: a worker sends tokens as they are generated, and the likeliest of several "
            "answers is known only at their end; send several requests with logprobs, and compare them",
            1,
        ),
        "temperature": _sampling(values.number(0.0, 100.0)),
        "top_p": _sampling(values.number(0.0, 1.0)),
        "top_k": _sampling(values.top_k),
        "min_p": _sampling(values.number(0.0, 1.0)),
        "seed": _sampling(values.seed),
        "presence_penalty": _sampling(values.number(-2.0, 2.0)),
        "frequency_penalty": _sampling(values.number(-2.0, 2.0)),
        "repetition_penalty": _sampling(values.number(0.0, 2.0, above=True)),
        "use_beam_search": _refused(
            "use_beam_search is {value}, expected false: beam search is not served; use sampling", False
        ),
        "length_penalty": _refused(
            "length_penalty is {value}, expected none: it is beam search's, which is not served; leave it out", 1.0
        ),
        "include_stop_str_in_output": _honoured("the worker, which ends the text at a stop string"),
        "guided_decoding": _honoured("the engine: the grammar that the answer follows"),
    },
    "sampling_options.guided_decoding": {
        "json": _GRAMMAR,
        "regex": _GRAMMAR,
        "choice": _GRAMMAR,
        "grammar": _GRAMMAR,
        "structural_tag": _GRAMMAR,
        "backend": _without_effect("the engine config names the library; all of them permit the same texts"),
        "whitespace_pattern": _not_taken("guided_whitespace_pattern", asks_when_empty=True),
    },
    "output_options": {
        "logprobs": _sampling(values.logprobs),
        "prompt_logprobs": _sampling(values.prompt_logprobs),  # only if the frontend passes them on
        "skip_special_tokens": _honoured("the frontend, or the worker where it looks for stop strings"),
        "no_stop_trim": _refused(
            "no_stop_trim is {value}, expected false: an answer ends before its stop string; use "
            "include_stop_str_in_output",
            False,
        ),
        "formatted_prompt": _FRONTEND,
        "return_tokens_as_token_ids": _FRONTEND,
    },
    "routing": {
        "cache_salt": _honoured("the engine: prompts with different salts share no KV"),
        "priority": _honoured("the engine"),
        "dp_rank": _honoured("the engine, where it has attention-DP ranks"),
        "lora_name": _refused(
            "lora_name is {value}, expected none: no worker serves adapters; ask for the model by its own name"
        ),
        "backend_instance_id": _ROUTER,
        "prefill_worker_id": _ROUTER,
        "decode_worker_id": _ROUTER,
        "prefill_dp_rank": _ROUTER,
        "expected_output_tokens": _ROUTER,
        "priority_jump": _ROUTER,
        "strict_priority": _ROUTER,
        "allowed_worker_ids": _ROUTER,
        "routing_constraints": _ROUTER,
    },
    "agent_context": {
        "session_id": _honoured("the engine, where it keeps a conversation on one attention-DP rank"),
        "parent_session_id": _without_effect("for traces and the router"),
        "session_final": _ROUTER,
        "agent_headers": _without_effect("for traces"),
        "input_trigger": _without_effect("for traces"),
    },
    "prefill_result": {
        "disaggregated_params": _honoured("the engine: where the prompt's KV lies"),
        "prompt_tokens_details": _honoured("the worker, in the usage that clients see"),
    },
    "extra_args": {
        "messages": _without_effect("the source of token_ids"),
        "formatted_prompt": _without_effect("the source of token_ids"),
        "mm_hashes": _media(_without_effect("hashes of the images' URLs; workers identify an image by its bytes")),
        "reasoning_parser_kwargs": _without_effect("variables of the chat template, which has rendered the prompt"),
    },
    "extra_args.nvext": {
        "cache_salt": _without_effect("routing contains it as well"),
        "extra_fields": _FRONTEND,
        "token_in": _without_effect("the prompt came as token ids"),
    },
    "extra_args.sampling_options": {
        # an empty list would allow no token at all
        "allowed_token_ids": _not_taken("allowed_token_ids", asks_when_empty=True),
        "bad_words_token_ids": _not_taken("bad_words_token_ids"),
        "logprob_token_ids": _not_taken("logprob_token_ids"),
        "detokenize": _not_taken("detokenize", True),  # the frontend makes the text in any case
    },
}
