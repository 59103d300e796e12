"""The launches of one model's engine on torch's ``meta`` device, whose tensors have shapes but no memory."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from trtx.checkpoint.formats import BLOCK_SCALES, ROW_SCALES
from trtx.checkpoint.model_config import ModelConfig
from trtx.torch_engine.kv_layout import KvGeometry, layer_groups
from trtx.torch_engine.llm_args import DEFAULT_MAX_BATCH_SIZE
from trtx.torch_engine.runner.cuda_experts import CudaExperts
from trtx.torch_engine.runner.decoder import Decoder
from trtx.torch_engine.runner.expert_load import ExpertLoad
from trtx.torch_engine.runner.expert_tiles import ExpertTiles, fixed_tiles
from trtx.torch_engine.runner.fp8 import FP8, Quantize
from trtx.torch_engine.runner.kernels import Attention, KvCache, PassInputs, Spans
from trtx.torch_engine.runner.linear import MOST_ROWS, OVERLAPPED_TOKENS, Linear, Multiplier, PlainLinear
from trtx.torch_engine.runner.mlp import (
    DenseMlp,
    ExpertBackend,
    ExpertMlp,
    ExpertScales,
    ExpertWeights,
    GatedActivation,
    LayerMlp,
)
from trtx.torch_engine.runner.sampling.masks import TokenMasks
from trtx.torch_engine.runner.sampling.rows import FIELDS
from trtx.torch_engine.runner.sampling.triton_sampling import TritonSampling
from trtx.torch_engine.runner.scaled_linear import quantizer
from trtx.torch_engine.runner.skinny_gemm import FewRowsLayers, FewRowsMultiplier, Workspace, can_fuse
from trtx.torch_engine.runner.slots import new_block_tables
from trtx.torch_engine.runner.triton_kernels import TritonKernels
from trtx.torch_engine.runner.triton_multiplier import gpu_tilings
from trtx.torch_engine.runner.weights import DecoderWeights, LayerWeights

META = torch.device("meta")
DTYPE = torch.bfloat16
PROCESSORS = 132  # of an H100 or H200
PUBLISHED = {"fp8 rows": ROW_SCALES, "fp8 blocks": BLOCK_SCALES}
ARITHMETICS = ("bf16", "fp8", *PUBLISHED, "deterministic")
NUM_BLOCKS, TOKENS_PER_BLOCK = 4096, 32
DECODES = (1, 2, 8, MOST_ROWS, MOST_ROWS + 1, 64, 65, 128, 256)
"""Numbers of decodes: on both sides of each number at which the launches change."""
PROMPTS = ((1, 1), (1, 8), (1, MOST_ROWS), (2, 40), (1, OVERLAPPED_TOKENS), (1, 2048), (4, 2048), (1, 8192))
"""(sequences, new tokens of each), alone and behind some decodes."""


def _empty(*shape: int, dtype: torch.dtype = DTYPE) -> Tensor:
    return torch.empty(*shape, dtype=dtype, device=META)


@dataclass(frozen=True)
class _ScaledShape:
    """A float8 linear layer without its matmul, which cuBLAS computes."""

    outputs: int
    input_scale: Tensor

    def admit(self) -> None:
        return None

    def __call__(self, x: Tensor) -> Tensor:
        return _empty(x.shape[0], self.outputs)


@dataclass(frozen=True)
class _QuantizedShape:
    """A float8 linear layer that quantizes its input, without its matmul."""

    outputs: int
    quantize: Quantize
    input_scale: None = None

    def admit(self) -> None:
        return None

    def __call__(self, x: Tensor) -> Tensor:
        self.quantize(x)
        return _empty(x.shape[0], self.outputs)


class _EveryTiling:
    """The GEMM backend of a deterministic engine, with each tiling in place of the one that a GPU's probe chooses."""

    def admit(self, weight: Tensor, bias: Tensor | None = None) -> None:
        return None

    def __call__(self, x: Tensor, weight: Tensor, bias: Tensor | None = None, out: Tensor | None = None) -> Tensor:
        out = _empty(x.shape[0], weight.shape[0]) if out is None else out
        for tiling in gpu_tilings():
            tiling(x, weight, bias, out)
        return out


class _FixedExperts(CudaExperts):
    """With the tiles that a deterministic engine uses where a forward's own ones are not invariant."""

    def _choose(self, x: Tensor, weights: ExpertWeights) -> ExpertTiles:
        return fixed_tiles(weights.gate_up.dtype)


class _EveryExperts:
    """The experts of a deterministic engine, with each of the tiles that it may use."""

    def __init__(self, multiplier: Multiplier) -> None:
        self._backends = CudaExperts(multiplier), _FixedExperts(multiplier)

    def admit(self, weights: ExpertWeights) -> None:
        return None

    def __call__(self, x: Tensor, weights: ExpertWeights, kernels: GatedActivation) -> Tensor:
        fitting, _ = (backend(x, weights, kernels) for backend in self._backends)
        return fitting

    def added(self, x: Tensor, weights: ExpertWeights, kernels: GatedActivation, residual: Tensor) -> Tensor:
        fitting, _ = (backend.added(x, weights, kernels, residual) for backend in self._backends)
        return fitting


class Engine:
    """The decoder and the sampling kernels of one model, on the meta device."""

    def __init__(self, config: ModelConfig, arithmetic: str) -> None:
        self._config = config
        self._is_fixed, self._is_fp8 = arithmetic == "deterministic", arithmetic == "fp8"
        self._product = PUBLISHED.get(arithmetic)
        workspace = Workspace.of(META)
        self._multiplier: Multiplier = _EveryTiling() if self._is_fixed else FewRowsMultiplier(workspace)
        self._experts: ExpertBackend = (
            _EveryExperts(self._multiplier) if self._is_fixed else CudaExperts(self._multiplier, overlaps=True)
        )
        self._load = None
        if config.experts is not None:
            self._load = ExpertLoad(config.experts, META, padding_slot=DEFAULT_MAX_BATCH_SIZE)
        weights = self._weights()
        slots = DEFAULT_MAX_BATCH_SIZE + 1
        tables = new_block_tables(
            1, max_batch_size=DEFAULT_MAX_BATCH_SIZE, max_seq_len=config.max_position,
            tokens_per_block=TOKENS_PER_BLOCK, device=META,
        )  # fmt: skip
        geometry = KvGeometry(
            layer_groups((None,) * config.num_layers, config.num_kv_heads, config.head_dim), TOKENS_PER_BLOCK,
            "float8_e4m3fn" if self._is_fp8 else "bfloat16",
        )  # fmt: skip
        pool = _empty(NUM_BLOCKS, *geometry.block_shape, dtype=FP8 if self._is_fp8 else DTYPE)
        cache = KvCache.of_groups(pool, tables, geometry, weights.kv_scales if self._is_fp8 else None)
        kernels = TritonKernels(
            config, cache, _empty(tables.shape[2] * TOKENS_PER_BLOCK, config.head_dim, dtype=torch.float32), PROCESSORS,
            Attention.FIXED if self._is_fixed else Attention.BY_LENGTH, 0 if self._is_fixed else OVERLAPPED_TOKENS,
        )  # fmt: skip
        few = None
        if not self._is_fixed and can_fuse(weights):
            few = FewRowsLayers(weights, kernels, config.norm_eps, workspace, overlaps=True)
        self._decoder = Decoder(weights, kernels, multiplier=self._multiplier, few_tokens=few, load=self._load)
        masks = TokenMasks(DEFAULT_MAX_BATCH_SIZE, config.vocab_size, torch.device("cpu"))
        self._sampling = TritonSampling(
            _empty(slots, FIELDS, dtype=torch.int64), _empty(slots, dtype=torch.int32), config.vocab_size, masks
        )

    def run(self) -> None:
        """Launches the kernels of forwards of all sizes."""
        for count in DECODES:
            self._forward(count, None)
        for count, length in PROMPTS:
            spans = Spans(_int32(count), _int32(count + 1), _int32(count), length)
            for decodes in (0, 4):
                self._forward(decodes + count * length, spans, decodes)
            # In a CUDA graph bucket the decodes are spans too, and the contexts of a short one are known.
            bucket = Spans(_int32(64), _int32(65), _int32(64), 1)
            self._forward(64 + count * length, replace(spans, max_context=0), bucket=bucket)

    def _forward(self, tokens: int, spans: Spans | None, num_decodes: int = 0, bucket: Spans | None = None) -> None:
        ids, slots, positions = _int32(tokens), _int32(tokens), _int32(tokens)
        filled = self._sampling.fill(ids, slots)
        inputs = PassInputs(
            filled, positions, slots, spans, num_decodes, bucket, wanted=None if spans is None else ids[:1]
        )
        logits = self._decoder.logits(self._decoder.hidden(inputs))
        rows = logits.shape[0]
        self._sampling.sample(_empty(rows, dtype=torch.int64), logits, slots[:rows], positions[:rows])

    def _weights(self) -> DecoderWeights:
        config = self._config
        embedding = _empty(config.vocab_size, config.hidden_size)
        return DecoderWeights(
            embedding, tuple(map(self._layer, range(config.num_layers))), _empty(config.hidden_size),
            embedding if config.tied_head else _empty(config.vocab_size, config.hidden_size),
            _empty(config.num_layers, 2, dtype=torch.float32),
        )  # fmt: skip

    def _layer(self, layer: int) -> LayerWeights:
        config, hidden = self._config, self._config.hidden_size
        norm = _empty(config.head_dim) if config.qk_norm else None
        queries, keys = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        return LayerWeights(
            _empty(hidden), self._linear(queries + 2 * keys, hidden, has_bias=config.qkv_bias), norm, norm,
            self._linear(hidden, queries, has_bias=config.output_bias), _empty(hidden), self._mlp(layer),
        )  # fmt: skip

    def _mlp(self, layer: int) -> LayerMlp:
        config, experts, hidden = self._config, self._config.layer_experts(layer), self._config.hidden_size
        if experts is None:
            width = config.intermediate_size
            return DenseMlp(self._linear(2 * width, hidden), self._linear(hidden, width))
        count, width, dtype = experts.count, experts.intermediate_size, FP8 if self._is_fp8 else DTYPE
        one = _empty(1, dtype=torch.float32)[0]
        scales = ExpertScales(_empty(count, 2, dtype=torch.float32), _empty(count, dtype=torch.float32), one, one)
        weights = ExpertWeights(
            _empty(count, hidden), _empty(count, 2 * width, hidden, dtype=dtype),
            _empty(count, hidden, width, dtype=dtype), experts.per_token, experts.normalizes,
            scales=scales if self._is_fp8 else None,
            load=self._load.layer(layer) if self._load is not None else None,
        )  # fmt: skip
        return ExpertMlp(weights, self._experts)

    def _linear(self, outputs: int, width: int, *, has_bias: bool = False) -> Linear:
        if self._is_fp8:
            return _ScaledShape(outputs, _empty(1, dtype=torch.float32)[0])
        if self._product is not None:
            return _QuantizedShape(outputs, quantizer(self._product, META))
        return PlainLinear(_empty(outputs, width), _empty(outputs) if has_bias else None, None, self._multiplier)


def _int32(count: int) -> Tensor:
    return _empty(count, dtype=torch.int32)
