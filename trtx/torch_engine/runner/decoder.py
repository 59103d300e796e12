"""The forward of a decoder. Optional parameters and weights cover the differences between model families."""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from trtx.torch_engine.runner.expert_load import ExpertLoad
from trtx.torch_engine.runner.features import EMBEDDINGS, FeatureStore
from trtx.torch_engine.runner.fp8 import FP8
from trtx.torch_engine.runner.kernels import Kernels, PassInputs
from trtx.torch_engine.runner.linear import LIBRARY_MULTIPLIER, LayerProducts, Multiplier
from trtx.torch_engine.runner.mrope import Mrope
from trtx.torch_engine.runner.weights import DecoderWeights


class Decoder:
    """Weights and kernels on one device. It holds no state of a request: that is in the KV cache, which the kernels
    address.
    """

    def __init__(
        self,
        weights: DecoderWeights,
        kernels: Kernels,
        *,
        multiplier: Multiplier = LIBRARY_MULTIPLIER,
        mrope: Mrope | None = None,
        deepstack_levels: int = 0,
        few_tokens: LayerProducts | None = None,
        features: FeatureStore | None = None,
        load: ExpertLoad | None = None,
        embedding_scale: float | None = None,
    ) -> None:
        """``multiplier``: GEMM backend of the LM head.

        ``few_tokens``: computes the layers of small forwards. ``deepstack_levels``: number of extra vectors in a media
        row; each of the first layers adds one to its residual stream. ``features``: takes the outputs of some layers.
        ``load``: counts the tokens of experts. ``embedding_scale``: the embeddings are multiplied by it, rounded to
        their dtype.
        """
        self._weights = weights
        self._kernels = kernels
        self._multiplier = multiplier
        self.mrope = mrope
        self._deepstack_levels = deepstack_levels
        self._few_tokens = few_tokens
        self._features = features
        self._load = load
        self._embedding_scale = None
        if embedding_scale is not None:
            self._embedding_scale = weights.embedding.new_tensor(embedding_scale)

    def hidden(self, inputs: PassInputs) -> Tensor:
        """Writes the KV of every token and returns hidden states ``[rows, hidden]`` after the final norm.

        The rows are all tokens, or those in ``inputs.wanted``. After the last layer's attention, only these are
        computed.
        """
        kernels, weights = self._kernels, self._weights
        inputs = kernels.planned(inputs, self.dtype)
        residual = F.embedding(inputs.token_ids, weights.embedding)
        if self._embedding_scale is not None:
            residual *= self._embedding_scale
        if self.mrope is not None and inputs.rotary is None:
            inputs = replace(inputs, rotary=self.mrope.of_decodes(inputs.positions, inputs.slots))
        for begin, rows in inputs.media:
            residual[begin : begin + rows.shape[0]] = rows[:, : residual.shape[1]]
        if self._load is not None:
            self._load.begin(inputs.slots)
        self._capture(EMBEDDINGS, residual, inputs)
        if self._few_tokens is not None and not inputs.media and self._few_tokens.takes(residual.shape[0]):
            return _rows(self._hidden_of_few(self._few_tokens, residual, inputs), inputs.wanted)
        # A model whose last layer also adds media vectors needs all tokens up to its end, since media are addressed by
        # token offset.
        is_deep = len(weights.layers) > self._deepstack_levels
        before_last, at_end = (inputs.wanted, None) if is_deep else (None, inputs.wanted)
        first, hidden = weights.layers[0], residual.shape[1]
        normed = kernels.rms_norm(residual, first.input_norm, first.qkv.input_scale)
        for index, layer in enumerate(weights.layers):
            q = kernels.rope_and_write(layer.qkv(normed), index, layer, inputs)
            attended = kernels.attend(q, index, inputs, layer.output.input_scale, layer.sinks)
            if index + 1 == len(weights.layers):
                attended, residual = _rows(attended, before_last), _rows(residual, before_last)
                if self._load is not None:
                    self._load.select(before_last)
            output = layer.output(attended)
            if layer.output_norm is not None:
                output = kernels.rms_norm(output, layer.output_norm)
            normed, residual = kernels.add_rms_norm(output, residual, layer.mlp_norm, layer.mlp.input_scale)
            mlp = layer.mlp(normed, kernels)
            if layer.mlp_output_norm is not None:
                mlp = kernels.rms_norm(mlp, layer.mlp_output_norm)
            if index < self._deepstack_levels:
                for begin, rows in inputs.media:
                    mlp[begin : begin + rows.shape[0]] += rows[:, (index + 1) * hidden : (index + 2) * hidden]
            if index + 1 < len(weights.layers):
                following = weights.layers[index + 1]
                normed, residual = kernels.add_rms_norm(mlp, residual, following.input_norm, following.qkv.input_scale)
                self._capture(index, residual, inputs)
        return _rows(kernels.add_rms_norm(mlp, residual, weights.final_norm)[0], at_end)

    def _hidden_of_few(self, products: LayerProducts, residual: Tensor, inputs: PassInputs) -> Tensor:
        kernels = self._kernels
        for index, layer in enumerate(self._weights.layers):
            q = kernels.rope_and_write(products.qkv(residual, index), index, layer, inputs)
            residual = products.output(kernels.attend(q, index, inputs, sinks=layer.sinks), index, residual)
            residual = products.mlp(residual, index)
            self._capture(index, residual, inputs)
        return kernels.rms_norm(residual, self._weights.final_norm)

    def _capture(self, layer: int, residual: Tensor, inputs: PassInputs) -> None:
        if self._features is not None and layer in self._features.layers:
            self._features.capture(layer, residual, inputs)

    @property
    def dtype(self) -> torch.dtype:
        return self._weights.head.dtype

    @property
    def hidden_size(self) -> int:
        return self._weights.embedding.shape[1]

    @property
    def media_width(self) -> int:
        """Number of columns of a media row."""
        return self.hidden_size * (1 + self._deepstack_levels)

    def logits(self, hidden: Tensor, out: Tensor | None = None) -> Tensor:
        """Returns logits: ``[n, hidden]`` to ``[n, vocab]``, in the model's dtype."""
        return self._multiplier(hidden, self._weights.head, out=out)


def _rows(x: Tensor, rows: Tensor | None) -> Tensor:
    """Returns ``x[rows]`` for a contiguous ``[n, columns]``, or x for None. Gathers float8 as bytes."""
    if rows is None:
        return x
    whole = x.view(torch.uint8) if x.dtype == FP8 else x
    return whole.index_select(0, rows).view(x.dtype)
