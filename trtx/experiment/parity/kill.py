"""Kills a worker (SIGKILL) while clients still wait for parts of their answers from it.

The progress of clients doesn't show what a worker still has to send. On a busy machine, whole answers may be in socket
buffers before a client reads the first token. Killing the worker would then interrupt nothing. The worker's engine
is therefore stopped first (SIGSTOP), and the worker forwards everything that it has. A client with a partial answer now
waits for a worker that has nothing left to send, and only then is the worker killed. If too few clients are waiting,
the engine continues for a moment, with the requests that have accumulated, and is stopped again.
"""

from __future__ import annotations

import os
import signal
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from trtx.engine.ranks import descendants
from trtx.evals.parity import Pass

# Polls without new tokens from a stopped engine: 0.4 s, or longer if this process gets little CPU time.
SETTLED_LOOKS = 20
MOST_RUNNING_LOOKS = 4  # maximum polls that an engine runs between tries: 1, 2, 3, 4, 1, …, because step lengths vary
PATIENT_TRIES = 3  # after so many tries, a single waiting client is enough


@dataclass(frozen=True, slots=True)
class Kill:
    """``open_streams``: indices of requests with a partial answer from ``worker`` at the time of the kill."""

    worker: str
    open_streams: frozenset[int]


@dataclass(frozen=True, slots=True)
class _Stopped:
    worker: int  # worker id, as in events
    pid: int
    engine: tuple[int, ...]  # pids of stopped engine processes


@dataclass(slots=True, eq=False)
class Killer:
    """Kills one worker once enough clients wait for it.

    ``names``: worker names by the ids in their events. ``pid_of``: pid of a worker by name; None: not running.
    """

    names: Mapping[int, str]
    pid_of: Callable[[str], int | None]
    osl: int  # tokens per answer
    wanted: int  # minimum number of unfinished answers
    on_kill: Callable[[Kill], None]
    kill: Kill | None = None
    tries: int = 0
    _stopped: _Stopped | None = None
    _last: int | None = None  # worker id of the last try, where requests have accumulated
    _owed: dict[int, int] = field(default_factory=dict)  # by request index: tokens received until the last poll
    _looks: int = 0  # polls since the last change

    def look(self, now: Pass) -> None:
        """Advances the procedure. Call it repeatedly while clients read."""
        if self.kill is not None:
            return
        if self._stopped is None:
            self._looks += 1
            if self._looks > (self.tries - 1) % MOST_RUNNING_LOOKS or not self.tries:
                self._stop_one(now)
            return
        worker = self._stopped.worker
        owed = {
            index: len(stream.token_ids)
            for index, stream in now.under_way.items()
            if stream.worker == worker and 0 < len(stream.token_ids) < self.osl
        }
        if owed != self._owed:
            self._owed, self._looks = owed, 0
            return
        self._looks += 1
        if self._looks < SETTLED_LOOKS:
            return
        if len(owed) < (self.wanted if self.tries < PATIENT_TRIES else 1):
            self.let_go()
            return
        _send(self._stopped.pid, signal.SIGKILL)
        self.let_go()  # the worker is dead; the resumed engine notices that and exits
        self.kill = Kill(self.names[worker], frozenset(owed))
        self.on_kill(self.kill)

    def _stop_one(self, now: Pass) -> None:
        """Stops the engine of the worker from the last try, or of the one with the most streams; none before the first
        token.
        """
        if not now.ended and not any(stream.token_ids for stream in now.under_way.values()):
            return
        known = Counter(stream.worker for stream in now.under_way.values() if stream.worker in self.names)
        for worker in sorted(self.names, key=lambda one: (one != self._last, -known[one])):
            if (pid := self.pid_of(self.names[worker])) is None:
                continue
            # The engine's processes, or the worker itself if the engine runs inside it.
            engine = tuple(one.pid for one in descendants(pid)) or (pid,)
            if all(_send(one, signal.SIGSTOP) for one in engine):
                self._stopped, self._owed, self._looks, self._last = _Stopped(worker, pid, engine), {}, 0, worker
                return
            for one in engine:
                _send(one, signal.SIGCONT)

    def let_go(self) -> None:
        """Resumes the engine that the last step stopped, if any."""
        if self._stopped is None:
            return
        for one in self._stopped.engine:
            _send(one, signal.SIGCONT)
        self._stopped, self._looks = None, 0
        self.tries += 1


def _send(pid: int, signal_number: int) -> bool:
    """Sends a signal; False if the process is gone."""
    try:
        os.kill(pid, signal_number)
    except ProcessLookupError:
        return False
    return True
