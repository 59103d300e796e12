"""What a caller asks of the runner, and the device, dtypes and sizes that it comes to."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from trtx.errors import UsageError

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True, slots=True, kw_only=True)
class RunnerArgs:
    """Asked for. ``num_blocks`` beats ``max_tokens``, which caps what ``free_gpu_memory_fraction`` would give.

    ``dtype`` "auto" is float32 on a CPU and the checkpoint's own on CUDA; ``kv_dtype`` "auto" is ``dtype``.
    ``device`` "auto" is ``cuda:0`` where CUDA is, else ``cpu``. ``free_gpu_memory_fraction`` is TensorRT-LLM's:
    the share of the memory left after weights and activations that the KV pool takes (CUDA alone).
    ``cuda_graph_batch_sizes`` None: :func:`trtx.torch_engine.runner.graphs.default_batch_sizes`.
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
    cpu_threads: int | None = None  # None: torch's own choice (OMP_NUM_THREADS)

    def __post_init__(self) -> None:
        for name in ("tokens_per_block", "max_batch_size", "max_num_tokens"):
            if getattr(self, name) < 1:
                raise UsageError(f"{name} is {getattr(self, name)}; expected at least 1")
        if self.tokens_per_block & (self.tokens_per_block - 1):
            raise UsageError(f"tokens_per_block is {self.tokens_per_block}; expected a power of two, such as 32")
        if self.max_seq_len is not None and self.max_seq_len < 1:
            raise UsageError(f"max_seq_len is {self.max_seq_len}; expected at least 1")
        if self.cuda_graph_batch_sizes is not None and min(self.cuda_graph_batch_sizes, default=0) < 1:
            raise UsageError(f"cuda_graph_batch_sizes is {self.cuda_graph_batch_sizes}; expected sizes of at least 1")
        if not 0.0 < self.free_gpu_memory_fraction <= 1.0:
            raise UsageError(
                f"free_gpu_memory_fraction is {self.free_gpu_memory_fraction}; expected more than 0 and at most 1"
            )


def resolve_device(name: str) -> torch.device:
    """Raises UsageError when CUDA is asked for and is not there."""
    if name == "auto":
        name = "cuda:0" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise UsageError(f"device {name!r} is not known; expected auto, cpu or cuda:<index>") from error
    if device.type == "cuda":
        if not torch.cuda.is_available():
            raise UsageError(f"device {name!r} needs CUDA, which torch {torch.__version__} does not find; use cpu")
        return torch.device("cuda", device.index or 0)
    if device.type != "cpu":
        raise UsageError(f"device {name!r} is not supported; expected auto, cpu or cuda:<index>")
    return device


def resolve_dtype(name: str, *, field: str, auto: torch.dtype) -> torch.dtype:
    """One of float32, bfloat16, float16; ``auto`` for "auto"."""
    if name == "auto":
        return auto
    if name not in _DTYPES:
        raise UsageError(
            f"{field} {name!r} is not supported by the torch engine; expected auto or one of {', '.join(_DTYPES)}"
        )
    return _DTYPES[name]


def dtype_name(dtype: torch.dtype) -> str:
    """torch's name without its "torch.": ``bfloat16``."""
    return str(dtype).removeprefix("torch.")
