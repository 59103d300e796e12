"""Loads an EAGLE-3 head for a target model: its weights, its store of hidden states, and its KV pool."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from trtx.checkpoint.drafts import find_draft, read_eagle_config
from trtx.checkpoint.model_config import ModelConfig
from trtx.torch_engine.runner.args import RunnerArgs
from trtx.torch_engine.runner.eagle_decoder import EagleDecoder, EagleWeights
from trtx.torch_engine.runner.eagle_head import DraftChain, EagleHead
from trtx.torch_engine.runner.features import FeatureStore
from trtx.torch_engine.runner.kernels import Kernels, KvCache
from trtx.torch_engine.runner.linear import Multiplier
from trtx.torch_engine.runner.regions import zeroed_tensors
from trtx.torch_engine.runner.rope import rotary_table
from trtx.torch_engine.runner.runner_memory import RunnerMemory, WeightMemory
from trtx.torch_engine.runner.slots import BlockTable


@dataclass(frozen=True, slots=True)
class EagleParts:
    """The parts of a head: ``features``, which the target model's forward fills, and what else :meth:`head` needs.

    ``memory``: its weights, and its KV together with the features.
    """

    config: ModelConfig  # of the head's layer
    weights: EagleWeights
    embedding: Tensor
    features: FeatureStore
    pool: Tensor  # [num_blocks, num_kv_heads, 1, 2, tokens_per_block, head_dim]
    cache: KvCache  # of the pool
    multiplier: Multiplier
    memory: RunnerMemory

    @classmethod
    def of(
        cls, args: RunnerArgs, target: ModelConfig, embedding: Tensor, cache: KvCache, num_blocks: int,
        multiplier: Multiplier, dtype: torch.dtype,
    ) -> EagleParts:  # fmt: skip
        """``args``: with a draft. ``embedding``, ``cache``: the target model's. Raises UsageError."""
        draft, device = args.draft, embedding.device
        assert draft is not None
        directory = find_draft(draft.model, draft.kind)
        config = read_eagle_config(directory, target, layers=draft.layers)

        def read(source: Path) -> EagleWeights:
            return EagleWeights(source, config, torch.device("cpu"), multiplier, dtype)

        weights = EagleWeights(directory, config, device, multiplier, dtype)
        weights.admit(multiplier)
        movable = WeightMemory(weights, directory, read)
        if args.sleeps:
            movable.move_to_regions(keeps_copy=args.keeps_weights)
        layer, size = config.decoder, cache.tokens_per_block
        shapes = [
            (num_blocks, layer.num_kv_heads, 1, 2, size, layer.head_dim), (num_blocks * size + 1, layer.hidden_size)
        ]  # fmt: skip
        region, (pool, rows) = zeroed_tensors(shapes, dtype, device, sleeps=args.sleeps)
        features = FeatureStore(config.captured, weights.projection, cache, rows, multiplier)
        return cls(
            layer, weights, embedding if weights.embedding is None else weights.embedding, features,
            pool, KvCache.of(pool, cache.block_table), multiplier, RunnerMemory(movable, region),
        )  # fmt: skip

    def rotary(self, positions: int) -> Tensor:
        return rotary_table(self.config.rope, self.config.head_dim, positions, self.cache.pool.device)

    def head(self, kernels: Kernels, block_table: BlockTable, graph_sizes: Sequence[int]) -> EagleHead:
        """``graph_sizes``: batch sizes of CUDA graphs, ascending; (): none."""
        decoder = EagleDecoder(self.weights, self.embedding, kernels, self.multiplier)
        rows = self.features.rows
        chain = DraftChain(decoder, self.cache, rows.shape[1], rows.dtype, graph_sizes)
        return EagleHead(decoder, chain, self.features, self.cache, block_table, (self.pool, self.features.blocks))
