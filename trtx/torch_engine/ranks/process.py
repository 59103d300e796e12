"""The process of a rank other than 0: ``python -m trtx.torch_engine.ranks.process <fd>``, started by rank 0.

It follows the plans from the socket. End of file means that rank 0 is gone. This process then ends at once, even in a
collective.
"""

from __future__ import annotations

import gc
import os
import pickle
import select
import socket
import sys
import threading
import traceback
from collections import deque
from pathlib import Path
from typing import TYPE_CHECKING

from trtx.errors import UsageError
from trtx.garbage import nothing_of_it_is_garbage
from trtx.torch_engine.parent import die_with_parent
from trtx.torch_engine.ranks.host_copies import COPIES
from trtx.torch_engine.ranks.memory_requests import MEMORY
from trtx.torch_engine.ranks.pipe import PART_READ, Pipe, RankFailed, RankReady, RankStart
from trtx.torch_engine.ranks.plans import PlanReader
from trtx.torch_engine.step import LaunchedStep

if TYPE_CHECKING:
    from trtx.torch_engine.ranks.share_memory import ShareMemory
    from trtx.torch_engine.runner import TorchRunner

_COPY_POLL_MS = 1


def main() -> None:
    die_with_parent()
    pipe = Pipe(socket.socket(fileno=int(sys.argv[1])))
    threading.Thread(target=_exit_with, args=(pipe,), name="rank-0", daemon=True).start()
    try:
        _follow(pipe)
    except UsageError as error:
        _end(pipe, RankFailed(str(error), is_usage=True))
    except BaseException as error:
        traceback.print_exc()
        _end(pipe, RankFailed(f"{type(error).__name__}: {error}", is_usage=False))
    os._exit(0)


def _exit_with(pipe: Pipe) -> None:
    """Waits until the other end is closed, and ends this process."""
    waits = select.poll()
    waits.register(pipe.fileno(), select.POLLRDHUP)
    waits.poll()
    os._exit(0)


def _end(pipe: Pipe, failed: RankFailed) -> None:
    pipe.send(pickle.dumps(failed))
    sys.stderr.flush()
    os._exit(1)  # no destructor may hang on a device in an unknown state


def _follow(pipe: Pipe) -> None:
    import torch  # noqa: F401 - while rank 0 imports it too

    from trtx.torch_engine.ranks.share_memory import OfferedPool, ShareMemory

    first = pipe.receive()
    if first is None:
        return
    start: RankStart = pickle.loads(first)
    with nothing_of_it_is_garbage():
        runner = _create(start)
        pool = OfferedPool(runner, lambda ended: pipe.send(pickle.dumps(ended))) if start.hands_off else None
        offer = pool.open() if pool is not None else None
        memory = ShareMemory(runner, pool, lambda ended: pipe.send(pickle.dumps(ended)))
        gc.collect()
    pipe.send(pickle.dumps(RankReady(offer)))
    plans, launched = PlanReader(start.args.max_batch_size), deque[LaunchedStep]()
    while (frame := _next(pipe, memory)) is not None:
        if frame.startswith(PART_READ):
            assert pool is not None and pool.parts is not None
            pool.parts.begin(pickle.loads(frame[len(PART_READ) :]))
            continue
        if frame.startswith(COPIES):
            assert memory.copies is not None
            memory.copies.do(pickle.loads(frame[len(COPIES) :]))
            continue
        if frame.startswith(MEMORY):
            while launched:
                launched.popleft().results()
            pipe.send(pickle.dumps(memory.handle(pickle.loads(frame[len(MEMORY) :]))))
            continue
        launched.append(runner.launch(plans.read(frame)))
        if len(launched) > 1:  # as rank 0 does, which launches at most one step ahead
            launched.popleft().results()


def _next(pipe: Pipe, memory: ShareMemory) -> bytes | None:
    """Returns the next frame. Until it comes, reports the copies of the host tier that end."""
    while memory.copies is not None and memory.copies.report() and not pipe.waits(_COPY_POLL_MS):
        pass
    return pipe.receive()


def _create(start: RankStart) -> TorchRunner:
    from trtx.torch_engine.device import resolve_device
    from trtx.torch_engine.ranks.group import DistributedGroup
    from trtx.torch_engine.runner import create_runner

    args = start.args
    group = DistributedGroup.join_at(
        Path(start.meeting),
        start.rank,
        start.size,
        resolve_device(args.device),
        ordered=args.deterministic,
        reads_peers=args.reads_peers,
    )
    return create_runner(args, group)


if __name__ == "__main__":
    main()
