"""The forward pass of a dense decoder: its families differ by three optional parameters."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from trtx.torch_engine.runner.kernels import Kernels, PassInputs
from trtx.torch_engine.runner.weights import DecoderWeights


class Decoder:
    """Weights and kernels of one device. Holds no request's state: that is the KV cache's, behind the kernels."""

    def __init__(self, weights: DecoderWeights, kernels: Kernels) -> None:
        self._weights = weights
        self._kernels = kernels

    def hidden(self, inputs: PassInputs) -> Tensor:
        """Writes the KV of every token of the pass; returns ``[num_tokens, hidden]`` after the final norm."""
        kernels, weights = self._kernels, self._weights
        residual = F.embedding(inputs.token_ids, weights.embedding)
        for begin, rows in inputs.media:
            residual[begin : begin + rows.shape[0]] = rows
        first = weights.layers[0]
        normed = kernels.rms_norm(residual, first.input_norm, first.qkv.input_scale)
        for index, layer in enumerate(weights.layers):
            q = kernels.rope_and_write(layer.qkv(normed), index, layer, inputs)
            attended = layer.output(kernels.attend(q, index, inputs, layer.output.input_scale))
            normed, residual = kernels.add_rms_norm(attended, residual, layer.mlp_norm, layer.gate_up.input_scale)
            mlp = layer.down(kernels.silu_and_mul(layer.gate_up(normed), layer.down.input_scale))
            if index + 1 < len(weights.layers):
                following = weights.layers[index + 1]
                normed, residual = kernels.add_rms_norm(mlp, residual, following.input_norm, following.qkv.input_scale)
        return kernels.add_rms_norm(mlp, residual, weights.final_norm)[0]

    @property
    def dtype(self) -> torch.dtype:
        return self._weights.head.dtype

    @property
    def hidden_size(self) -> int:
        return self._weights.embedding.shape[1]

    def logits(self, hidden: Tensor, out: Tensor | None = None) -> Tensor:
        """``[n, hidden]`` to ``[n, vocab]``, in the model's dtype."""
        return torch.mm(hidden, self._weights.head.t(), out=out)
