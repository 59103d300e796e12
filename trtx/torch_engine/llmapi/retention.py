"""``KvCacheRetentionConfig``: how long the KV blocks of one request are kept for reuse."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

from trtx.torch_engine.llmapi.request_errors import RequestError
from trtx.torch_engine.llmapi.values import Unsuitable, integer, shown
from trtx.torch_engine.messages import KvRetention, Retained, RetainedRange

DEFAULT_RETENTION_PRIORITY = 35
HIGHEST_RETENTION_PRIORITY = 100
_PRIORITY = integer(0, HIGHEST_RETENTION_PRIORITY, optional=False)
_POSITION = integer(0, optional=False)
_END = integer(1)


@dataclass(frozen=True, slots=True)
class TokenRangeRetentionConfig:
    """Retention of the prompt's blocks that begin in ``[token_start, token_end)``; None: to the prompt's end.

    ``duration_ms``: how long after the last use the priority holds, in ms or as a timedelta; None: for good.
    """

    token_start: int
    token_end: int | None = None
    priority: int = DEFAULT_RETENTION_PRIORITY
    duration_ms: int | timedelta | None = None


@dataclass(frozen=True, slots=True)
class KvCacheRetentionConfig:
    """TensorRT-LLM's parameter. Blocks of the lowest priority are evicted first; the default is 35.

    With ``secondary_offload_min_priority``, evicted blocks of a lower priority are not kept in host memory either.
    """

    token_range_retention_configs: Sequence[TokenRangeRetentionConfig] = field(default_factory=list)
    decode_retention_priority: int = DEFAULT_RETENTION_PRIORITY
    decode_duration_ms: int | timedelta | None = None

    TokenRangeRetentionConfig = TokenRangeRetentionConfig

    @classmethod
    def of_whole_request(cls, priority: int) -> KvCacheRetentionConfig:
        return cls([TokenRangeRetentionConfig(0, None, priority)], priority)

    def retention(self) -> KvRetention:
        """Raises RequestError for values that no retention has."""
        ranges = [_range(one) for one in self.token_range_retention_configs]
        return KvRetention(
            sorted(ranges, key=lambda held: held.start),
            Retained(
                _checked(_PRIORITY, self.decode_retention_priority, "decode_retention_priority"),
                _seconds(self.decode_duration_ms, "decode_duration_ms"),
            ),
        )


def read_retention(value: Any) -> KvRetention | None:
    """Converts the argument ``kv_cache_retention_config`` of a request. Raises RequestError."""
    if value is None:
        return None
    if not isinstance(value, KvCacheRetentionConfig):
        raise RequestError(
            f"kv_cache_retention_config is {shown(value)}; expected a KvCacheRetentionConfig of trtx, or None"
        )
    return value.retention()


def _range(one: Any) -> RetainedRange:
    if not isinstance(one, TokenRangeRetentionConfig):
        raise RequestError(
            f"token_range_retention_configs holds {shown(one)}; expected KvCacheRetentionConfig."
            "TokenRangeRetentionConfig"
        )
    start = _checked(_POSITION, one.token_start, "token_start")
    end = _checked(_END, one.token_end, "token_end")
    if end is not None and end <= start:
        raise RequestError(f"token_end is {end}, and token_start is {start}; expected a later end")
    retained = Retained(_checked(_PRIORITY, one.priority, "priority"), _seconds(one.duration_ms, "duration_ms"))
    return RetainedRange(start, retained, end)


def _seconds(value: Any, name: str) -> float | None:
    if isinstance(value, timedelta):
        value = round(value.total_seconds() * 1e3)
    milliseconds = _checked(integer(0), value, name)
    return None if milliseconds is None else milliseconds / 1e3


def _checked(check: Any, value: Any, name: str) -> Any:
    try:
        return check(value)
    except Unsuitable as error:
        raise RequestError(f"kv_cache_retention_config: {name} is {shown(value)}; expected {error}") from error
