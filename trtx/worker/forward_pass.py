"""Forward-pass metrics for Dynamo's planner: one record a step, published on the event plane.

Dynamo 1.6.1 publishes them from its TensorRT-LLM worker if ``--publish-metrics`` or one of these variables is set.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from dynamo.llm import FpmDirectPublisher

from trtx.worker.iteration_rows import StepNumbers, value_at

logger = logging.getLogger(__name__)

_PORT = "DYN_FORWARDPASS_METRIC_PORT"  # set to any value; the port itself is for engines of other processes
_TRACE = "DYN_FPM_TRACE"  # Dynamo then writes the records to files too
_OFF = frozenset({"", "0", "false", "off", "no"})
_BATCH = "inflightBatchingStats."
# Argument of FpmDirectPublisher.publish, and the fields of a row of iteration stats that it is the sum of.
_FIELDS: Mapping[str, tuple[str, ...]] = {
    "scheduled_num_prefill_requests": ("numContextRequests",),
    "scheduled_sum_prefill_tokens": ("numCtxTokens",),
    "scheduled_sum_prefill_kv_tokens": ("numCtxKvTokens",),
    "scheduled_num_decode_requests": ("numGenRequests",),
    "scheduled_sum_decode_kv_tokens": ("numGenKvTokens",),
    "queued_num_prefill_requests": ("numQueuedContextRequests",),
    "queued_sum_prefill_tokens": ("numQueuedCtxTokens",),
    "queued_num_decode_requests": ("numPausedRequests", "numQueuedGenRequests"),
    "queued_sum_decode_kv_tokens": ("numPausedKvTokens", "numQueuedGenKvTokens"),
}


def wants_forward_passes(environment: Mapping[str, str]) -> bool:
    return bool(environment.get(_PORT)) or environment.get(_TRACE, "").strip().lower() not in _OFF


class ForwardPassPublication:
    """Publishes the steps of one worker; ``publish`` is called from the polling thread.

    Dynamo's publisher sends an idle record if a rank has had no step for a second.
    """

    def __init__(self, endpoint: Any, worker_id: int, dp_size: int) -> None:
        self._publisher = FpmDirectPublisher(endpoint, str(worker_id), dp_size)
        self._steps = StepNumbers()
        self._is_closed = False

    def publish(self, row: Mapping[str, Any]) -> None:
        """Publishes the step of ``row``, once. Ends the publication if the engine does not report all fields."""
        if self._is_closed or not self._steps.is_new(row):
            return
        seconds = value_at(row, "iterLatencyMS")
        parts = {name: [value_at(row, _BATCH + one) for one in fields] for name, fields in _FIELDS.items()}
        counts = {
            name: sum(int(value) for value in values if value is not None)
            for name, values in parts.items()
            if None not in values
        }
        if seconds is None or len(counts) < len(_FIELDS):
            # zeros in the place of unknown fields would look like an idle worker to the planner
            absent = sorted(_FIELDS.keys() - counts.keys()) or ["wall_time_secs"]
            logger.warning("no forward-pass metrics: this engine's iteration stats lack %s", ", ".join(absent))
            self.close()
            return
        self._publisher.publish(dp_rank=row.get("attentionDpRank") or 0, wall_time_secs=seconds / 1e3, **counts)

    def close(self) -> None:
        if not self._is_closed:
            self._is_closed = True
            self._publisher.shutdown()
