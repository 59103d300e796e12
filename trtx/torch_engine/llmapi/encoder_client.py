"""The open items of one encoder process, and how they end."""

from __future__ import annotations

import itertools
import threading
from concurrent.futures import Future
from contextlib import suppress

from trtx.ipc.child_messages import Shutdown
from trtx.ipc.encoder_messages import (
    Cancel,
    Encode,
    Encoded,
    EncoderArgs,
    EncoderReady,
    EncoderStart,
    EncoderStats,
    FromEncoder,
    Grid,
)
from trtx.ipc.shared_tensor import SharedTensor, remove_shared
from trtx.torch_engine.llmapi.child import EXIT_GRACE_S, ChildProcess
from trtx.torch_engine.llmapi.request_errors import RequestError, RequestFailed

MAX_OPEN_ITEMS = 4096
"""Each open item keeps its pixels on disk: 150 KB for LLaVA, up to 77 MB for Qwen."""


class EncoderClient:
    """One encoder process. Every open item ends: with its rows, with its error, or with the process's death."""

    def __init__(self, args: EncoderArgs) -> None:
        self.stats = EncoderStats(0, 0, 0, 0.0, 0)
        self._lock = threading.Lock()
        self._ids = itertools.count(1)
        self._open: dict[int, Future[Encoded]] = {}
        self._child: ChildProcess[FromEncoder] = ChildProcess(
            module="trtx.torch_engine.vision.process",
            title="encoder",
            first=EncoderStart(args),
            accepts=FromEncoder,
            take=self._take,
            buried=self._bury,
        )
        self.ready: Future[EncoderReady] = self._child.ready
        self._child.start()

    @property
    def pid(self) -> int:
        return self._child.pid

    @property
    def is_healthy(self) -> bool:
        return self._child.is_healthy

    @property
    def num_open(self) -> int:
        return len(self._open)

    def submit(self, pixels: SharedTensor, grid: Grid | None, *, on_device: bool = False) -> Future[Encoded]:
        """Sends an item. The future's result is its ``Encoded`` message, with ``rows``.

        If the future was cancelled, the resulting file is removed here. Raises RuntimeError if the encoder is gone,
        RequestFailed if too many items are open.
        """
        answer: Future[Encoded] = Future()
        with self._lock:
            if len(self._open) >= MAX_OPEN_ITEMS:
                raise RequestFailed(f"the encoder's queue is full with {MAX_OPEN_ITEMS} images; try again later")
            item_id = next(self._ids)
            self._open[item_id] = answer
        try:
            self._child.send(Encode(item_id, pixels, grid, on_device))
        except OSError:
            with self._lock:
                self._open.pop(item_id, None)
            raise self._child.death_notice() from None
        answer.add_done_callback(lambda ended: self._cancel(item_id) if ended.cancelled() else None)
        return answer

    def _cancel(self, item_id: int) -> None:
        with suppress(OSError):  # dead: nothing left to cancel
            self._child.send(Cancel([item_id]))

    def shutdown(self, timeout_s: float = EXIT_GRACE_S) -> None:
        """Ends the process; open items end with RuntimeError. Idempotent."""
        self._child.shutdown(Shutdown(), timeout_s)

    # --- in the threads of the child ---

    def _bury(self, death: RuntimeError) -> None:
        with self._lock:
            left, self._open = self._open, {}
        for answer in left.values():
            if answer.set_running_or_notify_cancel():
                answer.set_exception(death)

    def _take(self, message: FromEncoder) -> None:
        if isinstance(message, Encoded):
            self._end(message)
        elif isinstance(message, EncoderStats):
            self.stats = message
        elif isinstance(message, EncoderReady):
            self.stats = EncoderStats(0, 0, 0, 0.0, message.device_memory_bytes)
            self.ready.set_result(message)

    def _end(self, message: Encoded) -> None:
        with self._lock:
            answer = self._open.pop(message.item_id)
        if not answer.set_running_or_notify_cancel():
            if message.rows is not None:
                remove_shared(message.rows)
        elif message.rows is None:
            kind = RequestFailed if message.is_failure else RequestError
            answer.set_exception(kind(message.error or "the encoder gave neither rows nor an error"))
        else:
            answer.set_result(message)
