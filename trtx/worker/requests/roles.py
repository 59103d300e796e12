"""What agg, prefill and decode workers submit to the engine for a request."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from dynamo.common.backend.health_check import is_probe

from trtx.config.topology import Role
from trtx.engine import EngineApi
from trtx.worker.requests import handoff
from trtx.worker.requests.request import WorkerRequest

_BYPASS = "x-bypass-remote-prefill"
"""Annotation of a request that Dynamo 1.6.1's router sends to a decode worker alone. It drops a client's own."""
_LOST = "the KV was gone, or needed a second time, so this worker computed the prompt and its images again"


@dataclass(frozen=True, slots=True)
class Submission:
    """One call of ``generate_async``. ``hands_off``: its result becomes the terminal chunk for a decode worker."""

    request: WorkerRequest
    disaggregated_params: Any = None
    hands_off: bool = False
    resumes: bool = False  # begins with KV on which a prefill worker holds a lease until it is read or released
    cached_at_prefill: int | None = None  # prompt tokens that the prefill worker found in its cache
    prompt_logprobs: Any = None  # computed by the prefill worker; the client gets them with decode's last chunk
    prefill: str | None = None  # the prefill worker's name, if it gave one
    is_local: bool = False  # the router left the prompt to this decode worker (``--conditional-disagg``)
    lost_because: str = ""  # why the KV did not arrive, so that this worker computed the prompt and loaded its images


def plan(
    role: Role, request: WorkerRequest, wire: Mapping[str, Any], api: EngineApi, new_id: Callable[[], int | None]
) -> Submission:
    """Decides how this worker serves ``request``; ``wire`` is Dynamo's dict. Raises InvalidRequest."""
    carried = {} if request.ready is None else dict(request.ready.params)
    whole = Submission(request, api.DisaggregatedParams(request_type="context_and_generation", **carried))
    if role == "agg":  # with an encoder's embeddings, the engine needs explicit params for a whole request too
        return whole if carried else Submission(request)
    if is_probe(wire):
        return whole  # a health probe has no prefill worker: it runs here from end to end
    if role == "prefill":
        global_id = new_id()
        shared = {} if global_id is None else {"disagg_request_id": global_id}
        params = api.DisaggregatedParams(request_type="context_only", **shared, **carried)
        return Submission(_one_token(request), params, hands_off=True)
    answer = handed_over(role, request, wire)
    if answer is None:
        # The router left the prompt to this worker, or the request migrated from a dead worker, whose KV is lost.
        return replace(whole, is_local=_BYPASS in (wire.get("annotations") or ()))
    params = handoff.from_json(answer, api.DisaggregatedParams, api.Logprob)
    cached = ((wire.get("prefill_result") or {}).get("prompt_tokens_details") or {}).get("cached_tokens")
    return Submission(
        _without_prompt_logprobs(request),
        params,
        resumes=True,
        cached_at_prefill=cached,
        prompt_logprobs=handoff.prompt_logprobs_of(answer),
        prefill=handoff.prefill_of(answer),
    )


def handed_over(role: Role, request: WorkerRequest, wire: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """The disaggregated params that a prefill worker made for this same prompt, or None."""
    answer = (wire.get("prefill_result") or {}).get("disaggregated_params")
    if role != "decode" or answer is None or not handoff.made_for(answer, request.received_tokens):
        return None
    found: Mapping[str, Any] = answer
    return found


def again(submission: Submission, seen: Any, api: EngineApi) -> Submission:
    """``submission`` for another attempt, after the engine had to compute the prompt and lacked its images.

    ``seen`` is what the engine had generated before, the LLM API's ``CompletionOutput``, or None.
    """
    if seen is None or not seen.token_ids:
        return submission
    params = api.DisaggregatedParams(
        request_type="generation_only",
        first_gen_tokens=list(seen.token_ids),
        first_gen_log_probs=list(seen.logprobs) if seen.logprobs else None,
    )
    return replace(submission, disaggregated_params=params, lost_because=_LOST)


def _without_prompt_logprobs(request: WorkerRequest) -> WorkerRequest:
    """``request`` without prompt log-probabilities, which prefill computed: decode gets the prompt's KV,
    not its logits.
    """
    sampling = {name: value for name, value in request.sampling.items() if name != "prompt_logprobs"}
    return replace(request, sampling=sampling)


def _one_token(request: WorkerRequest) -> WorkerRequest:
    """``request`` limited to the first token.

    Decode handles stop strings, also in the first token, and all later tokens. The LLM API generates one token for
    ``context_only``, whatever ``max_tokens`` is. If a grammar's text is complete after the first token, the client's
    ``min_tokens`` decides whether the answer is long enough.
    """
    sampling = dict(request.sampling, max_tokens=1)
    if "min_tokens" in sampling:
        sampling["min_tokens"] = sampling["max_tokens"] = request.min_tokens if request.grammar is not None else 1
    return replace(request, sampling=sampling, stop_strings=())
