"""Adds the model names in an answer to aiperf's records.

aiperf 0.13.0 writes no field of a response into ``profile_export.jsonl``. A record's metadata accepts additional
fields, and a record observer runs last before the metadata leave the process. Remove this once aiperf exports the name.
"""

from __future__ import annotations

from aiperf.common.mixins.aiperf_lifecycle_mixin import AIPerfLifecycleMixin
from aiperf.post_processors.record_observer_context import RecordObserverContext

from trtx.bench.records import NAMED_MODELS


class NamedModels(AIPerfLifecycleMixin):  # type: ignore[misc]  # aiperf is untyped here
    """Copies the model names that trtx's endpoint (``chat.py``) found; records of other endpoints are unchanged."""

    async def observe(self, context: RecordObserverContext) -> None:
        if names := getattr(context.record.request, NAMED_MODELS, None):
            setattr(context.metadata, NAMED_MODELS, names)
