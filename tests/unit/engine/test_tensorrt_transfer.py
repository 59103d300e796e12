"""What TensorRT-LLM's own timing of a request says of its handoff."""

from __future__ import annotations

from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest

from trtx.engine.api import EngineFacts, Transfer
from trtx.engine.tensorrt_llm.adapter import TensorRtEngine


async def _generate_async(inputs: Any, sampling_params: Any) -> None: ...


def told(start_s: float, end_s: float, size: int) -> Any:
    """As its results have it: 0 where nothing was asked of a prefill engine."""
    return SimpleNamespace(
        timing_metrics=SimpleNamespace(
            kv_cache_transfer_start=timedelta(seconds=start_s),
            kv_cache_transfer_end=timedelta(seconds=end_s),
            kv_cache_size=size,
        )
    )


@pytest.mark.parametrize(
    ("perf", "transfer"),
    [
        (told(5.0, 5.5, 4096), Transfer(4096, 0.5)),
        (told(5.0, 5.5, 0), Transfer(0, 0.5)),  # every block was there already
        (told(0, 0, 0), Transfer(0, 0.0)),
        (told(5.0, 0, 0), Transfer(0, 0.0)),  # begun, and no end of it
        (None, None),  # return_perf_metrics: false
        (SimpleNamespace(kv_cache_metrics=None), None),
    ],
)
def test_kv_came_where_a_request_says_when_its_transfer_began_and_ended(perf: Any, transfer: Transfer | None) -> None:
    engine = TensorRtEngine(SimpleNamespace(generate_async=_generate_async, args=SimpleNamespace()), EngineFacts(512))
    assert engine.transfer(SimpleNamespace(request_perf_metrics=perf)) == transfer
