"""Creates a model runner from :class:`RunnerArgs`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

from trtx.checkpoint.drafts import EAGLE3
from trtx.checkpoint.formats import FP8_DTYPE
from trtx.checkpoint.model_config import ModelConfig, read_model_config
from trtx.checkpoint.tensor_parallel import RankSizes
from trtx.errors import UsageError
from trtx.memory.draft_models import NO_DRAFT_MODEL
from trtx.memory.torch_engine import compute_dtype, kv_dtype
from trtx.torch_engine.device import resolve_device
from trtx.torch_engine.kv_layout import KvGeometry, layer_groups
from trtx.torch_engine.runner.args import RunnerArgs, capability_of, products_on
from trtx.torch_engine.runner.decoder import Decoder
from trtx.torch_engine.runner.draft_args import draft_memory_of, draft_runner_args
from trtx.torch_engine.runner.draft_target import SmallModel
from trtx.torch_engine.runner.eagle_parts import EagleParts
from trtx.torch_engine.runner.expert_load import ExpertLoad
from trtx.torch_engine.runner.graphs import DecodeGraphs, default_batch_sizes
from trtx.torch_engine.runner.invariant_kernels import InvariantTorchKernels
from trtx.torch_engine.runner.invariant_multiplier import InvariantMultiplier, cpu_multiplier
from trtx.torch_engine.runner.kernels import Attention, Kernels, KvCache
from trtx.torch_engine.runner.kv_sizing import num_kv_blocks
from trtx.torch_engine.runner.linear import LIBRARY_MULTIPLIER, OVERLAPPED_TOKENS, LayerProducts, Multiplier
from trtx.torch_engine.runner.mlp import ExpertBackend
from trtx.torch_engine.runner.mrope import Mrope
from trtx.torch_engine.runner.padded_passes import PaddedPasses
from trtx.torch_engine.runner.rank_sampler import FollowingSampler, LeadingSampler
from trtx.torch_engine.runner.rank_split import RankGroup, RankSplit, VocabularyMultiplier
from trtx.torch_engine.runner.regions import Region, open_region
from trtx.torch_engine.runner.rope import rotary_table
from trtx.torch_engine.runner.runner import TorchRunner, scales_name
from trtx.torch_engine.runner.runner_memory import RunnerMemory, WeightMemory
from trtx.torch_engine.runner.same_model import read_same_config
from trtx.torch_engine.runner.sampler import Sampler
from trtx.torch_engine.runner.sampling.masks import TokenMasks
from trtx.torch_engine.runner.shared_weights import SharedWeights, described
from trtx.torch_engine.runner.slots import new_block_tables
from trtx.torch_engine.runner.torch_kernels import TorchKernels
from trtx.torch_engine.runner.weight_group import sole_start
from trtx.torch_engine.runner.weights import DecoderWeights, admit_weights, load_weights

_OVERLAPS = (9, 0)  # compute capability from which programmatic dependent launch is available


def create_runner(args: RunnerArgs, group: RankGroup | None = None) -> TorchRunner:
    """Creates a runner: loads weights, allocates the KV pool, compiles kernels and captures CUDA graphs.

    ``group``: the runner is one rank of a tensor-parallel engine; the other ranks create theirs at the same time.
    Takes seconds to a minute. Like TensorRT-LLM, lowers a ``max_seq_len`` that exceeds the model's number of positions.
    Raises UsageError for an unusable checkpoint, device, dtype or size.
    """
    if args.cpu_threads is not None:
        torch.set_num_threads(args.cpu_threads)
    device = resolve_device(args.device)
    try:
        if args.weight_group is not None:
            with sole_start(args.weight_group):
                runner = _create(args, device, group)
                runner.memory.serve_weights()
        else:
            runner = _create(args, device, group)
        if args.draft is not None and runner.draft_model is None:
            small = _create(draft_runner_args(args, args.draft, runner.num_blocks), device, None)
            runner.draft_model = SmallModel(small)
            runner.memory.add(small)
        return runner
    except torch.OutOfMemoryError as error:
        free, total = torch.cuda.mem_get_info(device)
        raise UsageError(
            f"{args.model_dir.name} does not fit on {device}, which has {free >> 20} of {total >> 20} MiB free: lower "
            "max_batch_size, max_num_tokens, max_tokens or free_gpu_memory_fraction, or free the GPU"
        ) from error


@torch.inference_mode()
def _create(args: RunnerArgs, device: torch.device, group: RankGroup | None) -> TorchRunner:
    config = as_stored = read_model_config(args.model_dir)
    max_seq_len = min(args.max_seq_len or config.max_position, config.max_position)
    split = None
    if group is not None:
        split = RankSplit(group, config, RankSizes(group.size, args.moe_expert_parallel_size))
    config = split.config if split is not None else config
    capability = capability_of(device)
    computed = compute_dtype(args.dtype, config.dtype, is_gpu=device.type == "cuda")
    cached = kv_dtype(args.kv_dtype, config.quantization, computed, capability)
    dtype = getattr(torch, computed)
    passes = args.passes(config, device)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    scaled = products_on(device, computed)
    multiplier = _multiplier(args, device)
    draft_needs = draft_memory_of(args, config, computed) if args.draft is not None else NO_DRAFT_MODEL
    overlaps = capability is not None and capability >= _OVERLAPS
    load = None
    if config.experts is not None and any(config.experts.sparse) and (group is None or group.rank == 0):
        load = ExpertLoad(
            config.experts, device, padding_slot=args.max_batch_size, expert_ranks=args.moe_expert_parallel_size
        )
    load_on = partial(
        load_weights, args.model_dir, config, dtype=dtype, scaled_products=scaled, multiplier=multiplier,
        experts=_experts(args, config, multiplier, device, overlaps=overlaps), split=split, load=load,
    )  # fmt: skip

    def read_weights(model_dir: Path) -> DecoderWeights:
        found = read_same_config(model_dir, as_stored)
        share = None if split is None else replace(split, whole=found)
        return load_weights(
            model_dir, found if share is None else share.config, device=torch.device("cpu"), dtype=dtype,
            scaled_products=scaled, multiplier=multiplier, copied_to=device, split=share,
        )  # fmt: skip

    shared = None
    if args.weight_group is not None:
        made_from = described(args.model_dir, device, dtype, scaled_products=scaled)
        shared = SharedWeights(
            args.weight_group, made_from, device, partial(load_on, device=torch.device("meta"), copied_to=device)
        )
    if shared is not None and shared.weights is not None:
        weights = shared.weights
        admit_weights(weights, multiplier)
        movable = WeightMemory(weights, args.model_dir, read_weights, shared)
    else:
        weights = load_on(device=device)
        movable = WeightMemory(weights, args.model_dir, read_weights, shared)
        if args.sleeps or shared is not None:
            movable.move_to_regions(keeps_copy=args.keeps_weights)
    geometry = KvGeometry(
        layer_groups(config.windows or (None,) * config.num_layers, config.num_kv_heads, config.head_dim),
        args.tokens_per_block, cached,
        scales_name(weights.kv_scales) if cached == FP8_DTYPE else "",
        _arithmetic(device, computed, split) if args.deterministic else "",
    )  # fmt: skip
    num_blocks = num_kv_blocks(
        args, config, geometry, device=device, dtype=dtype, draft=draft_needs,
        pools_to_come=shared.pools_to_come if shared is not None else 1,
    )  # fmt: skip
    num_blocks = num_blocks if group is None else group.smallest(num_blocks)
    region, pool = _kv_pool(num_blocks, geometry, device, sleeps=args.sleeps)
    tables = new_block_tables(
        len(geometry.groups), max_batch_size=args.max_batch_size, max_seq_len=max_seq_len,
        tokens_per_block=args.tokens_per_block, device=device,
    )  # fmt: skip
    parts = None
    cache = KvCache.of_groups(pool, tables, geometry, weights.kv_scales if cached == FP8_DTYPE else None)
    positions = tables.shape[2] * args.tokens_per_block  # whole blocks: every position of a block has an angle
    rotary = rotary_table(config.rope, config.head_dim, positions, device)
    mrope = Mrope(config.rope, rotary, args.max_batch_size) if config.rope.mrope_section is not None else None
    levels = config.vision.deepstack_levels if config.vision is not None else 0
    if args.draft is not None and args.draft.kind == EAGLE3:
        parts = EagleParts.of(args.draft, config, weights.embedding, cache, pool.shape[0], multiplier, dtype)
    is_fused = device.type == "cuda" and not args.deterministic
    local = rotary_table(config.gemma3.local_rope, config.head_dim, positions, device) if config.gemma3 else None
    kernels = _kernels(
        config, cache, rotary, local, Attention.FIXED if args.deterministic else Attention.BY_LENGTH,
        overlapped_tokens=OVERLAPPED_TOKENS if is_fused and overlaps else 0, max_num_tokens=args.max_num_tokens,
    )  # fmt: skip
    few_tokens = _layer_products(weights, kernels, config.norm_eps, group, overlaps=overlaps) if is_fused else None
    of_head = VocabularyMultiplier(multiplier, group, config.vocab_size) if group is not None else multiplier
    decoder = Decoder(
        weights,
        kernels,
        multiplier=of_head,
        mrope=mrope,
        deepstack_levels=levels,
        few_tokens=few_tokens,
        features=parts.features if parts is not None else None,
        load=load,
        embedding_scale=config.embedding_scale,
    )
    masks = None
    if args.guided:
        masks = TokenMasks(args.max_batch_size, config.vocab_size, device, rows_per_slot=1 + args.max_draft_len)
    sampler = _sampler(group)(
        args.max_batch_size, config.vocab_size, device, counts_prompts=args.deterministic, masks=masks
    )
    graphs = padded = None
    sizes: list[int] = []
    if device.type == "cuda":
        sampler.warm_up(decoder.dtype)
    if device.type == "cuda" and args.cuda_graphs:
        wanted = args.cuda_graph_batch_sizes or default_batch_sizes(args.max_batch_size)
        sizes = sorted({min(size, args.max_batch_size) for size in wanted})
        graphs = DecodeGraphs(decoder, sampler, cache, sizes, config.vocab_size)
    if passes.padded_sizes and mrope is None:
        memory = graphs.memory if graphs is not None else None
        padded = PaddedPasses(
            decoder, sampler, cache, passes.padded_sizes, memory=memory, drafts=args.max_draft_len > 0
        )
    runner = TorchRunner(
        decoder=decoder, sampler=sampler, pool=pool, cache=cache, geometry=geometry, max_position=config.max_position,
        vocab_size=config.vocab_size, graphs=graphs, padded=padded, passes=passes,
        memory=RunnerMemory(movable, region), load=load,
    )  # fmt: skip
    if parts is not None:
        head = _kernels(
            parts.config, parts.cache, parts.rotary(positions), None, Attention.BY_LENGTH, overlapped_tokens=0,
            max_num_tokens=0,
        )  # fmt: skip
        runner.draft_model = parts.head(head, runner.block_table, sizes)
    return runner


def _sampler(group: RankGroup | None) -> Callable[..., Sampler]:
    if group is None:
        return Sampler
    return partial(FollowingSampler if group.rank else LeadingSampler, group=group)


def _kv_pool(
    num_blocks: int, geometry: KvGeometry, device: torch.device, *, sleeps: bool
) -> tuple[Region | None, torch.Tensor]:
    """Returns a zeroed pool, and its region if its memory can be released.

    Zeros, because a masked position must not hold a NaN, as uninitialized memory could.
    """
    shape, dtype = (num_blocks, *geometry.block_shape), getattr(torch, geometry.dtype)
    if not sleeps:
        return None, torch.zeros(shape, dtype=dtype, device=device)
    region = open_region(num_blocks * geometry.block_bytes, device)
    return region, region.bytes.view(dtype).view(shape)


def _arithmetic(device: torch.device, dtype: str, split: RankSplit | None) -> str:
    """Describes everything except the checkpoint on which the bits of a deterministic engine depend."""
    if device.type == "cpu":
        on = f"{torch.backends.cpu.get_cpu_capability()} CPU, {torch.get_num_threads()} threads"
    else:
        on = torch.cuda.get_device_name(device)
    ranks = f" x {split.sizes}" if split is not None else ""
    return f"{dtype} on {on}{ranks}, torch {torch.__version__}"


def _multiplier(args: RunnerArgs, device: torch.device) -> Multiplier:
    if args.deterministic:
        return _invariant_multiplier(device)
    if device.type == "cpu":
        return LIBRARY_MULTIPLIER
    from trtx.torch_engine.runner.skinny_gemm import FewRowsMultiplier, Workspace

    return FewRowsMultiplier(Workspace.of(device))


def _experts(
    args: RunnerArgs, config: ModelConfig, multiplier: Multiplier, device: torch.device, *, overlaps: bool
) -> ExpertBackend | None:
    """Returns the backend of experts on a GPU; None for a dense model, and on a CPU."""
    if config.experts is None or device.type == "cpu":
        return None
    from trtx.torch_engine.runner.cuda_experts import CudaExperts, InvariantExperts

    # CUDA reserves 1 KiB of an SM's shared memory for each program.
    shared_bytes = torch.cuda.get_device_properties(device).shared_memory_per_multiprocessor - 1024
    if args.deterministic:
        return InvariantExperts(multiplier, shared_bytes=shared_bytes)
    return CudaExperts(multiplier, shared_bytes=shared_bytes, overlaps=overlaps)


def _layer_products(
    weights: DecoderWeights, kernels: Kernels, norm_eps: float, group: RankGroup | None, *, overlaps: bool
) -> LayerProducts | None:
    """Returns the fused layer matmuls, or None for weights that they do not support."""
    from trtx.torch_engine.runner.skinny_gemm import FewRowsLayers, Workspace, can_fuse

    if not can_fuse(weights):
        return None
    return FewRowsLayers(weights, kernels, norm_eps, Workspace.of(weights.head.device), group, overlaps=overlaps)


def _invariant_multiplier(device: torch.device) -> InvariantMultiplier:
    if device.type == "cpu":
        return cpu_multiplier()
    from trtx.torch_engine.runner.triton_multiplier import triton_multiplier

    return triton_multiplier()


def _kernels(
    config: ModelConfig,
    cache: KvCache,
    rotary: torch.Tensor,
    local: torch.Tensor | None,
    attention: Attention,
    *,
    overlapped_tokens: int,
    max_num_tokens: int,
) -> Kernels:
    """Returns Triton kernels on CUDA, torch kernels on a CPU. Imports Triton only on CUDA, because torch for CPUs lacks
    it.

    ``max_num_tokens``: most tokens of a forward whose long prompts cuDNN may attend.
    """
    if cache.pool.device.type == "cpu":
        kind = InvariantTorchKernels if attention is Attention.FIXED else TorchKernels
        return kind(config, cache, rotary, local_rotary=local)
    from trtx.torch_engine.runner.cudnn_attention import CudnnAttention
    from trtx.torch_engine.runner.triton_kernels import TritonKernels

    processors = torch.cuda.get_device_properties(cache.pool.device).multi_processor_count
    long_chunks = CudnnAttention.of(config, cache, max_num_tokens) if attention is Attention.BY_LENGTH else None
    return TritonKernels(config, cache, rotary, processors, attention, overlapped_tokens, local, long_chunks)
