"""The GPU memory besides weights and KV: activations, CUDA graphs, the CUDA context, NCCL, transfer buffers.

The torch engine's formulas are in :mod:`trtx.memory.torch_engine`; its runner uses them too. TensorRT-LLM measures its
activations with a forward of max_num_tokens tokens before it sizes its pool (``_torch/pyexecutor/_util.py``:
(total - peak + temporary KV) x fraction); the value here is an estimate of that measurement.
"""

from __future__ import annotations

from trtx.memory.gpus import MemoryDevice
from trtx.memory.limits import Limits
from trtx.memory.rank_shares import RankShare
from trtx.memory.shapes import ModelShape
from trtx.memory.torch_engine import RESERVE_BYTES
from trtx.memory.units import GIB, MIB

# CUDA reports less than NVML: 79.22 of 79.65 GiB on an H100 (vLLM #10511), 139.81 of 140.40 on an H200 (TensorRT-LLM's
# "device total memory"), 178.35 of 179.06 on a B200.
_HIDDEN_SHARE = 0.0045
# Context, modules and cuBLAS of one process: 590 MiB in nvidia-smi (TensorRT-LLM #3058).
_CONTEXT_BYTES = 590 * MIB
# NCCL and all-reduce workspaces: non-torch memory grew from 1.79 GiB at tp 1 to 3.58 GiB at tp 2 (vLLM #10511, H100).
_NCCL_BYTES = int(1.8 * GIB)
# 0.617 GB for 35 sizes of an 80-layer Llama-3-70B (vLLM #5515).
_GRAPH_BYTES_PER_LAYER = 0.617e9 / 35 / 80
# The default of TRTLLM_KVCACHE_TRANSFER_BUFFER_SIZE; there is one buffer to send and one to receive
# (cacheTransBuffer.cpp).
_TRANSFER_BUFFER_BYTES = 512 * MIB
# The relative error of the reserves, either way. There is one published profile to compare the activation formula with:
# gpt-oss-120b, 8,192 tokens, one GPU, measured 0.85 GiB, computed 0.86 GiB.
UNCERTAINTY = 0.5


def hidden_bytes(device: MemoryDevice) -> int:
    """Returns the GPU memory that the driver reserves, whether the GPU is in use or not."""
    return int(device.total_bytes * _HIDDEN_SHARE) if device.is_gpu else 0


def process_bytes(device: MemoryDevice) -> int:
    """Returns the size of the CUDA context of one process; 0 on a CPU."""
    return _CONTEXT_BYTES if device.is_gpu else 0


def context_bytes(device: MemoryDevice, limits: Limits) -> int:
    """Returns the memory of the driver, the CUDA context and, with several GPUs, NCCL; 0 on a CPU."""
    if not device.is_gpu:
        return 0
    return hidden_bytes(device) + _CONTEXT_BYTES + (_NCCL_BYTES if limits.world > 1 else 0)


def activation_bytes(shape: ModelShape, limits: Limits, element_bytes: int) -> int:
    """Returns the peak of one forward over ``max_num_tokens``, including the logits of its batch."""
    tp = 1 if limits.attention_dp else limits.tp
    # With attention DP, a rank receives the routed tokens of all ranks and holds its share of the experts.
    gathered = limits.tp * shape.hidden if limits.attention_dp and shape.experts else 0
    experts = shape.expert_width if limits.attention_dp else shape.expert_width // limits.tp
    token = 2 * shape.hidden + max(shape.mlp_width // tp, shape.attention_width // tp, experts + gathered)
    logits = limits.max_batch_size * (1 + limits.draft_tokens) * shape.vocab * (element_bytes + 4) // tp
    return limits.max_num_tokens * token * element_bytes + logits


def graph_bytes(shape: ModelShape, limits: Limits, device: MemoryDevice) -> int:
    """Returns the memory of CUDA graphs and workspaces. The torch engine reserves a fixed amount in any case."""
    if not device.is_gpu:
        return 0
    if limits.engine == "torch":
        return RESERVE_BYTES
    return int(len(limits.graph_sizes) * (len(shape.layers) / limits.pp) * _GRAPH_BYTES_PER_LAYER)


def transfer_bytes(limits: Limits, share: RankShare) -> int:
    """Returns the size of TensorRT-LLM's KV transfer buffers. The torch engine needs none: it copies between pools."""
    if not limits.transfers or limits.engine == "torch":
        return 0
    if limits.transfer_tokens is None:
        return 2 * _TRANSFER_BUFFER_BYTES
    return 2 * share.sequence_bytes(limits.transfer_tokens)
