"""The layer of an EAGLE-3 head: it reads a token's embedding together with the target model's hidden states."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from trtx.checkpoint.drafts import EagleConfig
from trtx.checkpoint.weight_index import weight_files
from trtx.errors import UsageError
from trtx.torch_engine.runner.kernels import Kernels, PassInputs
from trtx.torch_engine.runner.linear import Multiplier, PlainLinear
from trtx.torch_engine.runner.mlp import DenseMlp
from trtx.torch_engine.runner.tensor_source import read_tensors
from trtx.torch_engine.runner.weights import LayerWeights

_LAYER, _EMBEDDING, _TO_TARGET, _OF_TARGET = "midlayer", "embed_tokens.weight", "d2t", "t2d"


class EagleWeights:
    """The tensors of a public EAGLE-3 checkpoint, merged for serving.

    ``projection`` [hidden, 3 * hidden] is the checkpoint's ``fc``. ``embedding``: None if the checkpoint has none, and
    the head reads the target model's. ``to_target`` [draft_vocab_size] int64: the target model's id of each draft
    token.
    """

    def __init__(
        self, directory: Path, config: EagleConfig, device: torch.device, multiplier: Multiplier, dtype: torch.dtype
    ) -> None:
        """Raises UsageError. Call :meth:`admit` before the first forward."""
        decoder = config.decoder
        hidden, inner, vocab = decoder.hidden_size, decoder.intermediate_size, config.draft_vocab_size
        attention, mlp = f"{_LAYER}.self_attn", f"{_LAYER}.mlp"
        shapes = {
            "fc.weight": (hidden, 3 * hidden),
            "norm.weight": (hidden,),
            "lm_head.weight": (vocab, hidden),
            f"{_LAYER}.hidden_norm.weight": (hidden,),
            f"{_LAYER}.input_layernorm.weight": (hidden,),
            f"{_LAYER}.post_attention_layernorm.weight": (hidden,),
            f"{attention}.q_proj.weight": (decoder.q_size, 2 * hidden),
            f"{attention}.k_proj.weight": (decoder.kv_size, 2 * hidden),
            f"{attention}.v_proj.weight": (decoder.kv_size, 2 * hidden),
            f"{attention}.o_proj.weight": (hidden, decoder.q_size),
            f"{mlp}.gate_proj.weight": (inner, hidden),
            f"{mlp}.up_proj.weight": (inner, hidden),
            f"{mlp}.down_proj.weight": (hidden, inner),
        }
        if vocab < decoder.vocab_size:
            shapes[_TO_TARGET] = (vocab,)
        optional = {_EMBEDDING: (decoder.vocab_size, hidden), _TO_TARGET: (vocab,), _OF_TARGET: (decoder.vocab_size,)}
        found = {
            name: value if name in (_TO_TARGET, _OF_TARGET) else value.to(device, dtype)
            for name, value in read_tensors(directory, weight_files(directory), shapes, optional)
        }

        def linear(*names: str) -> PlainLinear:
            return PlainLinear(torch.cat([found.pop(f"{name}.weight") for name in names]), None, None, multiplier)

        self.projection = found["fc.weight"]
        self.embedding = found.get(_EMBEDDING)
        self.head = found["lm_head.weight"]
        self.final_norm = found["norm.weight"]
        self.hidden_norm = found[f"{_LAYER}.hidden_norm.weight"]
        self.layer = LayerWeights(
            input_norm=found[f"{_LAYER}.input_layernorm.weight"],
            qkv=linear(f"{attention}.q_proj", f"{attention}.k_proj", f"{attention}.v_proj"),
            q_norm=None,
            k_norm=None,
            output=linear(f"{attention}.o_proj"),
            mlp_norm=found[f"{_LAYER}.post_attention_layernorm.weight"],
            mlp=DenseMlp(linear(f"{mlp}.gate_proj", f"{mlp}.up_proj"), linear(f"{mlp}.down_proj")),
        )
        ids = torch.arange(vocab)
        if _TO_TARGET in found:  # offsets from the draft token's id
            ids = ids + found[_TO_TARGET].long()
        if int(ids.min()) < 0 or int(ids.max()) >= decoder.vocab_size:
            raise UsageError(
                f"{directory}: tensor {_TO_TARGET} leads to token {int(ids.max())}, and the target model has "
                f"{decoder.vocab_size} tokens; expected an EAGLE-3 head that was trained for this model"
            )
        self.to_target = ids.to(device)

    def admit(self, multiplier: Multiplier) -> None:
        """Announces the weights to what computes with them, once before their use."""
        multiplier.admit(self.projection)
        self.layer.qkv.admit()
        self.layer.output.admit()
        self.layer.mlp.admit()
        multiplier.admit(self.head)


class EagleDecoder:
    """The forward of the head, over its own KV cache."""

    def __init__(self, weights: EagleWeights, embedding: Tensor, kernels: Kernels, multiplier: Multiplier) -> None:
        """``embedding`` [vocab_size, hidden]: the head's own, or the target model's."""
        self._weights = weights
        self._embedding = embedding
        self._kernels = kernels
        self._multiplier = multiplier

    def hidden(self, inputs: PassInputs, features: Tensor) -> Tensor:
        """Writes the KV of every token, and returns hidden states ``[rows, hidden]`` before the final norm.

        ``inputs.token_ids``: for each position the token after it. ``features`` [tokens, hidden]: those of the
        positions themselves. The rows are all tokens, or those in ``inputs.wanted``.
        """
        kernels, weights, layer = self._kernels, self._weights, self._weights.layer
        inputs = kernels.planned(inputs, features.dtype)
        embedded = F.embedding(inputs.token_ids, self._embedding)
        joined = torch.cat(
            (kernels.rms_norm(embedded, layer.input_norm), kernels.rms_norm(features, weights.hidden_norm)), dim=-1
        )
        q = kernels.rope_and_write(layer.qkv(joined), 0, layer, inputs)
        attended, residual = kernels.attend(q, 0, inputs), features
        if inputs.wanted is not None:
            attended, residual = attended.index_select(0, inputs.wanted), residual.index_select(0, inputs.wanted)
        normed, residual = kernels.add_rms_norm(layer.output(attended), residual, layer.mlp_norm)
        return residual + layer.mlp(normed, kernels)

    def tokens(self, hidden: Tensor) -> Tensor:
        """Returns the target model's ids ``[rows]`` int32 of the most probable draft tokens."""
        normed = self._kernels.rms_norm(hidden, self._weights.final_norm)
        logits = self._multiplier(normed, self._weights.head)
        return self._weights.to_target[logits.argmax(-1)].int()
