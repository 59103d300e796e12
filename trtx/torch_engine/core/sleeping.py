"""Sleep, wake and weight updates of an engine, between two steps.

A request waits until no sequence is open and no handoff is unread. Sequences that arrive in the meantime are held until
the request is done. While memory is released, new sequences are refused.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from pathlib import Path

from trtx.errors import UsageError
from trtx.torch_engine.core.engine_core import EngineCore
from trtx.torch_engine.core.logits_processors import LoadedProcessors
from trtx.torch_engine.handoff import KvTransport
from trtx.torch_engine.messages import (
    MEMORY_TAGS,
    MemoryDone,
    MemoryRequest,
    MemoryTag,
    ReleaseMemory,
    ResumeMemory,
    StepReport,
    Submit,
    Update,
    UpdateWeights,
)

logger = logging.getLogger(__name__)

DRAIN_POLL_S = 0.01


class Parking:
    """Handles one :data:`MemoryRequest` after the other; each gets one answer."""

    def __init__(
        self,
        core: EngineCore,
        *,
        can_sleep: bool,
        new_transport: Callable[[], KvTransport] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``new_transport``: registers the pool anew for handoffs; None without handoffs."""
        self._core = core
        self._new_transport = new_transport
        self._can_sleep = can_sleep
        self._clock = clock
        self._parked: set[MemoryTag] = set()
        self._waiting: list[tuple[MemoryRequest, float]] = []  # with their deadlines
        self._held: dict[int, tuple[Submit, LoadedProcessors | None]] = {}  # by sequence id, in order of arrival

    def add(self, request: MemoryRequest) -> None:
        timeout_s = 0.0 if isinstance(request, ResumeMemory) else request.timeout_s
        self._waiting.append((request, self._clock() + timeout_s))

    @property
    def wait_s(self) -> float | None:
        """Seconds that the loop may sleep; None: no limit."""
        return DRAIN_POLL_S if self._waiting else None

    def submit(self, submit: Submit, processors: LoadedProcessors | None = None) -> StepReport | None:
        """Gives a sequence to the engine, holds it while a request waits, or returns its refusal."""
        if self._waiting:
            self._held[submit.sequence_id] = submit, processors
        elif self._parked:
            because = f"the engine is asleep: {', '.join(self._tags)} released; wake it first"
            return StepReport([Update(submit.sequence_id, [], error=because, is_failure=True)])
        else:
            self._core.submit(submit, processors)
        return None

    def abort(self, sequence_ids: list[int]) -> StepReport | None:
        """Aborts sequences of the engine. Returns the last updates of the held sequences among them."""
        self._core.abort(sequence_ids)
        held = [sequence_id for sequence_id in sequence_ids if self._held.pop(sequence_id, None) is not None]
        return (
            StepReport([Update(sequence_id, [], finish_reason="cancelled") for sequence_id in held]) if held else None
        )

    def act(self) -> list[MemoryDone | StepReport]:
        """Handles the oldest request if the engine is idle, or if it has waited too long. Call it between steps.

        Returns its answer, and the refusals of sequences that it held.
        """
        if not self._waiting:
            return []
        request, deadline = self._waiting[0]
        if busy := self._core.unfinished_work:
            if self._clock() < deadline:
                return []
            error = f"the engine has {busy}, and did not finish in time; try again, or allow more time"
        else:
            error = self._handle(request)
        del self._waiting[0]
        done = MemoryDone(self._tags, self._core.runner.device_memory_bytes(), error or None)
        refusals: list[StepReport | None] = []
        if not self._waiting:
            held, self._held = self._held, {}
            refusals = [self.submit(*one) for one in held.values()]
        return [done, *(refusal for refusal in refusals if refusal is not None)]

    @property
    def _tags(self) -> list[MemoryTag]:
        return [tag for tag in MEMORY_TAGS if tag in self._parked]

    def _handle(self, request: MemoryRequest) -> str:
        """Returns why the request could not be done; empty if it was done."""
        began = time.monotonic()
        try:
            if isinstance(request, ReleaseMemory):
                problem = self._release(set(request.tags) - self._parked)
            elif isinstance(request, ResumeMemory):
                problem = self._resume(set(request.tags))
            else:
                problem = self._update(request)
        except UsageError as error:
            problem = str(error)
        if not problem:
            logger.warning(
                "%s in %.3f s, released now: %s",
                type(request).__name__, time.monotonic() - began, ", ".join(self._tags) or "nothing",
            )  # fmt: skip
        return problem

    def _release(self, tags: set[MemoryTag]) -> str:
        if not self._can_sleep:
            return "this engine can't sleep, because it was started without sleep_config; start it with one"
        if tags:
            self._core.forget_cache()
            if "kv_cache" in tags:
                self._core.replace_transport(None)
            self._parked |= tags  # first: after an error in between, nothing may run
            self._core.runner.release(tags)
        return ""

    def _resume(self, tags: set[MemoryTag]) -> str:
        if not self._parked:
            return "the engine is not asleep, so there is nothing to wake"
        if awake := tags - self._parked:
            return f"{', '.join(sorted(awake))} is not released; expected {' or '.join(self._tags)}"
        self._core.runner.restore(tags)
        if "kv_cache" in tags:
            self._register_pool()
        self._parked -= tags
        return ""

    def _update(self, request: UpdateWeights) -> str:
        self._core.runner.update_weights(Path(request.model))
        self._core.forget_cache()
        if "kv_cache" not in self._parked:
            # The layout that engines compare before a handoff names the scales of a float8 pool.
            self._core.replace_transport(None)
            self._register_pool()
        return ""

    def _register_pool(self) -> None:
        if self._new_transport is not None:
            self._core.replace_transport(self._new_transport())
