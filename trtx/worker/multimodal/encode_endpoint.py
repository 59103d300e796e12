"""The encode workers of this topology, asked through Dynamo's request plane.

Dynamo 1.4.2's frontend never asks them, and ``LLMEngine`` has no client: the worker opens a runtime of its own, a
second one in its process.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping, Sequence
from typing import Any

from dynamo._core import Context
from dynamo.common.utils.namespace import get_worker_namespace
from dynamo.runtime import DistributedRuntime

SILENCE_SECONDS = 3.0
"""After which an encode worker is held to be dead or stopped: one that is busy says so each HEARTBEAT_SECONDS, from an
event loop that neither decodes nor encodes."""
HEARTBEAT_SECONDS = 0.5
ASKED = "trtx_encode"
"""Of ``extra_args``: the one part of Dynamo's request that it hands on as it is."""


class EncodeEndpoint:
    """Where a worker asks for embeddings. :meth:`open` it on the loop that asks."""

    def __init__(
        self, runtime: DistributedRuntime, client: Any, model: str, *, silence_s: float = SILENCE_SECONDS
    ) -> None:
        self._runtime, self._client, self._model = runtime, client, model
        self._silence_s = silence_s

    @classmethod
    async def open(cls, model: str) -> EncodeEndpoint:
        """``model``: the name that the topology serves."""
        port = os.environ.pop("DYN_SYSTEM_PORT", None)  # the other runtime listens there
        try:
            runtime = DistributedRuntime(
                asyncio.get_running_loop(),
                os.environ.get("DYN_DISCOVERY_BACKEND", "file"),
                os.environ.get("DYN_REQUEST_PLANE", "tcp"),
                event_plane=os.environ.get("DYN_EVENT_PLANE", "zmq"),
            )
        finally:
            if port is not None:
                os.environ["DYN_SYSTEM_PORT"] = port
        client = await runtime.endpoint(f"{get_worker_namespace()}.encode.generate").client()
        return cls(runtime, client, model)

    def ids(self) -> Sequence[int]:
        return tuple(self._client.instance_ids())

    async def ask(self, worker_id: int, question: Mapping[str, Any]) -> Mapping[str, Any]:
        """Its ``encoder_result``. Raises TimeoutError where it falls silent, and what Dynamo does where it does not
        answer. Of a question that is given up the worker is told."""
        context = Context()
        request = {
            "model": self._model,
            "token_ids": [0],  # of a prompt that nobody reads: Dynamo's request has one
            "stop_conditions": {},
            "sampling_options": {},
            "output_options": {},
            "eos_token_ids": [],
            "annotations": [],
            "extra_args": {ASKED: dict(question)},
        }
        try:
            async with asyncio.timeout(self._silence_s) as silence:
                async for chunk in await self._client.direct(request, worker_id, context=context):
                    if (found := (chunk.data() or {}).get("encoder_result")) is not None:
                        return dict(found)
                    silence.reschedule(asyncio.get_running_loop().time() + self._silence_s)
        except TimeoutError:
            context.stop_generating()
            raise TimeoutError(f"it said nothing for {self._silence_s:g} s") from None
        except asyncio.CancelledError:
            context.stop_generating()
            raise
        raise ConnectionError("it ended without an answer")

    def close(self) -> None:
        self._runtime.shutdown()
