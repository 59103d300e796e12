"""The share of a decoder that each rank of a tensor-parallel engine holds, and the models that can't be split."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from trtx.checkpoint.dense import checkpoint_tensors
from trtx.checkpoint.experts import ExpertConfig
from trtx.checkpoint.formats import FORMATS, FP8_BLOCK, FP8_DTYPE
from trtx.checkpoint.model_config import ModelConfig
from trtx.errors import UsageError

_MOST_RANKS = 8
_EXPERT_SIZE, _COLUMN_SIZE = "moe_expert_parallel_size", "moe_tensor_parallel_size"


@dataclass(frozen=True, slots=True)
class RankSizes:
    """How many ranks split the layers, and how the same ranks split the experts.

    ``expert_ranks`` is TensorRT-LLM's ``moe_expert_parallel_size``: each of so many ranks holds other experts. The
    number of ranks that split the columns of one expert, ``moe_tensor_parallel_size``, follows from the two. Rank r
    holds group ``r % expert_ranks`` of the experts and part ``r // expert_ranks`` of their columns, like
    ``moe_ep_rank`` and ``moe_tp_rank`` of ``Mapping`` in ``tensorrt_llm/mapping.py`` (compared at commit b35ac1b64368;
    the same at 05ebebb2c1d3). ``Mapping`` also divides by ``moe_cluster_size``, which is deprecated, and which the
    torch engine refuses.
    """

    ranks: int = 1
    expert_ranks: int = 1

    @classmethod
    def of(cls, ranks: int, moe_tensor: int | None, moe_expert: int | None) -> RankSizes:
        """Resolves the sizes of an engine config as TensorRT-LLM does. None or -1: the other one decides.

        Raises UsageError if they do not multiply to ``ranks``.
        """
        columns, experts = moe_tensor if (moe_tensor or 0) > 0 else None, moe_expert if (moe_expert or 0) > 0 else None
        if experts is None:
            experts = 1 if columns is None else max(1, ranks // columns)
        if columns is None:
            columns = max(1, ranks // experts)
        if columns * experts != ranks:
            raise UsageError(
                f"{_COLUMN_SIZE} x {_EXPERT_SIZE} is {columns} x {experts}, and tensor_parallel_size is "
                f"{ranks}; expected a product of {ranks}, because the same ranks split attention and experts"
            )
        return cls(ranks, experts)

    @property
    def expert_columns(self) -> int:
        """The number of ranks that split the columns of one expert: ``moe_tensor_parallel_size``."""
        return self.ranks // self.expert_ranks

    def held_experts(self, count: int, rank: int) -> range:
        """Returns which of ``count`` experts a rank holds."""
        held = count // self.expert_ranks
        first = rank % self.expert_ranks * held
        return range(first, first + held)

    def expert_part(self, rank: int) -> int:
        """Returns which part of its experts' columns a rank holds, from 0 to ``expert_columns``."""
        return rank // self.expert_ranks

    def __str__(self) -> str:
        return str(self.ranks) if self.expert_ranks == 1 else f"{self.ranks} (experts {self.expert_ranks})"


def rank_config(config: ModelConfig, sizes: RankSizes, rank: int = 0) -> ModelConfig:
    """Returns the shape of one rank's share: some of the heads, of the columns of every MLP, and of the experts.

    With more ranks than KV heads, each rank has one KV head, which it shares with others. Vocabulary and hidden size
    are those of the model.
    """
    experts, ranks = config.experts, sizes.ranks
    return replace(
        config,
        num_heads=config.num_heads // ranks,
        num_kv_heads=max(1, config.num_kv_heads // ranks),
        intermediate_size=config.intermediate_size // ranks,
        experts=_rank_experts(experts, sizes, rank) if experts else None,
    )


def _rank_experts(experts: ExpertConfig, sizes: RankSizes, rank: int) -> ExpertConfig:
    return replace(
        experts,
        intermediate_size=experts.intermediate_size // sizes.expert_columns,
        held=sizes.held_experts(experts.count, rank),
    )


def check_ranks(config: ModelConfig, sizes: RankSizes) -> None:
    """Raises UsageError for a model that the torch engine can't split over that many ranks."""
    if sizes.ranks == 1:
        return
    asked = f"tensor_parallel_size is {sizes.ranks}"
    if config.vision is not None:
        raise UsageError(
            f"{asked}, and {config.architecture} takes images, which the torch engine computes on one GPU; use --tp 1, "
            "or the engine tensorrt-llm"
        )
    _check_expert_ranks(config, sizes)
    problem = _obstacle(config, sizes)
    if problem:
        fitting = _fitting(lambda ranks: not _obstacle(config, RankSizes(ranks)))
        raise UsageError(f"{asked}, which does not divide {problem}; expected {fitting}")


def check_expert_sizes(config: ModelConfig, moe_tensor: int | None, moe_expert: int | None) -> None:
    """Raises UsageError if an engine config states a size of experts for a model without experts.

    None or -1: not stated. TensorRT-LLM accepts such a size, which changes nothing there.
    """
    if config.experts is not None and any(config.experts.sparse):
        return
    for name, size in ((_COLUMN_SIZE, moe_tensor), (_EXPERT_SIZE, moe_expert)):
        if (size or 0) > 0:
            raise UsageError(
                f"{name} is {size}, and this {config.architecture} has no experts; leave it out, --tp is enough"
            )


def _check_expert_ranks(config: ModelConfig, sizes: RankSizes) -> None:
    if sizes.expert_ranks == 1:
        return
    check_expert_sizes(config, None, sizes.expert_ranks)
    experts = config.experts
    if experts is not None and experts.count % sizes.expert_ranks:
        fitting = _fitting(lambda ranks: experts.count % ranks == 0)
        raise UsageError(
            f"{_EXPERT_SIZE} is {sizes.expert_ranks}, which does not divide the model's {experts.count} experts; "
            f"expected {fitting}"
        )


def _obstacle(config: ModelConfig, sizes: RankSizes) -> str:
    """Returns what ``sizes`` do not divide, in words; "" if the model can be split."""
    ranks = sizes.ranks
    if config.num_heads % ranks:
        return f"the model's {config.num_heads} attention heads"
    if config.num_kv_heads % ranks and ranks % config.num_kv_heads:
        return f"the model's {config.num_kv_heads} KV heads"
    experts = config.experts
    if experts is not None and any(experts.sparse) and experts.intermediate_size % sizes.expert_columns:
        return f"the {experts.intermediate_size} columns of each of the model's {experts.count} experts"
    if (experts is None or not all(experts.sparse)) and config.intermediate_size % ranks:
        return f"the {config.intermediate_size} columns of the model's MLP"
    return _split_block(config, sizes)


def _split_block(config: ModelConfig, sizes: RankSizes) -> str:
    """Returns a quantized weight whose blocks or groups the ranks would cut, in words; "" if there is none."""
    ranks = sizes.ranks
    if config.quantization is None or ranks == 1:
        return ""
    whole, shares = checkpoint_tensors(config), checkpoint_tensors(rank_config(config, sizes))
    is_blocked = FORMATS[str(config.quantization.algorithm)].is_blocked if config.quantization.algorithm else False
    kv_parts = ranks if config.num_kv_heads % ranks == 0 else config.num_kv_heads
    for name, share in shares.items():
        lengths = zip(whole[name].shape, share.shape, strict=True)
        is_cut = is_blocked and share.dtype == FP8_DTYPE
        if any(
            length not in (own, own * ranks, own * kv_parts, own * sizes.expert_columns)
            or (is_cut and length != own and own % FP8_BLOCK)
            for length, own in lengths
        ):
            return f"the blocks of {name}, which is quantized to {config.quantization.algorithm}"
    return ""


def _fitting(fits: Callable[[int], bool]) -> str:
    """Returns the numbers of ranks that fit, in words."""
    counts = [str(count) for count in range(1, _MOST_RANKS + 1) if fits(count)]
    return counts[0] if len(counts) == 1 else f"{', '.join(counts[:-1])} or {counts[-1]}"
