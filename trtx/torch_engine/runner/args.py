"""What a caller asks of the runner, and the device that it comes to."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from trtx.config.torch_limits import LIMITS
from trtx.errors import UsageError

_GRAPHS = "cuda_graph_config.batch_sizes"
# The arguments of the engine that are the runner's under the same name.
_LIMITED = (
    "max_batch_size",
    "max_num_tokens",
    "max_seq_len",
    "kv_cache_config.tokens_per_block",
    "kv_cache_config.free_gpu_memory_fraction",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunnerArgs:
    """Asked for. ``num_blocks`` beats ``max_tokens``, which caps what ``free_gpu_memory_fraction`` would give.

    ``dtype`` "auto" is float32 on a CPU and the checkpoint's own on CUDA; ``kv_dtype`` "auto" is what the checkpoint's
    quantization says of the KV cache, else ``dtype``.
    ``device`` "auto" is ``cuda:0`` where CUDA is, else ``cpu``. ``free_gpu_memory_fraction`` is TensorRT-LLM's:
    the share of the memory left after weights and activations that the KV pool takes (CUDA alone).
    ``cuda_graph_batch_sizes`` None: :func:`trtx.torch_engine.runner.graphs.default_batch_sizes`.
    ``deterministic``: a sequence's tokens and log-probabilities are the same to the bit whatever else a step computes,
    and wherever its prompt is cut into chunks.
    """

    model_dir: Path
    dtype: str = "auto"
    device: str = "auto"
    tokens_per_block: int = 32
    num_blocks: int | None = None
    max_tokens: int | None = None
    free_gpu_memory_fraction: float = 0.9
    max_batch_size: int = 256
    max_num_tokens: int = 8192
    max_seq_len: int | None = None  # None, or more: what the model's positions allow
    kv_dtype: str = "auto"
    cuda_graphs: bool = True
    cuda_graph_batch_sizes: tuple[int, ...] | None = None
    deterministic: bool = False
    cpu_threads: int | None = None  # None: torch's own choice (OMP_NUM_THREADS)
    merges_passes: bool = False  # a step's decodes and prompt chunks in one pass: nobody's choice until it is measured

    def __post_init__(self) -> None:
        for path in _LIMITED:
            name = path.rpartition(".")[2]
            value = getattr(self, name)
            if value is not None and not LIMITS[path].holds(value):
                raise UsageError(f"{name} is {value}; expected {LIMITS[path].expected}")
        if self.cuda_graph_batch_sizes is not None and not LIMITS[_GRAPHS].holds(self.cuda_graph_batch_sizes):
            raise UsageError(
                f"cuda_graph_batch_sizes is {self.cuda_graph_batch_sizes}; expected {LIMITS[_GRAPHS].expected}"
            )


def capability_of(device: torch.device) -> tuple[int, int] | None:
    """Compute capability; None for a CPU."""
    return torch.cuda.get_device_capability(device) if device.type == "cuda" else None


def dtype_name(dtype: torch.dtype) -> str:
    """torch's name without its "torch.": ``bfloat16``."""
    return str(dtype).removeprefix("torch.")
