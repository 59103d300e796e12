"""Adds the output format that a request demanded, and whether the answer follows it, to aiperf's records.

aiperf 0.13.0 writes no field of a response into ``profile_export.jsonl``; ``naming.py`` describes the workaround.
"""

from __future__ import annotations

from aiperf.common.mixins.aiperf_lifecycle_mixin import AIPerfLifecycleMixin
from aiperf.post_processors.record_observer_context import RecordObserverContext

from trtx.bench.endpoint.sent_format import sent_body, sent_format
from trtx.bench.records import ANSWER_FORMAT


class AnswerFormats(AIPerfLifecycleMixin):  # type: ignore[misc]  # aiperf is untyped here
    """Writes the requested format, also of failed requests, and the outcome that the endpoint (``chat.py``) found.

    A record without a request body stays unchanged, because the requested format is unknown.
    """

    async def observe(self, context: RecordObserverContext) -> None:
        record = context.record.request
        body = sent_body(record)
        if body is None:
            return
        requested = sent_format(body)
        asked = [] if requested is None else list(requested.asked)
        setattr(context.metadata, ANSWER_FORMAT, {"asked": asked, **(getattr(record, ANSWER_FORMAT, None) or {})})
