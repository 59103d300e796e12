"""How many KV blocks the pool gets."""

from __future__ import annotations

import torch

from trtx.checkpoint.model_config import ModelConfig
from trtx.errors import UsageError
from trtx.torch_engine.batch import KvGeometry
from trtx.torch_engine.runner.args import RunnerArgs

_CPU_TOKENS = 65536  # room for 16 sequences of 4,096 tokens
_CPU_BYTES = 1 << 30
_ROUNDING_COPIES = 6  # of formats.py's functions: the value, its magnitude, its step, …
_CUDA_RESERVE_BYTES = 1 << 30  # cuBLAS workspaces, CUDA graphs, the allocator's fragments


def num_kv_blocks(
    args: RunnerArgs, config: ModelConfig, geometry: KvGeometry, *, device: torch.device, dtype: torch.dtype
) -> int:
    """Called once the weights are on the device; ``dtype`` is the activations'. Raises UsageError if no block fits."""
    if args.num_blocks is not None:
        blocks, limit = args.num_blocks, f"num_blocks is {args.num_blocks}"
    else:
        room = _cuda_bytes(args, config, device, dtype) if device.type == "cuda" else _cpu_bytes(args, geometry)
        blocks, limit = room // geometry.block_bytes, f"{room >> 20} MiB are free for it"
        if args.max_tokens is not None:
            asked = args.max_tokens // geometry.tokens_per_block
            if device.type == "cpu" or asked < blocks:
                blocks, limit = asked, f"max_tokens is {args.max_tokens}"
    if blocks < 1:
        raise UsageError(
            f"the KV pool has no block: {limit}, one block of {geometry.tokens_per_block} tokens takes "
            f"{geometry.block_bytes} bytes; raise max_tokens or free_gpu_memory_fraction, or lower max_num_tokens"
        )
    return blocks


def activation_bytes(args: RunnerArgs, config: ModelConfig, element_bytes: int) -> int:
    """Peak of a pass over ``max_num_tokens``: the widest moment is the MLP's, plus the sampler's copies of logits.

    Where activations are rounded to a format that no product here takes, float32 copies of the widest come on top.
    """
    token = 2 * config.hidden_size + max(3 * config.intermediate_size, 2 * config.q_size + 2 * config.kv_size)
    quantization = config.quantization
    if quantization is not None and quantization.algorithm in ("NVFP4", "W8A8_SQ_PER_CHANNEL"):
        token += _ROUNDING_COPIES * config.intermediate_size * 4 // element_bytes
    logits = args.max_batch_size * config.vocab_size * (2 * element_bytes + 4)
    sampler = 5 * 64 * config.vocab_size * 8  # five float64 or int64 copies of at most 64 rows
    return args.max_num_tokens * token * element_bytes + logits + sampler


def _cuda_bytes(args: RunnerArgs, config: ModelConfig, device: torch.device, dtype: torch.dtype) -> int:
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
    free, _ = torch.cuda.mem_get_info(device)
    left = free - activation_bytes(args, config, dtype.itemsize) - _CUDA_RESERVE_BYTES
    return max(0, int(left * args.free_gpu_memory_fraction))


def _cpu_bytes(args: RunnerArgs, geometry: KvGeometry) -> int:
    wanted = -(-_CPU_TOKENS // geometry.tokens_per_block) * geometry.block_bytes
    return min(wanted, _CPU_BYTES)
