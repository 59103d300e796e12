"""The thread in which a rank other than 0 reads parts of handed-off KV into its own pool: see ``handoff/ranked.py``."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress
from queue import Empty, SimpleQueue

from trtx.torch_engine.handoff import HandoffError, KvTransport
from trtx.torch_engine.handoff.ranked import PartEnded, PartRead

_POLL_S = 0.0002


class PartReads:
    """Reads parts while the rank's main thread follows plans."""

    def __init__(self, transport: KvTransport, report: Callable[[PartEnded], None]) -> None:
        """``transport``: for this rank's pool; only the thread uses it. ``report``: called in the thread with each
        result.
        """
        self._transport = transport
        self._report = report
        self._asked: SimpleQueue[PartRead | None] = SimpleQueue()  # None: the end
        self._open: dict[int, int] = {}  # read id -> part id
        self._thread = threading.Thread(target=self._run, name="kv-parts", daemon=True)
        self._thread.start()

    def begin(self, part: PartRead) -> None:
        self._asked.put(part)

    def close(self) -> None:
        """Ends the thread and closes the transport. All parts must have been reported."""
        self._asked.put(None)
        self._thread.join()
        self._transport.close()

    def _run(self) -> None:
        while True:
            with suppress(Empty):
                part = self._asked.get(timeout=_POLL_S if self._open else None)
                if part is None:
                    return
                self._begin(part)
            events = self._transport.poll()
            for read in events.finished:
                self._report(PartEnded(self._open.pop(read.read_id), read.num_bytes))
            for failed in events.failed:
                self._report(PartEnded(self._open.pop(failed.read_id), reason=failed.reason))

    def _begin(self, part: PartRead) -> None:
        try:
            read_id = self._transport.begin_read(part.opaque_state, part.positions, part.local_ids)
            self._open[read_id] = part.part_id
        except HandoffError as error:
            self._report(PartEnded(part.part_id, reason=str(error).partition("; ")[0]))
