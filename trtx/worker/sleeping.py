"""Controls of a worker's memory: sleep, wake, and new weights in place. Served on the worker's system port.

A worker leaves routing before its engine releases memory, and comes back once the engine has all of it again. Nothing
is released while a request or a handoff is unfinished.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable
from typing import Any

import msgspec

from trtx.engine.api import Engine
from trtx.worker.leaving import GONE_SECONDS
from trtx.worker.status import StatusFile

logger = logging.getLogger(__name__)

CONTROLS = frozenset({"release", "resume", "update_weights", "memory_status"})
"""The controls, named as in the LLM API and not ``sleep`` and ``wake_up``: around controls with those names, Dynamo
1.6.1 removes the worker from routing and adds it again, but not if the control is refused.
"""
_POLL_SECONDS = 0.02


class MemoryOrder(msgspec.Struct, forbid_unknown_fields=True):
    """Body of a control. ``tags`` None: all memory. ``model``: directory of the new weights."""

    tags: list[str] | None = None
    timeout_s: float = 30.0
    model: str | None = None


class ControlRefused(Exception):
    """A control did nothing; the text says why."""


class Sleeping:
    """Whether this worker's engine sleeps, and the controls that change it. One control runs at a time."""

    def __init__(self, name: str, engine: Engine, status: StatusFile, unfinished: Callable[[], str]) -> None:
        """``unfinished``: describes the worker's open requests and handoffs; empty if there are none."""
        self.endpoint: Any = None  # Dynamo's; it is known once the worker serves
        self.is_closed = False  # requests may not reach the engine
        self._is_routed = True
        self._name = name
        self._engine = engine
        self._status = status
        self._unfinished = unfinished
        self._lock = asyncio.Lock()

    async def control(self, control: str, body: dict[str, Any]) -> dict[str, Any]:
        """Runs one of :data:`CONTROLS`.

        Returns its answer: ``parked_tags``, the memory that is released now; ``is_routed``, whether the worker is in
        routing; and ``namespace``, which identifies the run.
        """
        try:
            order = msgspec.convert(body or {}, MemoryOrder)
            async with self._lock:
                if control == "release":
                    await self._release(order)
                elif control == "resume":
                    await self._resume(order)
                elif control == "update_weights":
                    await self._update_weights(order)
        except (ControlRefused, msgspec.ValidationError, ValueError, RuntimeError) as error:
            return {"status": "error", "message": f"{self._name}: {error}"} | self._state()
        return {"status": "ok"} | self._state()

    def _state(self) -> dict[str, Any]:
        return {
            "parked_tags": list(self._engine.parked_tags()), "is_routed": self._is_routed,
            "namespace": os.environ.get("DYN_NAMESPACE", ""),
        }  # fmt: skip

    async def _release(self, order: MemoryOrder) -> None:
        was_asleep = self.is_closed
        await self._drain(order.timeout_s)
        try:
            await self._engine.release(order.tags, order.timeout_s)
        except BaseException:
            if not was_asleep:
                await self._rejoin()
            raise
        logger.info("%s sleeps: %s released", self._name, ", ".join(self._engine.parked_tags()))

    async def _resume(self, order: MemoryOrder) -> None:
        if self._engine.parked_tags() or self._is_routed:
            await self._engine.resume(order.tags)
        if not self._engine.parked_tags():
            await self._rejoin()

    async def _update_weights(self, order: MemoryOrder) -> None:
        if order.model is None:
            raise ControlRefused("update_weights needs model, the directory of the new weights")
        was_asleep = self.is_closed
        await self._drain(order.timeout_s)
        try:
            await self._engine.update_weights(order.model, order.timeout_s)
        finally:
            if not was_asleep:
                await self._rejoin()

    async def _drain(self, timeout_s: float) -> None:
        """Leaves routing and waits for open requests and handoffs. On timeout, rejoins and raises ControlRefused."""
        if self.is_closed:
            return
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout_s
        self._status.update(state="asleep")  # the launcher would take a worker that leaves routing for a lost one
        try:
            await self.endpoint.unregister_endpoint_instance()
        except Exception as error:  # Dynamo's, of no class of their own
            self._status.update(state="serving")
            raise ControlRefused(f"it can't leave routing ({error}), so nothing was done; try again") from error
        self._is_routed = False
        await asyncio.sleep(GONE_SECONDS)  # requests that were routed here before are served
        while busy := self._unfinished():
            if loop.time() > deadline:
                await self._rejoin()
                raise ControlRefused(
                    f"{busy} after {timeout_s:g} s, so nothing was done; try again, or allow more time"
                )
            await asyncio.sleep(_POLL_SECONDS)
        self.is_closed = True

    async def _rejoin(self) -> None:
        self.is_closed = False
        try:
            await self.endpoint.register_endpoint_instance()
        except Exception as error:  # as above
            raise ControlRefused(f"it is awake, but can't come back into routing ({error}); wake it again") from error
        self._is_routed = True
        self._status.update(state="serving")


# The first use of this type happens here, in the importing thread: see trtx.torch_engine.llm_args.
msgspec.json.Decoder(MemoryOrder)
