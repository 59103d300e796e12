"""``kill -9`` of a worker while it owes its clients answers.

What clients have read says nothing of what a worker still has to send: on a busy machine a whole answer may lie in
sockets before the first token of it is looked at, and a worker that is killed then owes nothing. So its engine is
stopped first (SIGSTOP), wherever it is in its answers, until the worker has handed on what there is; a client with a
part of an answer then waits for a worker that has no more, and only then it is killed. An engine that owes too little
goes on for a moment, with the requests that have gathered meanwhile, and is stopped again.
"""

from __future__ import annotations

import os
import signal
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from trtx.engine.ranks import descendants
from trtx.evals.parity import Pass

SETTLED_LOOKS = 20  # in which nothing came of a stopped engine: 0.4 s, or longer where this process is starved
MOST_RUNNING_LOOKS = 4  # that an engine goes on for between two tries: 1, 2, 3, 4, 1, …, as its steps are of any length
PATIENT_TRIES = 3  # after which one answer that is owed is enough


@dataclass(frozen=True, slots=True)
class Kill:
    """``open_streams``: the requests whose clients had a part of their answer from ``worker``, and waited for more."""

    worker: str
    open_streams: frozenset[int]


@dataclass(frozen=True, slots=True)
class _Stopped:
    worker: int  # its id as in events
    pid: int
    engine: tuple[int, ...]  # pids of what is stopped of it


@dataclass(slots=True, eq=False)
class Killer:
    """Ends one worker that owes so many answers.

    ``names``: of workers, by the ids that their events carry. ``pid_of``: of a name; None: it runs no more.
    """

    names: Mapping[int, str]
    pid_of: Callable[[str], int | None]
    osl: int  # tokens of an answer
    wanted: int  # answers that it owes
    on_kill: Callable[[Kill], None]
    kill: Kill | None = None
    tries: int = 0
    _stopped: _Stopped | None = None
    _last: int | None = None  # the worker of the last try, by its id: requests have gathered there
    _owed: dict[int, int] = field(default_factory=dict)  # by request, tokens that came of it at the last look
    _looks: int = 0  # since anything changed

    def look(self, now: Pass) -> None:
        """To be called again and again while clients read."""
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
        self.let_go()  # an engine that goes on sees that its worker is gone, and ends
        self.kill = Kill(self.names[worker], frozenset(owed))
        self.on_kill(self.kill)

    def _stop_one(self, now: Pass) -> None:
        """The one that was stopped before, or that most streams have come from; none before the first word of any."""
        if not now.ended and not any(stream.token_ids for stream in now.under_way.values()):
            return
        known = Counter(stream.worker for stream in now.under_way.values() if stream.worker in self.names)
        for worker in sorted(self.names, key=lambda one: (one != self._last, -known[one])):
            if (pid := self.pid_of(self.names[worker])) is None:
                continue
            # Its engine's processes; the worker itself, where the engine is within it.
            engine = tuple(one.pid for one in descendants(pid)) or (pid,)
            if all(_send(one, signal.SIGSTOP) for one in engine):
                self._stopped, self._owed, self._looks, self._last = _Stopped(worker, pid, engine), {}, 0, worker
                return
            for one in engine:
                _send(one, signal.SIGCONT)

    def let_go(self) -> None:
        """An engine that is stopped goes on."""
        if self._stopped is None:
            return
        for one in self._stopped.engine:
            _send(one, signal.SIGCONT)
        self._stopped, self._looks = None, 0
        self.tries += 1


def _send(pid: int, signal_number: int) -> bool:
    """False where it is gone."""
    try:
        os.kill(pid, signal_number)
    except ProcessLookupError:
        return False
    return True
