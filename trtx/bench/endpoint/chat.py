"""aiperf's chat endpoint, strict: an answer that is not whole becomes the record's error.

aiperf 0.13.0 reads no finish reason, compares no count, and takes for an error on a stream only ``event: error``. Its
record processor asks the endpoint to read the answer before any metric is computed: an error set there leaves the
record out of every figure, aiperf's own too, and stands in ``profile_export.jsonl`` with its reason. Drop this when
aiperf demands a finish reason itself.
"""

from __future__ import annotations

from aiperf.common.models import ErrorDetails, ParsedResponse, RequestRecord
from aiperf.endpoints.openai_chat import ChatEndpoint

from trtx.bench.answers import Answer, Asked
from trtx.bench.failures import INCOMPLETE


class WholeAnswerChat(ChatEndpoint):  # type: ignore[misc]  # aiperf is untyped here
    """``/v1/chat/completions``, each answer judged by :meth:`Answer.fault` as it is read."""

    def extract_response_data(self, record: RequestRecord) -> list[ParsedResponse]:
        """What aiperf's own does, in one pass with the judgement: no event is decoded twice."""
        if record._parsed_responses_cache is not None:
            return list(record._parsed_responses_cache)
        answer = Answer()
        parsed = []
        for response in record.responses:
            document = response.get_json()
            if not isinstance(document, dict):
                answer.add_text(response.get_text() or "")
                continue
            answer.add(document)
            if read := self._parse_json_response(response.perf_ns, document):
                parsed.append(read)
        record._parsed_responses_cache = parsed
        asked = self._asked(record)
        fault = "aiperf did not say how many tokens were asked" if asked.max_tokens is None else answer.fault(asked)
        if record.error is None and fault is not None:
            record.error = ErrorDetails(type=INCOMPLETE, message=fault)
        return parsed

    def _asked(self, record: RequestRecord) -> Asked:
        """The body as :meth:`format_payload` merged it; the body itself does not travel with the record."""
        endpoint = self.model_endpoint.endpoint
        limit = {"max_completion_tokens": record.request_info.max_tokens}
        return Asked.of({"stream": endpoint.streaming, **limit, **dict(endpoint.extra or ())})
