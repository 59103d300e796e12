"""What a worker needs of an engine, as one value."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

EngineKind = Literal["torch", "tensorrt-llm", "paced"]
ENGINE_KINDS: tuple[str, ...] = get_args(EngineKind)

Start = Callable[[Path, Mapping[str, Any]], Any]
"""Model directory and engine config to a running LLM. Blocks until it is ready."""


@dataclass(frozen=True, slots=True)
class EngineApi:
    """The names of TensorRT-LLM's LLM API that a worker uses, from one engine, and what tells engines apart."""

    kind: EngineKind
    start_llm: Start
    SamplingParams: Any
    DisaggregatedParams: Any
    Logprob: Any
    RequestError: type[Exception]
    RequestFailed: type[Exception] | None = None  # a RequestError that is no fault of the request; None: it can't tell
    start_encoder: Start | None = None  # MultimodalEncoder; None: this engine has none
    SchedulingParams: Any = None  # None: no attention-DP ranks to choose from
    ConversationParams: Any = None
    new_request_ids: Callable[[int], Callable[[], int | None]] | None = None  # worker id -> maker of disagg_request_ids
    aborts_transfers: bool = True  # False: an abort during a KV transfer leaks blocks, so it waits for the first token
    survives_errors: bool = True  # False: after anything but RequestError the engine's state is unknown
    shutdown_seconds: float = 20.0  # longest wait for LLM.shutdown
