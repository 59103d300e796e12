"""``DisaggregatedParams`` on the wire: written as JSON by prefill, read by decode.

The frontend passes the JSON on verbatim, so it may contain neither bytes nor integer keys. ``opaque_state`` is base64;
``first_gen_log_probs`` is one list of ``{token_id, logprob, rank}`` per position. This is the layout of Dynamo's own
TensorRT-LLM backend.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping
from typing import Any

import msgspec

from trtx.engine.api import Clip, stated
from trtx.worker.multimodal.images import Picture
from trtx.worker.requests.invalid_request import InvalidRequest
from trtx.worker.requests.request import WorkerRequest

_Grid = tuple[int, int, int] | None
# Fields of the LLM API's DisaggregatedParams that are transferred; an absent field and None are equivalent.
_PLAIN_FIELDS = (
    "first_gen_tokens",
    "ctx_request_id",
    "disagg_request_id",
    "draft_tokens",
    "ctx_dp_rank",
    "ctx_info_endpoint",
    # Handles of an engine that preprocesses images itself, as plain JSON. The embeddings themselves are not sent to
    # decode.
    "mrope_position_ids_handle",
    "mrope_position_deltas_handle",
)
_PROMPT_TOKENS = "prompt_tokens"
_PREFILL = "prefill"
_PROMPT_LOGPROBS = "prompt_logprobs"
_MEDIA = "media"
_PROMPT = "prompt_token_ids"


def add_to(chunk: dict[str, Any], result: Any, request: WorkerRequest, prefill: str) -> None:
    """Adds to prefill's terminal chunk what decode needs. ``prefill``: this worker's name.

    "length" with params means that decode goes on. "stop" means that the first token ended the request: the frontend
    then answers with this chunk and skips decode.
    """
    if chunk.get("finish_reason") == "length":
        chunk["disaggregated_params"] = to_json(
            result.outputs[0].disaggregated_params, prompt_tokens=request.received_tokens
        )
        chunk["disaggregated_params"][_PREFILL] = prefill
        if request.pictures:
            chunk["disaggregated_params"][_MEDIA] = [
                {"rows": one.rows, "key": one.key.hex(), "grid": one.grid, "clip": msgspec.to_builtins(one.clip)}
                for one in request.pictures
            ]
        if request.ready is not None:
            # The engine's result may lack the params that it was given (ai-dynamo's dynamo.trtllm also copies them by
            # hand).
            for name, value in request.ready.params.items():
                if name in _PLAIN_FIELDS:
                    chunk["disaggregated_params"].setdefault(name, value)
            chunk["disaggregated_params"][_PROMPT] = request.token_ids
        if engine_data := chunk.pop("engine_data", None):
            # Dynamo 1.6.1's frontend does not pass prefill's engine_data on to the client, but it passes the params on
            # to decode.
            chunk["disaggregated_params"][_PROMPT_LOGPROBS] = engine_data[_PROMPT_LOGPROBS]


def prompt_logprobs_of(wire: Mapping[str, Any]) -> Any:
    """The prompt's log-probabilities that prefill computed, in the client's format; None if they were not requested."""
    return wire.get(_PROMPT_LOGPROBS)


def prefill_of(wire: Mapping[str, Any]) -> str | None:
    """The name of the prefill worker that answered; None if it did not give one."""
    name = wire.get(_PREFILL)
    return name if isinstance(name, str) else None


def prompt_of(wire: Mapping[str, Any]) -> list[int] | None:
    """The prompt with its image placeholders expanded, if prefill's engine does that itself; else None."""
    try:
        return msgspec.convert(wire.get(_PROMPT), list[int] | None)
    except msgspec.ValidationError as error:
        raise InvalidRequest(f"{_PROMPT} in prefill's disaggregated_params can't be read ({error})") from error


def pictures_of(wire: Mapping[str, Any]) -> tuple[Picture, ...]:
    """The prompt's media, in the order of ``sent_media``, with the sizes for which prefill expanded the prompt.

    Raises InvalidRequest if they can't be read.
    """
    try:
        return tuple(
            Picture(
                bytes.fromhex(one["key"]),
                msgspec.convert(one["rows"], int),
                msgspec.convert(one["grid"], _Grid),
                msgspec.convert(one.get("clip"), Clip | None),
            )
            for one in wire.get(_MEDIA) or ()
        )
    except (KeyError, TypeError, ValueError) as error:
        raise InvalidRequest(f"media in prefill's disaggregated_params can't be read ({error})") from error


def to_json(params: Any, *, prompt_tokens: int) -> dict[str, Any]:
    """``params`` as they go into prefill's terminal chunk.

    ``prompt_tokens`` lets decode check that the answer belongs to its own prompt.
    """
    held = stated(params)
    wire: dict[str, Any] = {name: held[name] for name in _PLAIN_FIELDS if name in held}
    wire[_PROMPT_TOKENS] = prompt_tokens
    if "opaque_state" in held:
        wire["opaque_state"] = base64.b64encode(held["opaque_state"]).decode("ascii")
    if logprobs := held.get("first_gen_log_probs"):
        wire["first_gen_log_probs"] = [
            [
                {"token_id": token_id, "logprob": entry.logprob, "rank": entry.rank}
                for token_id, entry in position.items()
            ]
            for position in logprobs
        ]
    return wire


def from_json(wire: Mapping[str, Any], params_type: Any, logprob_type: Any) -> Any:
    """The params of a ``generation_only`` request. Raises InvalidRequest if prefill's answer can't be read."""
    fields: dict[str, Any] = {name: wire[name] for name in _PLAIN_FIELDS if wire.get(name) is not None}
    if not fields.get("first_gen_tokens"):
        raise InvalidRequest("prefill's disaggregated_params hold no first_gen_tokens; both workers must run trtx")
    state = wire.get("opaque_state")
    if state is not None:
        try:
            fields["opaque_state"] = base64.b64decode(state, validate=True)
        except (binascii.Error, TypeError, ValueError) as error:
            raise InvalidRequest(f"opaque_state in prefill's disaggregated_params is not base64 ({error})") from error
    if wire.get("first_gen_log_probs"):
        fields["first_gen_log_probs"] = [
            {entry["token_id"]: logprob_type(entry["logprob"], entry.get("rank")) for entry in position}
            for position in wire["first_gen_log_probs"]
        ]
    return params_type(request_type="generation_only", **fields)


def made_for(wire: Mapping[str, Any], prompt_tokens: int) -> bool:
    """Whether prefill's answer belongs to a prompt of ``prompt_tokens`` tokens.

    Dynamo 1.6.1 resends a migrated request with a longer prompt, which ends with the tokens already streamed. Prefill's
    answer to the shorter prompt must not be used for it.
    """
    return wire.get(_PROMPT_TOKENS) in (None, prompt_tokens)


# The first use of this type happens here, in the importing thread: see trtx.torch_engine.llm_args.
msgspec.json.Decoder(Clip)
