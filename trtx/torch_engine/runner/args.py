"""What a caller asks of the runner, and the device, dtypes and sizes that it comes to."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from trtx.checkpoint.quantization import Quantization
from trtx.config.torch_limits import DTYPES, LIMITS
from trtx.errors import UsageError
from trtx.torch_engine.runner.fp8 import FP8

FP8_CAPABILITY = (8, 9)
"""Compute capability from which a GPU converts and multiplies float8_e4m3fn."""

_DTYPES: dict[str, torch.dtype] = {name: getattr(torch, name) for name in DTYPES}
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
        for path in _LIMITED:
            name = path.rpartition(".")[2]
            value = getattr(self, name)
            if value is not None and not LIMITS[path].holds(value):
                raise UsageError(f"{name} is {value}; expected {LIMITS[path].expected}")
        if self.cuda_graph_batch_sizes is not None and not LIMITS[_GRAPHS].holds(self.cuda_graph_batch_sizes):
            raise UsageError(
                f"cuda_graph_batch_sizes is {self.cuda_graph_batch_sizes}; expected {LIMITS[_GRAPHS].expected}"
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
    """One of float32, bfloat16, float16; ``auto`` for "auto". ``field``: an argument of the engine, for its limit."""
    if name == "auto":
        return auto
    if name not in _DTYPES:
        raise UsageError(f"{field} is {name!r}; expected {LIMITS[field].expected}")
    return _DTYPES[name]


def resolve_kv_dtype(
    name: str, quantization: Quantization | None, device: torch.device, *, auto: torch.dtype
) -> torch.dtype:
    """As TensorRT-LLM: "auto" follows the checkpoint's ``kv_cache_quant_algo``, and is ``auto`` where it has none."""
    algorithm = quantization.kv_cache_algorithm if quantization is not None else None
    if name == "auto" and algorithm not in (None, "FP8"):
        raise UsageError(
            f"{quantization and quantization.source}: the torch engine has no {algorithm} KV cache; set "
            "kv_cache_config.dtype to fp8 or bfloat16"
        )
    if name == "fp8" or (name == "auto" and algorithm == "FP8"):
        if device.type == "cuda" and torch.cuda.get_device_capability(device) < FP8_CAPABILITY:
            raise UsageError(
                "kv_cache_config.dtype fp8 needs a GPU of compute capability 8.9 (Ada, Hopper) or later; set it to "
                "bfloat16"
            )
        return FP8
    return resolve_dtype(name, field="kv_cache_config.dtype", auto=auto)


def has_scaled_products(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether products of float8 operands run on this device: Ada, Hopper and later. float32 asks for exactness."""
    return (
        device.type == "cuda" and dtype != torch.float32 and torch.cuda.get_device_capability(device) >= FP8_CAPABILITY
    )


def dtype_name(dtype: torch.dtype) -> str:
    """torch's name without its "torch.": ``bfloat16``."""
    return str(dtype).removeprefix("torch.")
