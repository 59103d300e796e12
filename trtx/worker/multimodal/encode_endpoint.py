"""Client for the encode workers of this topology, over Dynamo's request plane.

Dynamo 1.6.1's frontend asks an encode worker once for a whole request and serves nothing without one, and
``LLMEngine`` has no client. So the worker opens a second Dynamo runtime in its process.
"""

from __future__ import annotations

import asyncio
import os
import uuid
from collections.abc import Mapping, Sequence
from typing import Any

from dynamo._core import Context
from dynamo.common.utils.namespace import get_worker_namespace
from dynamo.runtime import DistributedRuntime

from trtx.worker.requests.disconnects import CLIENT_REQUEST

SILENCE_SECONDS = 3.0
"""Timeout after which an encode worker counts as dead or stopped.

A busy encode worker sends an empty chunk every HEARTBEAT_SECONDS, from an event loop that neither decodes nor encodes.
"""
HEARTBEAT_SECONDS = 0.5
ASKED = "trtx_encode"
"""Key in ``extra_args``, the only part of Dynamo's request that Dynamo passes on unchanged."""


class EncodeEndpoint:
    """Sends requests to encode workers. Use it on the event loop that called :meth:`open`."""

    def __init__(
        self, runtime: DistributedRuntime, client: Any, model: str, *, silence_s: float = SILENCE_SECONDS
    ) -> None:
        self._runtime, self._client, self._model = runtime, client, model
        self._silence_s = silence_s

    @classmethod
    async def open(cls, model: str) -> EncodeEndpoint:
        """Opens the runtime and the client. ``model``: the name under which the topology serves the model."""
        port = os.environ.pop("DYN_SYSTEM_PORT", None)  # the worker's first runtime listens on this port
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
        """The ``encoder_result`` of encode worker ``worker_id``.

        Raises TimeoutError if the worker falls silent, and Dynamo's errors if it does not answer. On timeout or
        cancellation, asks the encode worker to stop. The encode worker's spans belong to the client's trace.
        """
        client_request = CLIENT_REQUEST.get(None)
        # An id of its own: a request with several images asks several times.
        context = Context() if client_request is None else client_request.detached(str(uuid.uuid4()))
        request = {
            "model": self._model,
            "token_ids": [0],  # Dynamo's request needs a prompt; the encode worker ignores it
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
            raise TimeoutError(f"it sent nothing for {self._silence_s:g} s") from None
        except asyncio.CancelledError:
            context.stop_generating()
            raise
        raise ConnectionError("it ended without an answer")

    def close(self) -> None:
        self._runtime.shutdown()
