"""One choice of a request's result: TensorRT-LLM's ``CompletionOutput``."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from trtx.torch_engine.llmapi.disaggregated import DisaggregatedParams
from trtx.torch_engine.messages import EngineTimes, KvTransfer, Logprob


@dataclass(frozen=True, slots=True)
class KvCacheMetrics:
    num_reused_blocks: int


@dataclass(frozen=True, slots=True)
class RequestPerfMetrics:
    kv_cache_metrics: KvCacheMetrics


@dataclass(slots=True, eq=False)
class CompletionOutput:
    """One choice.

    ``token_ids``, ``text`` and ``logprobs`` are cumulative; the fields with ``_diff`` have what is new since the
    consumer's last step.
    """

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    cumulative_logprob: float | None = None
    logprobs: list[dict[int, Logprob]] = field(default_factory=list)
    prompt_logprobs: list[dict[int, Logprob]] = field(default_factory=list)
    finish_reason: str | None = None  # stop, length, cancelled, timeout
    stop_reason: int | str | None = None
    disaggregated_params: DisaggregatedParams | None = None
    request_perf_metrics: RequestPerfMetrics | None = None
    kv_transfer: KvTransfer | None = None  # of a generation_only request; set with its first computed token
    engine_times: EngineTimes | None = None  # set with the first token that the engine computed, and with the last
    generation_logits: None = None
    _tokens_seen: int = 0
    _text_seen: int = 0
    _logprobs_seen: int = 0

    @property
    def length(self) -> int:
        return len(self.token_ids)

    @property
    def token_ids_diff(self) -> list[int]:
        return self.token_ids[self._tokens_seen :]

    @property
    def text_diff(self) -> str:
        return self.text[self._text_seen :]

    @property
    def logprobs_diff(self) -> list[dict[int, Logprob]]:
        return self.logprobs[self._logprobs_seen :]

    def mark_seen(self) -> None:
        self._tokens_seen, self._text_seen = len(self.token_ids), len(self.text)
        self._logprobs_seen = len(self.logprobs)


def likeliest(choices: Sequence[CompletionOutput], count: int) -> list[CompletionOutput]:
    """Returns the ``count`` choices with the largest cumulative logprob, in this order, and numbers them anew."""
    ordered = sorted(choices, key=lambda one: math.inf if one.cumulative_logprob is None else -one.cumulative_logprob)
    for index, output in enumerate(ordered):
        output.index = index
    return ordered[:count]
