"""aiperf's chat endpoint with strict checks: an incomplete answer becomes an error of its record.

aiperf 0.13.0 ignores finish reasons, compares no token counts, and recognises an error in a stream only as ``event:
error``. Its record processor calls the endpoint to parse each answer before it computes metrics. An error set here
excludes the record from all metrics, including aiperf's own, and appears in ``profile_export.jsonl`` with its reason.
Remove this once aiperf itself requires a finish reason.

aiperf keeps no text of an answer either, so an answer's format is checked here too (``bench/answer_formats``). The
outcome goes into the record (``formats.py``).
"""

from __future__ import annotations

import os
from typing import Any

from aiperf.common.models import ErrorDetails, ParsedResponse, RequestInfo, RequestRecord
from aiperf.endpoints.openai_chat import ChatEndpoint

from trtx.bench.answer_formats import AnswerContent
from trtx.bench.answers import Answer, RequestedOutput, not_a_count
from trtx.bench.endpoint import API_KEY_VARIABLE
from trtx.bench.endpoint.sent_format import sent_body, sent_format
from trtx.bench.failures import INCOMPLETE
from trtx.bench.records import ANSWER_FORMAT, NAMED_MODELS

DYNAMO_REQUEST_ID = "x-dynamo-request-id"
"""The header from which Dynamo's frontend takes a request's id, if it is a UUID."""


class WholeAnswerChat(ChatEndpoint):  # type: ignore[misc]  # aiperf is untyped here
    """The ``/v1/chat/completions`` endpoint, which checks each answer with :meth:`Answer.fault` as it parses it."""

    def get_endpoint_headers(self, request_info: RequestInfo) -> dict[str, str]:
        """Adds the API key for this server, and the request's id in the header that Dynamo reads.

        Workers write the id with the request's stage times, which are joined to aiperf's record by it. Dynamo 1.6.1
        does not read ``X-Request-ID``, the header of aiperf.

        aiperf 0.13.0 takes a key only from its command line or a file, where other users could read it. aiperf redacts
        all headers in its output.
        """
        headers: dict[str, str] = super().get_endpoint_headers(request_info)
        if request_info.x_request_id:
            headers = {**headers, DYNAMO_REQUEST_ID: request_info.x_request_id}
        key = os.environ.get(API_KEY_VARIABLE)
        return headers if key is None else {**headers, "Authorization": f"Bearer {key}"}

    def extract_response_data(self, record: RequestRecord) -> list[ParsedResponse]:
        """Like aiperf's method, but parses and checks in one pass, so that no event is decoded twice."""
        if record._parsed_responses_cache is not None:
            return list(record._parsed_responses_cache)
        body = sent_body(record)
        requested = None if body is None else sent_format(body)
        answer, content = Answer(), AnswerContent()
        parsed: list[ParsedResponse] = []
        for response in record.responses:
            document = response.get_json()
            if not isinstance(document, dict):
                answer.add_text(response.get_text() or "")
                continue
            answer.add(document)
            if requested is not None:
                content.add(document)
            if read := self._parse_json_response(response.perf_ns, document):
                parsed.append(read)
        record._parsed_responses_cache = parsed
        setattr(record, NAMED_MODELS, answer.models)
        fault = answer.fault(self._asked(record))
        fault = fault or _unread(answer, sum(read.data is not None for read in parsed))
        if fault is None and requested is not None:
            result = requested.judge(content)
            setattr(record, ANSWER_FORMAT, {"outcome": result.outcome, "reason": result.reason})
            fault = result.reason if result.outcome == "broken" else None
        if record.error is None and fault is not None:
            record.error = ErrorDetails(type=INCOMPLETE, message=fault)
        return parsed

    def _parse_json_response(self, perf_ns: int, json_obj: Any) -> ParsedResponse | None:
        """Like aiperf's method, but drops values that aiperf can't compute with. All of aiperf's processes parse events
        here.

        An exception in an aiperf 0.13.0 worker (for a usage that counts "8" or 8.0 tokens) loses the request's credit,
        and the run then waits for it forever. :class:`Answer` gets the event unchanged and reports what is wrong with
        it.
        """
        if not isinstance(json_obj, dict):
            return None
        if json_obj.get("usage") and not_a_count(json_obj["usage"]):
            json_obj = {name: value for name, value in json_obj.items() if name != "usage"}
        try:
            parsed: ParsedResponse | None = super()._parse_json_response(perf_ns, json_obj)
        except Exception:  # any error that aiperf raises for an unexpected response
            return None
        return parsed

    def _asked(self, record: RequestRecord) -> RequestedOutput:
        """The requested output, rebuilt from the request's settings, because the record has no request body.

        Streaming and length are those of aiperf, because ``extra_inputs`` and dataset records that set them were
        refused. A request without a length limit, from the record or the load, ends when the model stops.
        """
        endpoint = self.model_endpoint.endpoint
        limit = record.request_info.max_tokens
        own = {"stream": endpoint.streaming, "max_completion_tokens": limit, "max_tokens": limit}
        return RequestedOutput.of({**dict(endpoint.extra or ()), **own})


def _unread(answer: Answer, texts: int) -> str | None:
    """Returns why aiperf can't time a complete answer in which it found ``texts`` events with text; None if it can."""
    if not texts and not answer.texts:
        return "no text" if answer.tokens is None else f"{answer.tokens} tokens without text"
    if texts < answer.texts:
        return f"aiperf finds text in only {texts} of {answer.texts} events with text, so its times are wrong"
    return None
