"""The runner's arguments, and how they resolve to forwards, batch merging and CUDA graph buckets."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import torch

from trtx.checkpoint.dense import product_parameters
from trtx.checkpoint.formats import BLOCK_SCALES, products_of
from trtx.checkpoint.model_config import ModelConfig
from trtx.config.torch_limits import LIMITS
from trtx.config.torch_passes import DRAFT_PASS_SIZES, LARGE_PARAMETERS, PACED_STEPS, PASS_SIZES
from trtx.errors import UsageError
from trtx.torch_engine.llm_args import WeightGroup

_BLOCK_SCALES_CUDA = (12, 9)
_GRAPHS = "cuda_graph_config.batch_sizes"
# Engine arguments that the runner takes under the same name.
_LIMITED = (
    "max_batch_size",
    "max_num_tokens",
    "max_seq_len",
    "kv_cache_config.tokens_per_block",
    "kv_cache_config.free_gpu_memory_fraction",
)


@dataclass(frozen=True, slots=True)
class DraftArgs:
    """A draft model: its ``decoding_type``, its name or directory, and ``eagle3_layers_to_capture``."""

    kind: str
    model: str
    layers: list[int] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RunnerArgs:
    """Settings of a runner as requested, before defaults are resolved.

    Size of the KV pool: ``free_gpu_memory_fraction`` is the share of the GPU memory left after weights and activations,
    as in TensorRT-LLM (CUDA only). ``max_tokens`` caps that size, and ``num_blocks`` replaces both.

    ``dtype`` "auto" is the checkpoint's dtype on CUDA; on a CPU, :mod:`trtx.memory.processor` chooses it. ``kv_dtype``
    "auto" is the dtype of the checkpoint's quantized KV cache, if it has one, else ``dtype``. ``device`` "auto" is
    ``cuda:0`` if CUDA is available, else ``cpu``.

    ``deterministic``: a sequence's tokens and log-probabilities are bit-identical whatever else a step computes, and
    however its prompt is split into chunks. Such a runner neither merges forwards nor pads them.

    None selects a default: for ``cuda_graph_batch_sizes`` it is
    :func:`trtx.torch_engine.runner.graphs.default_batch_sizes`, and :mod:`trtx.config.torch_passes` has those of
    ``merges_passes`` and ``pass_sizes``.
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
    max_seq_len: int | None = None  # None or more: the limit of the model's positions
    kv_dtype: str = "auto"
    cuda_graphs: bool = True
    cuda_graph_batch_sizes: tuple[int, ...] | None = None
    deterministic: bool = False
    guided: bool = False  # sequences may follow grammars: room for their token masks
    reads_peers: bool = True  # ranks may add small tensors in memory that their GPUs share, else NCCL adds them
    moe_expert_parallel_size: int = 1  # of the ranks: see trtx.checkpoint.tensor_parallel.RankSizes
    cpu_threads: int | None = None  # None: torch's own choice (OMP_NUM_THREADS)
    merges_passes: bool | None = None  # compute a step's decodes and prompt chunks in one mixed batch
    max_draft_len: int = 0  # most drafted tokens of a sequence that a step verifies
    draft: DraftArgs | None = None  # the draft model; None: drafts need no model
    sleeps: bool = False  # the memory of weights and KV pool can be released while the engine sleeps
    weight_group: WeightGroup | None = None  # the weights are those of a group of engines; None: the runner's own
    keeps_weights: bool = True  # a sleeping engine's weights: a copy in host memory, or read again from the checkpoint
    # Token counts, ascending, to which forwards with prompt chunks are padded: one CUDA graph bucket each. (): no
    # padding.
    pass_sizes: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        for name in ("merges_passes", "pass_sizes"):
            if self.deterministic and getattr(self, name):
                raise UsageError(f"{name} does not go with deterministic; leave one of them out")
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

    def passes(self, config: ModelConfig, device: torch.device) -> Passes:
        """Returns ``merges_passes`` and ``pass_sizes``, resolved for this model and device."""
        pads = (
            device.type == "cuda" and self.cuda_graphs and not self.deterministic and config.rope.mrope_section is None
        )  # a merged forward without a CUDA graph was not measured as a default
        is_large = product_parameters(config) >= LARGE_PARAMETERS
        merges = pads and is_large if self.merges_passes is None else self.merges_passes
        sizes = self.pass_sizes
        if sizes is None:
            sizes = PASS_SIZES if pads else ()
            if sizes and self.max_draft_len:
                sizes = (*DRAFT_PASS_SIZES, *sizes)
        return Passes(
            merges=merges,
            padded_sizes=sorted({min(size, self.max_num_tokens) for size in sizes}),
            paced_steps=PACED_STEPS if pads and merges and is_large else None,
        )


@dataclass(frozen=True, slots=True)
class Passes:
    """How a runner splits its steps into forwards."""

    merges: bool
    padded_sizes: list[int]  # ascending, at most ``max_num_tokens``
    paced_steps: int | None  # the value that suits this runner for SchedulerLimits.paced_steps


def capability_of(device: torch.device) -> tuple[int, int] | None:
    """Compute capability of a CUDA device; None for a CPU."""
    return torch.cuda.get_device_capability(device) if device.type == "cuda" else None


def products_on(device: torch.device, dtype: str) -> frozenset[str]:
    """Returns the kinds of scaled matmuls on ``device``: :func:`trtx.checkpoint.formats.products_of`.

    A torch for a CUDA before 12.9, whose cuBLAS has no scales of blocks, lacks them. The memory plan, which imports no
    torch, counts on a later one.
    """
    found, cuda = products_of(capability_of(device), dtype), torch.version.cuda
    if cuda is not None and tuple(int(part) for part in cuda.split(".")[:2]) < _BLOCK_SCALES_CUDA:
        return found - {BLOCK_SCALES}
    return found


def dtype_name(dtype: torch.dtype) -> str:
    """Name of a dtype without "torch.": ``bfloat16``."""
    return str(dtype).removeprefix("torch.")
