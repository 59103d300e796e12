"""The forward pass of a dense decoder: Llama 3, Qwen2 and Qwen3 differ by three optional parameters."""

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
        normed = kernels.rms_norm(residual, weights.layers[0].input_norm)
        for index, layer in enumerate(weights.layers):
            qkv = F.linear(normed, layer.qkv, layer.qkv_bias)
            q = kernels.rope_and_write(qkv, index, layer, inputs)
            attended = F.linear(kernels.attend(q, index, inputs), layer.output, layer.output_bias)
            normed, residual = kernels.add_rms_norm(attended, residual, layer.mlp_norm)
            mlp = F.linear(kernels.silu_and_mul(F.linear(normed, layer.gate_up)), layer.down)
            is_last = index + 1 == len(weights.layers)
            following = weights.final_norm if is_last else weights.layers[index + 1].input_norm
            normed, residual = kernels.add_rms_norm(mlp, residual, following)
        return normed

    @property
    def dtype(self) -> torch.dtype:
        return self._weights.head.dtype

    def logits(self, hidden: Tensor, out: Tensor | None = None) -> Tensor:
        """``[n, hidden]`` to ``[n, vocab]``, in the model's dtype."""
        return torch.mm(hidden, self._weights.head.t(), out=out)
