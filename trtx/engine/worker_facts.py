"""The facts that a worker publishes while it serves; the format for both the worker and its readers.

They are stored in Dynamo's runtime data, the free-form part of a worker's model card (``runtime_config.runtime_data``),
under the key ``trtx``. Dynamo 1.6.1 delivers runtime data to discovery clients but shows it on none of its HTTP routes,
so ``trtx.frontend`` serves it at :data:`PATH`, for clients that measure a deployment that they did not start.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import msgspec

from trtx.engine.kinds import EngineKind

KEY = "trtx"
PATH = "/trtx/workers"
Role = Literal["agg", "prefill", "decode", "encode"]


@dataclass(frozen=True, slots=True)
class WorkerFacts:
    """The facts of one worker. None: the engine has no such thing, or does not report it."""

    name: str  # within its topology, such as decode-0
    role: Role
    engine: EngineKind
    versions: dict[str, str]  # by package: trtx, ai-dynamo, and the libraries that the engine computes with
    # one per assigned GPU; empty: runs on the CPU; None: unknown, also for workers on several nodes
    gpu_names: tuple[str, ...] | None
    tensor_parallel_size: int
    context_length: int  # prompt and output tokens together
    max_batch_size: int | None
    max_num_tokens: int | None  # tokens per step
    kv_block_size: int | None  # tokens
    kv_blocks: int | None
    metrics_port: int | None = None  # port of /metrics, on the address where the worker takes requests
    deterministic: bool = False  # answers are bit-identical in any batch
    # UUIDs of gpu_names, because workers may share a GPU; None: an older trtx that did not publish them
    gpu_uuids: tuple[str, ...] | None = None
    schema: Literal[1] = 1  # rises when a field is removed or changes its meaning

    def to_runtime_data(self) -> dict[str, Any]:
        """The facts as plain values under trtx's own key, in the form that Dynamo accepts."""
        return {KEY: msgspec.to_builtins(self)}

    @classmethod
    def of_runtime_data(cls, runtime_data: Any) -> WorkerFacts | None:
        """Parses ``runtime_data``. None if the worker is not trtx's, or a trtx with another format."""
        if not isinstance(runtime_data, Mapping) or KEY not in runtime_data:
            return None
        try:
            return msgspec.convert(runtime_data[KEY], WorkerFacts)
        except msgspec.ValidationError:
            return None


@dataclass(frozen=True, slots=True)
class PublishedWorker:
    """One entry of the list at :data:`PATH`: a registered trtx worker."""

    worker_id: int  # Dynamo's instance id
    model: str  # the model name in requests
    facts: WorkerFacts


def to_body(workers: Sequence[PublishedWorker]) -> Any:
    """The frontend's response at :data:`PATH`, as plain values."""
    return msgspec.to_builtins(workers)


def of_body(body: bytes) -> tuple[PublishedWorker, ...] | None:
    """Parses a response of :data:`PATH`. None if it is another server's, or a trtx's with another format."""
    try:
        return msgspec.json.decode(body, type=tuple[PublishedWorker, ...])
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None


# The first use of this type happens here, in the importing thread: see trtx.torch_engine.llm_args.
msgspec.json.Decoder(tuple[PublishedWorker, ...])
