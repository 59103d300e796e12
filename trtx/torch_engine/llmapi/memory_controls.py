"""Sleep, wake and weight updates of an LLM, with TensorRT-LLM's names."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trtx.errors import TrtxError
from trtx.torch_engine.llmapi.request_errors import RequestError
from trtx.torch_engine.messages import MEMORY_TAGS, MemoryTag, ReleaseMemory, ResumeMemory, SharedCopy, UpdateWeights

if TYPE_CHECKING:
    from trtx.torch_engine.llmapi.client import EngineClient

DRAIN_SECONDS = 30.0


class MemoryControls:
    """The methods of ``LLM`` that release memory and allocate it again.

    Every method waits for the open requests, and returns once it is done. It raises RequestError with one sentence if
    it did nothing. ``timeout_s`` bounds the wait.
    """

    _client: EngineClient

    @property
    def shared_weights(self) -> SharedCopy | None:
        """The weights that the engine shares with those of its ``weight_group``; None without one."""
        shared: SharedCopy | None = self._client.ready.result().shared_weights
        return shared

    def release(self, tags: Sequence[str] | None = None, *, timeout_s: float = DRAIN_SECONDS) -> None:
        """Releases the memory of ``tags``, ``kv_cache`` and ``model_weights``; None: both. Needs ``sleep_config``.

        New requests are refused until :meth:`resume`. The KV cache is emptied. Idempotent.
        """
        self._client.change_memory(ReleaseMemory(_checked(tags), timeout_s)).result()

    def resume(self, tags: Sequence[str] | None = None) -> None:
        """Allocates released memory again: that of ``tags``, or all. Raises RequestError for memory that is not
        released.
        """
        parked = self._client.parked
        self._client.change_memory(ResumeMemory(list(parked) if tags is None else _checked(tags))).result()

    def update_weights(self, model: str | Path, *, timeout_s: float = DRAIN_SECONDS) -> None:
        """Replaces the weights by those of another checkpoint of the same config, and empties the KV cache.

        ``model``: a directory, or a name that ``LLM`` accepts.
        Requests that arrive meanwhile wait. Released weights stay released, and come back with the new values.
        """
        self._client.change_memory(UpdateWeights(_directory(model), timeout_s)).result()

    def get_memory_status(self) -> dict[str, Any]:
        """``state``, "running" or "parked", and ``parked_tags``."""
        parked = list(self._client.parked)
        return {"state": "parked" if parked else "running", "parked_tags": parked}


def _directory(model: str | Path) -> str:
    if Path(model).is_dir():
        return str(model)
    from trtx.checkpoint import resolve_checkpoint

    try:
        return str(resolve_checkpoint(str(model)).path)
    except TrtxError as error:
        raise RequestError(str(error)) from error


def _checked(tags: Sequence[str] | None) -> list[MemoryTag]:
    if tags is None:
        return list(MEMORY_TAGS)
    known = [tag for tag in MEMORY_TAGS if tag in tags]
    if isinstance(tags, str) or not tags or len(known) < len(set(tags)):
        raise ValueError(f"tags is {tags!r}; expected a list of one or more of {', '.join(MEMORY_TAGS)}")
    return known
