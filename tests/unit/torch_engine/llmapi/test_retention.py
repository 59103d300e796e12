"""``kv_cache_retention_config``: what reaches the engine, and what is refused."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest

from trtx import KvCacheRetentionConfig, RequestError
from trtx.torch_engine.llmapi.retention import read_retention
from trtx.torch_engine.messages import KvRetention, Retained, RetainedRange

Range = KvCacheRetentionConfig.TokenRangeRetentionConfig


def test_ranges_and_durations_reach_the_engine() -> None:
    config = KvCacheRetentionConfig([Range(32, None, 10), Range(0, 32, 90, timedelta(seconds=2))], 20, 1500)
    assert read_retention(config) == KvRetention(
        [RetainedRange(0, Retained(90, 2.0), 32), RetainedRange(32, Retained(10))], Retained(20, 1.5)
    )
    assert read_retention(None) is None


@pytest.mark.parametrize(
    ("config", "says"),
    [
        (KvCacheRetentionConfig([Range(0, None, 101)]), "priority is 101; expected an integer from 0 to 100"),
        (KvCacheRetentionConfig([Range(8, 8)]), "token_end is 8, and token_start is 8; expected a later end"),
        (KvCacheRetentionConfig([Range(-1)]), "token_start is -1"),
        (KvCacheRetentionConfig([], 35, -5), "decode_duration_ms is -5"),
        (KvCacheRetentionConfig([{"token_start": 0}]), "expected KvCacheRetentionConfig.TokenRangeRetentionConfig"),  # type: ignore[list-item]
        ({"priority": 1}, "expected a KvCacheRetentionConfig of trtx"),
    ],
)  # fmt: skip
def test_a_retention_that_can_not_be_is_refused(config: Any, says: str) -> None:
    with pytest.raises(RequestError, match=says):
        read_retention(config)
