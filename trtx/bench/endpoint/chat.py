"""aiperf's chat endpoint, strict: an answer that is not whole becomes the record's error.

aiperf 0.13.0 reads no finish reason, compares no count, and takes for an error on a stream only ``event: error``. Its
record processor asks the endpoint to read the answer before any metric is computed: an error set there leaves the
record out of every figure, aiperf's own too, and stands in ``profile_export.jsonl`` with its reason. Drop this when
aiperf demands a finish reason itself.
"""

from __future__ import annotations

import os
from typing import Any

from aiperf.common.models import ErrorDetails, ParsedResponse, RequestInfo, RequestRecord
from aiperf.endpoints.openai_chat import ChatEndpoint

from trtx.bench.answers import Answer, Asked, not_a_count
from trtx.bench.endpoint import API_KEY_VARIABLE
from trtx.bench.failures import INCOMPLETE
from trtx.bench.records import NAMED_MODELS


class WholeAnswerChat(ChatEndpoint):  # type: ignore[misc]  # aiperf is untyped here
    """``/v1/chat/completions``, each answer judged by :meth:`Answer.fault` as it is read."""

    def get_endpoint_headers(self, request_info: RequestInfo) -> dict[str, str]:
        """With the key that ``bench`` was given for this server. aiperf 0.13.0 takes one for its own use from a command
        line or a file alone, where others could read it; it keeps no header unredacted in what it writes."""
        headers: dict[str, str] = super().get_endpoint_headers(request_info)
        key = os.environ.get(API_KEY_VARIABLE)
        return headers if key is None else {**headers, "Authorization": f"Bearer {key}"}

    def extract_response_data(self, record: RequestRecord) -> list[ParsedResponse]:
        """What aiperf's own does, in one pass with the judgement: no event is decoded twice."""
        if record._parsed_responses_cache is not None:
            return list(record._parsed_responses_cache)
        answer = Answer()
        parsed: list[ParsedResponse] = []
        for response in record.responses:
            document = response.get_json()
            if not isinstance(document, dict):
                answer.add_text(response.get_text() or "")
                continue
            answer.add(document)
            if read := self._parse_json_response(response.perf_ns, document):
                parsed.append(read)
        record._parsed_responses_cache = parsed
        setattr(record, NAMED_MODELS, answer.models)
        fault = answer.fault(self._asked(record))
        fault = fault or _unread(answer, sum(read.data is not None for read in parsed))
        if record.error is None and fault is not None:
            record.error = ErrorDetails(type=INCOMPLETE, message=fault)
        return parsed

    def _parse_json_response(self, perf_ns: int, json_obj: Any) -> ParsedResponse | None:
        """aiperf's own, given nothing that it can't compute with: it reads every event through here, in all processes.

        What raises in an aiperf 0.13.0 worker (a usage that counts "8" or 8.0 tokens) loses the request's credit, and
        the run waits for it for ever. The judge reads the event as it came, and tells what is wrong with it.
        """
        if not isinstance(json_obj, dict):
            return None
        if json_obj.get("usage") and not_a_count(json_obj["usage"]):
            json_obj = {name: value for name, value in json_obj.items() if name != "usage"}
        try:
            parsed: ParsedResponse | None = super()._parse_json_response(perf_ns, json_obj)
        except Exception:  # whatever it is that aiperf did not expect of a server
            return None
        return parsed

    def _asked(self, record: RequestRecord) -> Asked:
        """The body as :meth:`format_payload` merged it; the body itself does not travel with the record.

        Form and length are aiperf's own: what ``extra_inputs``, or a record, might say of them was refused. A record
        without a length, and without one of the load's, is sent without: its answer ends by itself.
        """
        endpoint = self.model_endpoint.endpoint
        limit = record.request_info.max_tokens
        own = {"stream": endpoint.streaming, "max_completion_tokens": limit, "max_tokens": limit}
        return Asked.of({**dict(endpoint.extra or ()), **own})


def _unread(answer: Answer, texts: int) -> str | None:
    """What keeps aiperf from timing a whole answer, of which it found text in so many events."""
    if not texts and not answer.texts:
        return "no text" if answer.tokens is None else f"{answer.tokens} tokens without text"
    if texts < answer.texts:
        return (
            f"aiperf finds text in {texts} of the {answer.texts} events that carry some, so none of its times is right"
        )
    return None
