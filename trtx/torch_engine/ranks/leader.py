"""Rank 0's end: a runner of its own share of the model that first sends each step's plan to the other ranks."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from trtx.checkpoint.model_config import read_model_config
from trtx.checkpoint.tensor_parallel import RankSizes, check_ranks
from trtx.errors import UsageError
from trtx.ipc.shared_tensor import SharedTensor
from trtx.torch_engine.block_copies import BlockCopies
from trtx.torch_engine.device import resolve_device
from trtx.torch_engine.drafting import DraftModel
from trtx.torch_engine.handoff.head_share import HeadShares
from trtx.torch_engine.handoff.ranked import KvRanks
from trtx.torch_engine.messages import MemoryTag, SharedCopy
from trtx.torch_engine.ranks.children import RankProcess, ReadingRank
from trtx.torch_engine.ranks.group import DistributedGroup
from trtx.torch_engine.ranks.host_copies import RankedBlockCopies
from trtx.torch_engine.ranks.memory_requests import (
    CloseHostPool,
    EndUpdate,
    OpenHostPool,
    ReadShare,
    ReleaseShare,
    RestoreShare,
    ShareRequest,
)
from trtx.torch_engine.ranks.pipe import RankStart
from trtx.torch_engine.ranks.plans import PlanWriter
from trtx.torch_engine.runner import RunnerArgs, TorchRunner, create_runner
from trtx.torch_engine.runner.host_copies import create_host_copies, pools_of
from trtx.torch_engine.runner.runner_memory import NewWeights
from trtx.torch_engine.step import Batch, ExpertBalance, LaunchedStep, StepEmbedding


@dataclass(frozen=True, slots=True)
class _Done:
    """How the ranks did what was asked of them."""

    problems: dict[int, str]  # by rank, in their order; ranks that did it are left out

    def raise_first(self) -> None:
        """Raises UsageError with the problem of the first rank that has one."""
        for problem in self.problems.values():
            raise UsageError(problem)


class LeadingRunner:
    """A :class:`trtx.torch_engine.step.ModelRunner`: rank 0's runner, which the other ranks follow."""

    def __init__(
        self, own: TorchRunner, ranks: list[RankProcess], group: DistributedGroup, directory: Path, max_batch_size: int,
        kv_ranks: KvRanks,
    ) -> None:  # fmt: skip
        """``directory``: has the group's files; removed at the end."""
        self._own = own
        self.ranks = ranks  # in order, from rank 1 on
        self.kv_ranks = kv_ranks
        self._group = group
        self._directory = directory
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
        self.shared_weights: SharedCopy | None = None
        # Of rank 0 alone: a plan has its guesses, so the other ranks verify them without it.
        self.draft_model: DraftModel | None = own.draft_model

    @property
    def graph_misses(self) -> int | None:
        return self._own.graph_misses

    @property
    def expert_balance(self) -> ExpertBalance | None:
        return self._own.expert_balance

    def launch(self, batch: Batch) -> LaunchedStep:
        plan = self._plans.write(batch)
        for rank in self.ranks:
            rank.send(plan)
        return self._own.launch(batch)

    def load_embedding(self, shared: SharedTensor) -> StepEmbedding:
        raise ValueError("the model takes no images")

    def release(self, tags: Collection[MemoryTag]) -> None:
        self._on_ranks(ReleaseShare(tuple(tags)), lambda: self._own.release(tags)).raise_first()

    def restore(self, tags: Collection[MemoryTag]) -> None:
        done = self._on_ranks(RestoreShare(tuple(tags)), lambda: self._own.restore(tags))
        if done.problems:  # all ranks or none
            awake = set(range(1 + len(self.ranks))) - done.problems.keys()
            self._on_ranks(ReleaseShare(tuple(tags)), lambda: self._own.release(tags), awake)
        done.raise_first()
        self.geometry = self._own.geometry

    def update_weights(self, model_dir: Path) -> None:
        read: list[NewWeights] = []
        done = self._on_ranks(ReadShare(str(model_dir)), lambda: read.append(self._own.memory.read_weights(model_dir)))
        if done.problems:
            self._on_ranks(EndUpdate(replaces=False), lambda: None)
        done.raise_first()
        self._on_ranks(EndUpdate(replaces=True), lambda: self._own.replace_weights(read[0])).raise_first()
        self.geometry = self._own.geometry

    def create_host_copies(self, num_bytes: int) -> RankedBlockCopies:
        """Allocates ``num_bytes`` of host memory at each rank, for blocks that are evicted from its pool.

        Raises UsageError if a rank can't; the engine can't start then.
        """
        own: list[BlockCopies] = []
        pools, block_bytes = pools_of(self), self.geometry.block_bytes
        # Rank 0 alone has the draft model, so its blocks are larger; the others take no memory for more blocks.
        of_others = num_bytes // sum(pool[0].nbytes for pool in pools) * block_bytes
        done = self._on_ranks(
            OpenHostPool(of_others),
            lambda: own.append(create_host_copies(pools, num_bytes, len(self.geometry.groups))),
        )
        done.raise_first()
        return RankedBlockCopies(
            own[0], self.ranks, block_bytes, lambda: self._on_ranks(CloseHostPool(), lambda: None).raise_first()
        )

    def _on_ranks(self, request: ShareRequest, own: Callable[[], None], among: Collection[int] | None = None) -> _Done:
        """Does the same on all ranks at once, or on those ``among`` them; ``own`` is rank 0's part."""
        others = [rank for rank in self.ranks if among is None or rank.rank in among]
        problems: dict[int, str] = {}
        for rank in others:
            rank.ask_memory(request)
        if among is None or 0 in among:
            try:
                own()
            except UsageError as error:
                problems[0] = str(error)
        readers = []
        for rank in others:
            answer = rank.wait_memory()
            if answer.problem:
                problems[rank.rank] = f"rank {rank.rank}: {answer.problem}"
            if answer.offer is not None:
                readers.append(ReadingRank(rank, answer.offer))
        if len(readers) == len(self.ranks):
            self.kv_ranks = replace(self.kv_ranks, readers=readers)
        return _Done(problems)

    def device_memory_bytes(self) -> int:
        """Bytes on rank 0's device. Each other rank holds as many on its own device."""
        return self._own.device_memory_bytes()

    def close(self) -> None:
        self._own.close()  # its CUDA graphs use the group
        for rank in self.ranks:
            rank.close()
        self._group.close()
        shutil.rmtree(self._directory, ignore_errors=True)


def create_ranked_runner(args: RunnerArgs, ranks: list[RankProcess], *, hands_off: bool = False) -> LeadingRunner:
    """Creates the runner of rank 0, which leads the other ``ranks`` and closes them when it is closed.

    ``ranks``: the result of :func:`start_ranks`. ``hands_off``: KV moves between these ranks and other engines. Raises
    UsageError if the model can't be split over the ranks, or if there are fewer GPUs than ranks; ``ranks`` are closed
    then.
    """
    directory = Path(tempfile.mkdtemp(prefix="trtx-ranks-"))  # in TMPDIR, which is removed with the topology
    try:
        return _create(args, ranks, directory, hands_off=hands_off)
    except BaseException:
        for rank in ranks:
            rank.close()
        shutil.rmtree(directory, ignore_errors=True)
        raise


def _create(args: RunnerArgs, ranks: list[RankProcess], directory: Path, *, hands_off: bool) -> LeadingRunner:
    size, meeting = 1 + len(ranks), directory / "meeting"
    config = read_model_config(args.model_dir)
    check_ranks(config, RankSizes(size, args.moe_expert_parallel_size))
    if args.cpu_threads is None:
        args = replace(args, cpu_threads=max(1, torch.get_num_threads() // size))
    if (is_gpu := resolve_device(args.device).type == "cuda") and (found := torch.cuda.device_count()) < size:
        raise UsageError(
            f"tensor_parallel_size is {size}, and {found} GPU{'s are' if found > 1 else ' is'} visible to this "
            "engine; expected one for each rank: lower --tp, or name more GPUs with --gpus"
        )
    for rank in ranks:
        own = replace(args, device=f"cuda:{rank.rank}" if is_gpu else "cpu", guided=False, draft=None)
        rank.start(RankStart(own, rank.rank, size, str(meeting), hands_off))
    args = replace(args, device="cuda:0" if is_gpu else "cpu")
    device = resolve_device(args.device)
    group = DistributedGroup.join_at(meeting, 0, size, device, ordered=args.deterministic, reads_peers=args.reads_peers)
    runner = create_runner(args, group)
    offers = [rank.wait_ready().offer for rank in ranks]
    readers = [ReadingRank(rank, offer) for rank, offer in zip(ranks, offers, strict=True) if offer is not None]
    kv_ranks = KvRanks(HeadShares(config.num_kv_heads, size), readers)
    return LeadingRunner(runner, ranks, group, directory, args.max_batch_size, kv_ranks)
