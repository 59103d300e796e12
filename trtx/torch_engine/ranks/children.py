"""The other ranks as child processes of rank 0. Imports no torch, so that all ranks import torch at the same time."""

from __future__ import annotations

import pickle
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import TypeVar

from trtx.errors import UsageError
from trtx.torch_engine.handoff.codec import DirectOffer
from trtx.torch_engine.handoff.ranked import PartEnded, PartRead
from trtx.torch_engine.ranks.host_copies import CopyEnded, CopyOrder, ordered
from trtx.torch_engine.ranks.memory_requests import MEMORY, ShareDone, ShareRequest
from trtx.torch_engine.ranks.pipe import PART_READ, Pipe, RankFailed, RankReady, RankStart

_EXIT_GRACE_S = 5.0
T = TypeVar("T")


def _taken(queue: SimpleQueue[T]) -> list[T]:
    found: list[T] = []
    with suppress(Empty):
        while True:
            found.append(queue.get_nowait())
    return found


class RankProcess:
    """One of the other ranks, as a child process."""

    def __init__(self, rank: int, died: Callable[[Exception], None]) -> None:
        ours, theirs = socket.socketpair()
        self.rank = rank
        self._died = died
        self._process = subprocess.Popen(
            [sys.executable, "-m", "trtx.torch_engine.ranks.process", str(theirs.fileno())],
            pass_fds=(theirs.fileno(),),
            stdin=subprocess.DEVNULL,
        )
        theirs.close()
        self._pipe = Pipe(ours)
        self._ready: SimpleQueue[RankReady] = SimpleQueue()
        self._ended_parts: SimpleQueue[PartEnded] = SimpleQueue()
        self._shares_done: SimpleQueue[ShareDone] = SimpleQueue()
        self._ended_copies: SimpleQueue[CopyEnded] = SimpleQueue()
        self._is_closing = False
        threading.Thread(target=self._watch, name=f"rank-{rank}", daemon=True).start()

    @property
    def pid(self) -> int:
        return self._process.pid

    def start(self, start: RankStart) -> None:
        """Tells the process what to load. It is the first frame."""
        self.send(pickle.dumps(start))

    def wait_ready(self) -> RankReady:
        return self._ready.get()

    def send(self, frame: bytes) -> None:
        with suppress(OSError):  # dead already: the watcher reads its end of file
            self._pipe.send(frame)

    def ask_memory(self, request: ShareRequest) -> None:
        """Sends a request, which the next :meth:`wait_memory` answers. No step may be in flight."""
        self.send(MEMORY + pickle.dumps(request))

    def wait_memory(self) -> ShareDone:
        return self._shares_done.get()

    def order_copy(self, order: CopyOrder) -> None:
        """See :class:`trtx.torch_engine.ranks.host_copies.CopyingRank`."""
        self.send(ordered(order))

    def take_copies(self) -> list[CopyEnded]:
        return _taken(self._ended_copies)

    def take_parts(self) -> list[PartEnded]:
        """Returns the parts that ended since the last call, without blocking."""
        return _taken(self._ended_parts)

    def close(self) -> None:
        self._is_closing = True
        self._pipe.close()
        try:
            self._process.wait(_EXIT_GRACE_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _watch(self) -> None:
        while (frame := self._pipe.receive()) is not None:
            message = pickle.loads(frame)
            if isinstance(message, RankReady):
                self._ready.put(message)
            elif isinstance(message, PartEnded):
                self._ended_parts.put(message)
            elif isinstance(message, ShareDone):
                self._shares_done.put(message)
            elif isinstance(message, CopyEnded):
                self._ended_copies.put(message)
            elif isinstance(message, RankFailed):
                text = f"rank {self.rank}: {message.text}"
                self._died(UsageError(text) if message.is_usage else RuntimeError(text))
                return
        if not self._is_closing:
            code = self._process.wait()
            self._died(RuntimeError(f"rank {self.rank} ended: pid {self.pid}, exit code {code}"))


@dataclass(frozen=True, slots=True)
class ReadingRank:
    """A :class:`trtx.torch_engine.handoff.ranked.RankReader` in a child process."""

    process: RankProcess
    offer: DirectOffer

    def begin_part(self, part: PartRead) -> None:
        self.process.send(PART_READ + pickle.dumps(part))

    def take_parts(self) -> list[PartEnded]:
        return self.process.take_parts()


def start_ranks(size: int, died: Callable[[Exception], None]) -> list[RankProcess]:
    """Starts the processes of ranks 1 to ``size - 1``. Call it in a thread that lives as long as these processes should
    live.

    ``died`` is called with the reason, in its own thread, if one of them ends before :meth:`RankProcess.close`. This
    process may then wait for that rank forever, so ``died`` should end this process.
    """
    return [RankProcess(rank, died) for rank in range(1, size)]
