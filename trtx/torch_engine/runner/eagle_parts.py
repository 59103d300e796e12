"""Loads an EAGLE-3 head for a target model: its weights, its store of hidden states, and its KV pool."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from trtx.checkpoint.drafts import find_draft, read_eagle_config
from trtx.checkpoint.model_config import ModelConfig
from trtx.torch_engine.runner.args import DraftArgs
from trtx.torch_engine.runner.eagle_decoder import EagleDecoder, EagleWeights
from trtx.torch_engine.runner.eagle_head import DraftChain, EagleHead
from trtx.torch_engine.runner.features import FeatureStore
from trtx.torch_engine.runner.kernels import Kernels, KvCache
from trtx.torch_engine.runner.linear import Multiplier
from trtx.torch_engine.runner.rope import rotary_table
from trtx.torch_engine.runner.slots import BlockTable


@dataclass(frozen=True, slots=True)
class EagleParts:
    """The parts of a head: ``features``, which the target model's forward fills, and what else :meth:`head` needs."""

    config: ModelConfig  # of the head's layer
    weights: EagleWeights
    features: FeatureStore
    cache: KvCache
    multiplier: Multiplier

    @classmethod
    def of(
        cls, draft: DraftArgs, target: ModelConfig, embedding: Tensor, cache: KvCache, num_blocks: int,
        multiplier: Multiplier, dtype: torch.dtype,
    ) -> EagleParts:  # fmt: skip
        """``embedding``, ``cache``: the target model's. Raises UsageError."""
        directory = find_draft(draft.model, draft.kind)
        config = read_eagle_config(directory, target, layers=draft.layers)
        weights = EagleWeights(directory, config, embedding, multiplier, dtype)
        layer = config.decoder
        pool = torch.zeros(
            num_blocks, layer.num_kv_heads, 1, 2, cache.tokens_per_block, layer.head_dim, dtype=dtype,
            device=embedding.device,
        )  # fmt: skip
        features = FeatureStore(config.captured, weights.projection, cache, num_blocks, multiplier)
        return cls(layer, weights, features, KvCache.of(pool, cache.block_table), multiplier)

    def rotary(self, positions: int) -> Tensor:
        return rotary_table(self.config.rope, self.config.head_dim, positions, self.cache.pool.device)

    def head(self, kernels: Kernels, block_table: BlockTable, graph_sizes: Sequence[int]) -> EagleHead:
        """``graph_sizes``: batch sizes of CUDA graphs, ascending; (): none."""
        decoder = EagleDecoder(self.weights, kernels, self.multiplier)
        rows = self.features.rows
        chain = DraftChain(decoder, self.cache, rows.shape[1], rows.dtype, graph_sizes)
        return EagleHead(decoder, chain, self.features, self.cache, block_table)
