"""``DisaggregatedParams`` on the wire: prefill's answer as JSON, and back on decode.

The frontend passes the JSON on verbatim and knows only JSON: no bytes, no integer keys. ``opaque_state`` is base64,
``first_gen_log_probs`` one list of ``{token_id, logprob, rank}`` a position: the layout that Dynamo's own
TensorRT-LLM backend sends.
"""

from __future__ import annotations

import base64
import binascii
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

from trtx.worker.request import InvalidRequest

# Fields of the LLM API's DisaggregatedParams that cross; absent and None are the same.
_PLAIN_FIELDS = ("first_gen_tokens", "ctx_request_id", "disagg_request_id", "draft_tokens", "ctx_dp_rank")
_PROMPT_TOKENS = "prompt_tokens"
UNREAD_SECONDS = 2.0
"""How long a draining prefill worker keeps leases of which none ends. A decode worker reads as soon as it has a slot
for the request, milliseconds after prefill's answer; one that comes later than this computes the prompt itself."""


class RequestIds:
    """Global ids for requests that two engines share, made before prefill.

    Layout of TensorRT-LLM 1.3.0rc22 (``get_global_disagg_request_id``): 39 bits of milliseconds, 14 of process, 10 of
    counter. Ids below 2**40 are an engine's own, so the time part must not be small; it is not before 2034 plus.
    """

    def __init__(self, worker_id: int) -> None:
        self._process = worker_id % (1 << 14)
        self._count = 0
        self._lock = threading.Lock()

    def next(self) -> int:
        with self._lock:
            self._count = (self._count + 1) % (1 << 10)
            milliseconds = int(time.time() * 1000) % (1 << 39)
            return (milliseconds << 24) | (self._process << 10) | self._count


class UnreadLeases:
    """Tells leases that decode workers are still about to read from those whose readers are gone.

    A reader that died releases nothing: its leases stay out until their deadline, a minute, and there is no telling
    from here whose they are. So leases count as wanted for as long as, now and then, one of them ends.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._leases: int | None = None
        self._since = 0.0

    def requests_are_open(self) -> None:
        """Each of them may still lead to a lease: waiting begins when the last one has ended."""
        self._leases = None

    def are_wanted(self, leases: int) -> bool:
        """``leases``: held now. False from when there are none, or none has ended for ``UNREAD_SECONDS``."""
        now = self._clock()
        if leases != self._leases:
            self._leases, self._since = leases, now
        return leases > 0 and now - self._since < UNREAD_SECONDS


def add_to(chunk: dict[str, Any], result: Any, *, prompt_tokens: int) -> None:
    """Makes prefill's terminal chunk one that the frontend passes on to decode.

    "length" with params means: go on at decode. "stop" means that the first token ended the request: the frontend
    then answers with this chunk and skips decode.
    """
    if chunk.get("finish_reason") == "length":
        chunk["disaggregated_params"] = to_json(result.outputs[0].disaggregated_params, prompt_tokens=prompt_tokens)


def to_json(params: Any, *, prompt_tokens: int) -> dict[str, Any]:
    """What prefill's terminal chunk carries. ``prompt_tokens`` lets decode see whether it was made for its prompt."""
    wire: dict[str, Any] = {_PROMPT_TOKENS: prompt_tokens}
    for name in _PLAIN_FIELDS:
        value = getattr(params, name, None)
        if value is not None:
            wire[name] = value
    endpoint = getattr(params, "ctx_info_endpoint", None)
    if endpoint is not None:
        wire["ctx_info_endpoint"] = endpoint
    if params.opaque_state is not None:
        wire["opaque_state"] = base64.b64encode(params.opaque_state).decode("ascii")
    logprobs = getattr(params, "first_gen_log_probs", None)
    if logprobs:
        wire["first_gen_log_probs"] = [
            [
                {"token_id": token_id, "logprob": entry.logprob, "rank": entry.rank}
                for token_id, entry in position.items()
            ]
            for position in logprobs
        ]
    return wire


def from_json(wire: Mapping[str, Any], params_type: Any, logprob_type: Any) -> Any:
    """The params of a ``generation_only`` request. Raises InvalidRequest when prefill's answer can't be read."""
    fields: dict[str, Any] = {name: wire[name] for name in _PLAIN_FIELDS if wire.get(name) is not None}
    if wire.get("ctx_info_endpoint") is not None:
        fields["ctx_info_endpoint"] = wire["ctx_info_endpoint"]
    if not fields.get("first_gen_tokens"):
        raise InvalidRequest("prefill's disaggregated_params hold no first_gen_tokens; both workers must run trtx")
    state = wire.get("opaque_state")
    if state is not None:
        try:
            fields["opaque_state"] = base64.b64decode(state, validate=True)
        except (binascii.Error, TypeError, ValueError) as error:
            raise InvalidRequest(f"opaque_state in prefill's disaggregated_params is no base64 ({error})") from error
    if wire.get("first_gen_log_probs"):
        fields["first_gen_log_probs"] = [
            {entry["token_id"]: logprob_type(entry["logprob"], entry.get("rank")) for entry in position}
            for position in wire["first_gen_log_probs"]
        ]
    return params_type(request_type="generation_only", **fields)


def made_for(wire: Mapping[str, Any], prompt_tokens: int) -> bool:
    """False when prefill saw another prompt: a migrated request carries the tokens it already streamed.

    Dynamo 1.4.2 resends such a request with a longer prompt; prefill's answer to the shorter one must not be used.
    """
    return wire.get(_PROMPT_TOKENS) in (None, prompt_tokens)
