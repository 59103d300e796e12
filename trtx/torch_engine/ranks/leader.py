"""Rank 0's end: a runner of its own share of the model that first sends each step's plan to the other ranks."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Collection
from dataclasses import replace
from pathlib import Path

import torch

from trtx.checkpoint.model_config import read_model_config
from trtx.checkpoint.tensor_parallel import RankSizes, check_ranks
from trtx.errors import UsageError
from trtx.ipc.shared_tensor import SharedTensor
from trtx.torch_engine.device import resolve_device
from trtx.torch_engine.drafting import DraftModel
from trtx.torch_engine.handoff.head_share import HeadShares
from trtx.torch_engine.handoff.ranked import KvRanks
from trtx.torch_engine.messages import MemoryTag, SharedCopy
from trtx.torch_engine.ranks.children import RankProcess, ReadingRank
from trtx.torch_engine.ranks.group import DistributedGroup
from trtx.torch_engine.ranks.pipe import RankStart
from trtx.torch_engine.ranks.plans import PlanWriter
from trtx.torch_engine.runner import RunnerArgs, TorchRunner, create_runner
from trtx.torch_engine.step import Batch, ExpertBalance, LaunchedStep, StepEmbedding


class LeadingRunner:
    """A :class:`trtx.torch_engine.step.ModelRunner`: rank 0's runner, which the other ranks follow."""

    def __init__(
        self, own: TorchRunner, ranks: list[RankProcess], group: DistributedGroup, directory: Path, max_batch_size: int,
        kv_ranks: KvRanks,
    ) -> None:  # fmt: skip
        """``directory``: has the group's files; removed at the end."""
        self._own = own
        self.ranks = ranks
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
        raise UsageError("an engine of several GPUs can't sleep")

    def restore(self, tags: Collection[MemoryTag]) -> None:
        raise UsageError("an engine of several GPUs can't sleep")

    def update_weights(self, model_dir: Path) -> None:
        raise UsageError("the weights of an engine of several GPUs can't be replaced; start it with the new ones")

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
