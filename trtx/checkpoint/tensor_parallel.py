"""The share of a decoder that each rank of a tensor-parallel engine holds, and the models that can't be split."""

from __future__ import annotations

from dataclasses import replace

from trtx.checkpoint.dense import checkpoint_tensors
from trtx.checkpoint.model_config import ModelConfig
from trtx.errors import UsageError

_MOST_RANKS = 8


def rank_config(config: ModelConfig, ranks: int) -> ModelConfig:
    """Returns the shape of one rank's share: some of the heads, and some of the columns of every MLP and expert.

    With more ranks than KV heads, each rank has one KV head, which it shares with others. Vocabulary and hidden size
    are those of the model.
    """
    experts = config.experts
    return replace(
        config,
        num_heads=config.num_heads // ranks,
        num_kv_heads=max(1, config.num_kv_heads // ranks),
        intermediate_size=config.intermediate_size // ranks,
        experts=replace(experts, intermediate_size=experts.intermediate_size // ranks) if experts else None,
    )


def check_ranks(config: ModelConfig, ranks: int) -> None:
    """Raises UsageError for a model that the torch engine can't split over that many ranks."""
    if ranks == 1:
        return
    asked = f"tensor_parallel_size is {ranks}"
    if config.vision is not None:
        raise UsageError(
            f"{asked}, and {config.architecture} takes images, which the torch engine computes on one GPU; use --tp 1, "
            "or the engine tensorrt-llm"
        )
    problem = _obstacle(config, ranks)
    if problem:
        fitting = [str(count) for count in range(1, _MOST_RANKS + 1) if not _obstacle(config, count)]
        raise UsageError(f"{asked}, which does not divide {problem}; expected {_one_of(fitting)}")


def _obstacle(config: ModelConfig, ranks: int) -> str:
    """Returns what ``ranks`` does not divide, in words; "" if the model can be split."""
    if config.num_heads % ranks:
        return f"the model's {config.num_heads} attention heads"
    if config.num_kv_heads % ranks and ranks % config.num_kv_heads:
        return f"the model's {config.num_kv_heads} KV heads"
    experts = config.experts
    if experts is not None and any(experts.sparse) and experts.intermediate_size % ranks:
        return f"the {experts.intermediate_size} columns of each of the model's {experts.count} experts"
    if (experts is None or not all(experts.sparse)) and config.intermediate_size % ranks:
        return f"the {config.intermediate_size} columns of the model's MLP"
    return _split_block(config, ranks)


def _split_block(config: ModelConfig, ranks: int) -> str:
    """Returns a quantized weight whose blocks or groups ``ranks`` would cut, in words; "" if there is none."""
    if config.quantization is None or ranks == 1:
        return ""
    whole, shares = checkpoint_tensors(config), checkpoint_tensors(rank_config(config, ranks))
    for name, tensor in whole.items():
        lengths = zip(tensor.shape, shares[name].shape, strict=True)
        kv_parts = ranks if config.num_kv_heads % ranks == 0 else config.num_kv_heads
        if any(length not in (own, own * ranks, own * kv_parts) for length, own in lengths):
            return f"the blocks of {name}, which is quantized to {config.quantization.algorithm}"
    return ""


def _one_of(counts: list[str]) -> str:
    return counts[0] if len(counts) == 1 else f"{', '.join(counts[:-1])} or {counts[-1]}"
