"""What aiperf's records keep of an answer's own words: the models that it says it is of.

aiperf 0.13.0 writes no field of an answer into ``profile_export.jsonl``. A record's metadata take fields beside their
own, and an observer is the last who sees them before they leave the process. Drop this when aiperf exports the name.
"""

from __future__ import annotations

from aiperf.common.mixins.aiperf_lifecycle_mixin import AIPerfLifecycleMixin
from aiperf.post_processors.record_observer_context import RecordObserverContext

from trtx.bench.records import NAMED_MODELS


class NamedModels(AIPerfLifecycleMixin):  # type: ignore[misc]  # aiperf is untyped here
    """Hands on what our endpoint (``chat.py``) found in an answer; records of other endpoints stay as they are."""

    async def observe(self, context: RecordObserverContext) -> None:
        if names := getattr(context.record.request, NAMED_MODELS, None):
            setattr(context.metadata, NAMED_MODELS, names)
