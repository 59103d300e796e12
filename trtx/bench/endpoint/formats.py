"""Adds what a request asked of the form of its answer, and whether the answer follows it, to aiperf's records.

For the same reason and in the same way as ``naming.py``.
"""

from __future__ import annotations

from aiperf.common.mixins.aiperf_lifecycle_mixin import AIPerfLifecycleMixin
from aiperf.post_processors.record_observer_context import RecordObserverContext

from trtx.bench.endpoint.sent_format import sent_body, sent_format
from trtx.bench.records import ANSWER_FORMAT


class AnswerFormats(AIPerfLifecycleMixin):  # type: ignore[misc]  # aiperf is untyped here
    """Writes what the body asked for, also of failed requests, and the outcome that the endpoint (``chat.py``) found.

    A record without the body stays unchanged: then it is not known what its request asked for.
    """

    async def observe(self, context: RecordObserverContext) -> None:
        record = context.record.request
        body = sent_body(record)
        if body is None:
            return
        requested = sent_format(body)
        asked = [] if requested is None else list(requested.asked)
        setattr(context.metadata, ANSWER_FORMAT, {"asked": asked, **(getattr(record, ANSWER_FORMAT, None) or {})})
