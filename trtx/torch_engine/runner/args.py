"""What a caller asks of the runner, and the device that it comes to."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import torch

from trtx.checkpoint.dense import product_parameters
from trtx.checkpoint.model_config import ModelConfig
from trtx.config.torch_limits import LIMITS
from trtx.config.torch_passes import LARGE_PARAMETERS, PACED_STEPS, PASS_SIZES
from trtx.errors import UsageError
from trtx.torch_engine.runner.kernels import DEFAULT_ATTENTION, Attention
from trtx.torch_engine.runner.linear import DEFAULT_FEW_ROWS, FewRows

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

    ``dtype`` "auto" is the checkpoint's own on CUDA, and on a CPU that of :mod:`trtx.memory.processor`; ``kv_dtype``
    "auto" is what the checkpoint's quantization says of the KV cache, else ``dtype``.
    ``device`` "auto" is ``cuda:0`` where CUDA is, else ``cpu``. ``free_gpu_memory_fraction`` is TensorRT-LLM's:
    the share of the memory left after weights and activations that the KV pool takes (CUDA alone).
    ``cuda_graph_batch_sizes`` None: :func:`trtx.torch_engine.runner.graphs.default_batch_sizes`.
    ``deterministic``: a sequence's tokens and log-probabilities are the same to the bit whatever else a step computes,
    and wherever its prompt is cut into chunks. ``merges_passes`` and ``pass_sizes`` None:
    :mod:`trtx.config.torch_passes`; a deterministic runner does neither.
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
    # Nobody's choice until they are measured (docs/performance-notes.md): benchmarks set them.
    attention: Attention = DEFAULT_ATTENTION  # on CUDA; ``deterministic`` has its own
    few_rows: FewRows = DEFAULT_FEW_ROWS  # on CUDA; ``deterministic`` has its own products
    merges_passes: bool | None = None  # a step's decodes and prompt chunks in one pass
    # To so many tokens are passes with prompt chunks padded, ascending; each size has a CUDA graph. (): not padded.
    pass_sizes: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        for name in ("merges_passes", "pass_sizes"):
            if getattr(self, name) and self._is_fixed:
                raise UsageError(f"{name} does not go with deterministic or fixed attention; leave one of them out")
        if any(one >= other for one, other in pairwise((0, *(self.pass_sizes or ())))):
            raise UsageError(f"pass_sizes is {self.pass_sizes}; expected ascending numbers of tokens, from 1 on")
        for path in _LIMITED:
            name = path.rpartition(".")[2]
            value = getattr(self, name)
            if value is not None and not LIMITS[path].holds(value):
                raise UsageError(f"{name} is {value}; expected {LIMITS[path].expected}")
        if self.cuda_graph_batch_sizes is not None and not LIMITS[_GRAPHS].holds(self.cuda_graph_batch_sizes):
            raise UsageError(
                f"cuda_graph_batch_sizes is {self.cuda_graph_batch_sizes}; expected {LIMITS[_GRAPHS].expected}"
            )

    @property
    def _is_fixed(self) -> bool:
        return self.deterministic or self.attention is Attention.FIXED

    def passes(self, config: ModelConfig, device: torch.device) -> Passes:
        """``merges_passes`` and ``pass_sizes``, resolved."""
        pads = (
            device.type == "cuda"
            and self.cuda_graphs
            and self.attention is Attention.BY_LENGTH
            and not self.deterministic
            and config.rope.mrope_section is None
        )  # one pass without its graph was not measured as a default
        is_large = product_parameters(config) >= LARGE_PARAMETERS
        merges = pads and is_large if self.merges_passes is None else self.merges_passes
        sizes = self.pass_sizes
        if sizes is None:
            sizes = PASS_SIZES if pads else ()
        return Passes(
            merges=merges,
            padded_sizes=sorted({min(size, self.max_num_tokens) for size in sizes}),
            paced_steps=PACED_STEPS if pads and merges and is_large else None,
        )


@dataclass(frozen=True, slots=True)
class Passes:
    """How a runner computes its steps."""

    merges: bool
    padded_sizes: list[int]  # ascending, none above ``max_num_tokens``
    paced_steps: int | None  # what suits it: :attr:`trtx.torch_engine.core.scheduler.SchedulerLimits.paced_steps`


def capability_of(device: torch.device) -> tuple[int, int] | None:
    """Compute capability; None for a CPU."""
    return torch.cuda.get_device_capability(device) if device.type == "cuda" else None


def dtype_name(dtype: torch.dtype) -> str:
    """torch's name without its "torch.": ``bfloat16``."""
    return str(dtype).removeprefix("torch.")
