"""Rank 0's end: starts the other ranks, and runs its own share with every step's plan sent to them first."""

from __future__ import annotations

import pickle
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import torch

from trtx.checkpoint.model_config import read_model_config
from trtx.checkpoint.tensor_parallel import check_ranks
from trtx.errors import UsageError
from trtx.ipc.shared_tensor import SharedTensor
from trtx.torch_engine.device import resolve_device
from trtx.torch_engine.ranks.group import DistributedGroup
from trtx.torch_engine.ranks.pipe import Pipe, RankFailed, RankReady, RankStart
from trtx.torch_engine.ranks.plans import PlanWriter
from trtx.torch_engine.runner import RunnerArgs, TorchRunner, create_runner
from trtx.torch_engine.step import Batch, LaunchedStep, StepEmbedding

_EXIT_GRACE_S = 5.0


class Rank:
    """One of the other ranks, as a child process."""

    def __init__(self, start: RankStart, died: Callable[[Exception], None]) -> None:
        ours, theirs = socket.socketpair()
        self.rank = start.rank
        self._died = died
        self._process = subprocess.Popen(
            [sys.executable, "-m", "trtx.torch_engine.ranks.process", str(theirs.fileno())],
            pass_fds=(theirs.fileno(),),
            stdin=subprocess.DEVNULL,
        )
        theirs.close()
        self._pipe = Pipe(ours)
        self._ready = threading.Event()
        self._is_closing = False
        with suppress(OSError):  # dead already: the watcher reads its end of file
            self._pipe.send(pickle.dumps(start))
        threading.Thread(target=self._watch, name=f"rank-{start.rank}", daemon=True).start()

    @property
    def pid(self) -> int:
        return self._process.pid

    def wait_ready(self) -> None:
        self._ready.wait()

    def send(self, plan: bytes) -> None:
        with suppress(OSError):  # the watcher reads its end of file
            self._pipe.send(plan)

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
                self._ready.set()
            elif isinstance(message, RankFailed):
                text = f"rank {self.rank}: {message.text}"
                self._died(UsageError(text) if message.is_usage else RuntimeError(text))
                return
        if not self._is_closing:
            code = self._process.wait()
            self._died(
                RuntimeError(f"rank {self.rank} ended: pid {self.pid}, exit code {code}; the log above has the rest")
            )


class LeadingRunner:
    """A :class:`trtx.torch_engine.step.ModelRunner`: rank 0's runner, which the other ranks follow."""

    def __init__(self, own: TorchRunner, ranks: list[Rank], group: DistributedGroup, max_batch_size: int) -> None:
        self._own = own
        self.ranks = ranks
        self._group = group
        self._plans = PlanWriter(max_batch_size)
        self.geometry = own.geometry
        self.num_blocks = own.num_blocks
        self.pool = own.pool
        self.max_position = own.max_position
        self.vocab_size = own.vocab_size
        self.needs_grids = own.needs_grids
        self.paced_steps = own.paced_steps
        self.is_asynchronous = own.is_asynchronous
        self.masks = own.masks

    @property
    def graph_misses(self) -> int | None:
        return self._own.graph_misses

    def launch(self, batch: Batch) -> LaunchedStep:
        plan = self._plans.write(batch)
        for rank in self.ranks:
            rank.send(plan)
        return self._own.launch(batch)

    def load_embedding(self, shared: SharedTensor) -> StepEmbedding:
        raise ValueError("the model takes no images")

    def device_memory_bytes(self) -> int:
        """Bytes on rank 0's device. The other ranks hold as much on theirs."""
        return self._own.device_memory_bytes()

    def close(self) -> None:
        for rank in self.ranks:
            rank.close()
        self._group.close()
        self._own.close()


def create_ranked_runner(args: RunnerArgs, size: int, died: Callable[[Exception], None]) -> LeadingRunner:
    """Creates a runner of ``size`` ranks. Call it in a thread that lives as long as the runner.

    ``died`` gets the reason if another rank ends before :meth:`LeadingRunner.close`, in a thread of its own. This
    process may then wait for that rank forever, so ``died`` should end it. Raises UsageError for a model that can't be
    split over ``size`` ranks, and for fewer GPUs.
    """
    check_ranks(read_model_config(args.model_dir), size)
    if args.cpu_threads is None:
        args = replace(args, cpu_threads=max(1, torch.get_num_threads() // size))
    if (is_gpu := resolve_device(args.device).type == "cuda") and (found := torch.cuda.device_count()) < size:
        raise UsageError(
            f"tensor_parallel_size is {size}, and {found} GPU{'s are' if found > 1 else ' is'} visible to this "
            f"engine; expected one for each rank: lower --tp, or name more GPUs with --gpus"
        )
    own = [
        replace(args, device=f"cuda:{rank}" if is_gpu else "cpu", guided=args.guided and not rank)
        for rank in range(size)
    ]
    directory = Path(tempfile.mkdtemp(prefix="trtx-ranks-"))
    try:
        meeting = directory / "meeting"
        ranks = [Rank(RankStart(own[rank], rank, size, str(meeting)), died) for rank in range(1, size)]
        device = resolve_device(own[0].device)
        group = DistributedGroup.join_at(
            meeting, 0, size, device, ordered=args.deterministic, reads_peers=args.reads_peers
        )
        runner = create_runner(own[0], group)
        for rank in ranks:
            rank.wait_ready()
    finally:
        shutil.rmtree(directory, ignore_errors=True)
    return LeadingRunner(runner, ranks, group, args.max_batch_size)
