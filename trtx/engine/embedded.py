"""The engine interface of the torch engine and of the paced engine, which uses the torch engine's
requests and results.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Iterable, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any, Literal

from trtx.checkpoint import read_model_config
from trtx.engine.api import (
    Engine,
    EngineApi,
    EngineFacts,
    EngineTimes,
    Fault,
    HandoffTotals,
    Hints,
    Result,
    Row,
    TowerOutput,
    Transfer,
)
from trtx.engine.request_ids import RequestIds
from trtx.ipc.encoder_messages import ARENA_BYTES
from trtx.ipc.shared_tensor import SharedTensor
from trtx.torch_engine.llmapi import (
    LLM,
    CompletionOutput,
    DisaggregatedParams,
    GuidedDecodingParams,
    KvCacheRetentionConfig,
    Logprob,
    MediaNeeded,
    MultimodalEncoder,
    PreparedPicture,
    RequestError,
    RequestFailed,
    RequestOutput,
    SamplingParams,
)


class TorchEngine(Engine):
    """The embedded LLM, which runs in a process of its own."""

    def __init__(self, llm: LLM) -> None:
        self._llm = llm
        self.engine_pid = llm.engine_pid
        pool, shared = llm.get_kv_cache_capacity(), llm.shared_weights
        self.facts = EngineFacts(
            context_length=min(llm.max_seq_len, pool["maxNumTokens"]),
            block_size=pool["tokensPerBlock"],
            num_blocks=pool["maxNumBlocks"],
            max_batch_size=llm.max_batch_size,
            max_num_tokens=llm.args.max_num_tokens,
            guides=llm.args.guides,
            has_kv_events=True,
            sleeps=llm.args.sleep_config is not None,
            shared_weights=None if shared is None else (shared.source, shared.num_bytes),
            left_out=tuple(llm.unsupported_fields),
        )

    def generate_async(
        self, inputs: list[int], sampling_params: SamplingParams, *, hints: Hints, **asked: Any
    ) -> RequestOutput:
        if hints.priority is not None:
            asked["priority"] = hints.priority
        if hints.retention_priority is not None:
            asked["kv_cache_retention_config"] = KvCacheRetentionConfig.of_whole_request(hints.retention_priority)
        return self._llm.generate_async(inputs, sampling_params, **asked)

    def pause(self, result: Result, seconds: float) -> Awaitable[None]:
        assert isinstance(result, RequestOutput)
        return result.pause(seconds)

    def put_embedding(self, key: bytes, rows: SharedTensor) -> Awaitable[None]:
        return asyncio.wrap_future(self._llm.put_embedding(key, rows))

    def drop_embeddings(self, keys: Sequence[bytes]) -> None:
        self._llm.drop_embeddings(keys)

    def get_stats_async(self, timeout: float) -> AsyncIterator[Row]:
        return self._llm.get_stats_async(timeout)

    def get_kv_cache_events_async(self, timeout: float) -> AsyncIterator[Row]:
        return self._llm.get_kv_cache_events_async(timeout)

    def handoff_stats(self) -> HandoffTotals:
        return self._llm.handoff_stats()

    def transfer(self, output: CompletionOutput) -> Transfer | None:
        came = output.kv_transfer
        return None if came is None else Transfer(came.bytes, came.seconds, came.recomputed_because)

    def times(self, output: CompletionOutput) -> EngineTimes | None:
        return output.engine_times

    def unread_handoffs(self, rows: Iterable[Row]) -> int:
        return self._llm.handoff_stats().leases

    def device_memory_bytes(self, rows: Iterable[Row]) -> int | None:
        return self._llm.device_memory_bytes() or None  # 0 on a CPU

    async def release(self, tags: Sequence[str] | None, timeout_s: float) -> None:
        await asyncio.to_thread(self._llm.release, tags, timeout_s=timeout_s)

    async def resume(self, tags: Sequence[str] | None) -> None:
        await asyncio.to_thread(self._llm.resume, tags)

    async def update_weights(self, model: str, timeout_s: float) -> None:
        await asyncio.to_thread(self._llm.update_weights, model, timeout_s=timeout_s)

    def parked_tags(self) -> Sequence[str]:
        return list(self._llm.get_memory_status()["parked_tags"])

    def is_alive(self) -> bool:
        return self._llm._check_health()  # same name as in TensorRT-LLM

    def shutdown(self) -> None:
        self._llm.shutdown()


class TorchEncoder(Engine):
    """The embedded vision encoder, which runs in a process of its own."""

    def __init__(self, encoder: MultimodalEncoder, model: Path) -> None:
        self._encoder = encoder
        self.engine_pid = encoder.encoder_pid
        self.facts = EngineFacts(
            context_length=read_model_config(model).max_position,
            max_batch_size=encoder.args.max_batch_size,
            max_num_tokens=encoder.args.max_num_tokens,
            embedding_dtype=encoder.dtype,
            left_out=tuple(encoder.unsupported_fields),
        )

    async def encode_pixels(
        self, pixels: SharedTensor, grid: tuple[int, int, int] | None, *, on_device: bool = False
    ) -> TowerOutput:
        try:
            (made,) = await self._encoder.encode([PreparedPicture(b"", pixels, grid)], on_device=on_device)
        except RequestFailed:
            raise
        except RequestError as error:
            raise ValueError(str(error)) from error
        return TowerOutput(made.tensor, made.grid)

    def generate_async(self, inputs: list[int], sampling_params: SamplingParams, **asked: Any) -> RequestOutput:
        raise RequestError("an encode worker generates no text; send the request to a worker of another role")

    async def get_stats_async(self, timeout: float) -> AsyncIterator[Row]:
        none: tuple[Row, ...] = ()  # an encoder has no iterations
        for row in none:
            yield row

    def device_memory_bytes(self, rows: Iterable[Row]) -> int | None:
        return self._encoder.stats().device_memory_bytes or None

    def is_alive(self) -> bool:
        return self._encoder._check_health()

    def shutdown(self) -> None:
        self._encoder.shutdown()


def load_api(kind: Literal["torch", "paced"]) -> EngineApi:
    return EngineApi(
        kind=kind,
        engine_type=kind,
        start=_start_torch if kind == "torch" else _start_paced,
        SamplingParams=SamplingParams,
        DisaggregatedParams=DisaggregatedParams,
        Logprob=Logprob,
        fault=_fault,
        new_request_ids=lambda worker_id: RequestIds(worker_id).next,
        GuidedDecodingParams=GuidedDecodingParams if kind == "torch" else None,
        guides_after_thinking=kind == "torch",
        versions={"torch": metadata.version("torch")} if kind == "torch" else {},
        start_encoder=_start_encoder if kind == "torch" else None,
        missing_media=_missing_media if kind == "torch" else None,
        can_be_deterministic=kind == "torch",
    )


def _fault(error: Exception) -> Fault:
    if isinstance(error, RequestFailed):  # checked first, because it is a subclass of RequestError
        return "failed"
    return "refused" if isinstance(error, RequestError) else "unexpected"


def _missing_media(error: Exception) -> tuple[bytes, ...]:
    return error.keys if isinstance(error, MediaNeeded) else ()


def _start_torch(model: Path, config: Mapping[str, Any]) -> Engine:
    return TorchEngine(LLM(model, **config))


def _start_encoder(model: Path, config: Mapping[str, Any]) -> Engine:
    return TorchEncoder(MultimodalEncoder(model, arena_bytes=ARENA_BYTES, **config), model)


def _start_paced(model: Path, config: Mapping[str, Any]) -> Engine:
    from trtx.engine import paced

    return paced.PacedLLM(model, **config)
