"""Computes the number of blocks of the KV pool."""

from __future__ import annotations

import torch

from trtx.checkpoint.model_config import ModelConfig
from trtx.errors import UsageError
from trtx.memory.draft_models import NO_DRAFT_MODEL, DraftMemory
from trtx.memory.torch_engine import RESERVE_BYTES, activation_bytes, cpu_pool_room, pool_room
from trtx.torch_engine.kv_layout import KvGeometry
from trtx.torch_engine.runner.args import RunnerArgs, dtype_name, products_on


def num_kv_blocks(
    args: RunnerArgs,
    config: ModelConfig,
    geometry: KvGeometry,
    *,
    device: torch.device,
    dtype: torch.dtype,
    draft: DraftMemory = NO_DRAFT_MODEL,
    pools_to_come: int = 1,
) -> int:
    """Returns the number of KV blocks. Call it once the weights are on the device; ``dtype`` is the activations'.

    ``draft``: memory of a draft model that is not on the device yet. ``pools_to_come``: the number of engines that
    divide the free memory of the device, with this one.

    Raises UsageError if not even one block fits.
    """
    groups = len(geometry.groups)  # a token has one block in each
    if args.num_blocks is not None:
        blocks, limit = args.num_blocks, f"num_blocks is {args.num_blocks}"
    else:
        if device.type == "cuda":
            room = _gpu_room(args, config, device, dtype, draft.fixed_bytes, pools_to_come)
        else:
            room = cpu_pool_room(groups * geometry.block_bytes, geometry.tokens_per_block)
        block_bytes = geometry.block_bytes + draft.token_bytes * geometry.tokens_per_block
        blocks, limit = room // block_bytes, f"{room >> 20} MiB are free for it"
        if args.max_tokens is not None:
            asked = args.max_tokens // geometry.tokens_per_block * groups
            if device.type == "cpu" or asked < blocks:
                blocks, limit = asked, f"max_tokens is {args.max_tokens}"
    if blocks < groups:
        raise UsageError(
            f"the KV pool has no block: {limit}, one block of {geometry.tokens_per_block} tokens takes "
            f"{groups * geometry.block_bytes} bytes; raise max_tokens or free_gpu_memory_fraction, or lower "
            "max_num_tokens"
        )
    return blocks


def _gpu_room(
    args: RunnerArgs,
    config: ModelConfig,
    device: torch.device,
    dtype: torch.dtype,
    draft_bytes: int,
    pools_to_come: int,
) -> int:
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
    free, _ = torch.cuda.mem_get_info(device)
    activations = activation_bytes(
        config,
        max_num_tokens=args.max_num_tokens,
        max_batch_size=args.max_batch_size,
        dtype=dtype_name(dtype),
        scaled_products=products_on(device, dtype_name(dtype)),
        max_draft_len=args.max_draft_len,
    )
    return pool_room(free // pools_to_come - activations - draft_bytes - RESERVE_BYTES, args.free_gpu_memory_fraction)
