"""What a worker publishes of itself for as long as it serves: the one form of it, for who writes it and who reads it.

It rides in Dynamo's runtime data, the free part of a worker's model card (``runtime_config.runtime_data``), under the
key ``trtx``. Dynamo 1.4.2 carries it to whoever watches discovery and shows it on none of its own HTTP routes, so
``trtx.frontend`` does, at :data:`PATH`, for whoever measures a deployment that he did not start.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import msgspec

from trtx.engine.api import EngineKind

KEY = "trtx"
PATH = "/trtx/workers"
Role = Literal["agg", "prefill", "decode", "encode"]


@dataclass(frozen=True, slots=True)
class WorkerFacts:
    """None: the engine has none, or does not say."""

    name: str  # within its topology, such as decode-0
    role: Role
    engine: EngineKind
    versions: dict[str, str]  # by package: trtx, ai-dynamo, and what the engine computes with
    gpu_names: tuple[str, ...] | None  # one for each GPU that it was given; none: the CPU; None over several nodes too
    tensor_parallel_size: int
    context_length: int  # prompt and output tokens together
    max_batch_size: int | None
    max_num_tokens: int | None  # of one step
    kv_block_size: int | None  # tokens
    kv_blocks: int | None
    metrics_port: int | None = None  # where it answers /metrics, on the address that it takes requests on
    deterministic: bool = False  # its answers are the same to the bit in any batch
    gpu_uuids: tuple[str, ...] | None = None  # of gpu_names: workers may share one; None: a trtx before it told
    schema: Literal[1] = 1  # another number with a field that is gone, or means something else

    def to_runtime_data(self) -> dict[str, Any]:
        """As Dynamo takes it: plain values under our own key."""
        return {KEY: msgspec.to_builtins(self)}

    @classmethod
    def of_runtime_data(cls, runtime_data: Any) -> WorkerFacts | None:
        """None where the worker is not of trtx, or of a trtx that publishes another form."""
        if not isinstance(runtime_data, Mapping) or KEY not in runtime_data:
            return None
        try:
            return msgspec.convert(runtime_data[KEY], cls)
        except msgspec.ValidationError:
            return None


@dataclass(frozen=True, slots=True)
class PublishedWorker:
    """One entry of the list at :data:`PATH`: a registered worker of trtx."""

    worker_id: int  # Dynamo's instance id
    model: str  # the name that requests carry
    facts: WorkerFacts


def to_body(workers: Sequence[PublishedWorker]) -> Any:
    """What the frontend answers at :data:`PATH`, as plain values."""
    return msgspec.to_builtins(workers)


def of_body(body: bytes) -> tuple[PublishedWorker, ...] | None:
    """None for an answer that is no such list: of another server, or of a trtx with another form."""
    try:
        return msgspec.json.decode(body, type=tuple[PublishedWorker, ...])
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None
