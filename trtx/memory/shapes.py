"""Derives from ``config.json`` what memory planning needs: parameter counts by kind of sharding, and KV sizes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from trtx.checkpoint.facts import architecture_of, is_tied, text_config
from trtx.checkpoint.families import FAMILIES
from trtx.checkpoint.model_config import head_shape
from trtx.memory.vision import vision_parameters

# Parameter counts by how tensor parallelism shards them: over attention "heads", over "kv_heads" (at least one per
# GPU), over the width of an "mlp", over routed "experts". Not sharded: "latent" (MLA's low-rank projections) and
# "whole" (norms and routers).
Parameters = Counter[str]

_DENSE = FAMILIES.values()
_QK_NORM = (
    *(family.model_type for family in _DENSE if family.qk_norm),
    "qwen3_vl_text", "qwen3_vl_moe_text",
)  # fmt: skip
_QKV_BIAS = (
    *(family.model_type for family in _DENSE if family.qkv_bias),
    "qwen2_moe", "qwen2_5_vl", "qwen2_5_vl_text", "qwen2_vl", "qwen2_vl_text",
)  # fmt: skip


_OUTPUT_NORMS = tuple(family.model_type for family in _DENSE if family.arithmetic.has_output_norms)


class UnknownShapeError(Exception):
    """The memory arithmetic does not cover the model, for example because it has recurrent layers."""


@dataclass(frozen=True, slots=True)
class ModelShape:
    """The sizes of a model.

    ``layers``: the parameters of each decoder layer; its norms count as ``whole``. ``attention_width``: the peak number
    of elements per token in attention, before sharding. ``mlp_width``: the same for the dense MLP. ``expert_width``:
    the same for the routed experts together, with one copy of the input for each. ``draft``: the multi-token-prediction
    layer in the checkpoint; empty if there is none. ``latent``: the elements of MLA's compressed KV; None for other
    models. ``windows``: the attention window of each layer; None: all tokens.
    """

    architecture: str
    layers: tuple[Parameters, ...]
    embedding: int
    head: int  # 0 when tied
    vision: int
    draft: Parameters
    hidden: int
    vocab: int
    heads: int
    kv_heads: int
    head_dim: int
    latent: int | None
    experts: int
    attention_width: int
    mlp_width: int
    expert_width: int
    windows: tuple[int | None, ...]
    context_length: int
    dtype: str

    @property
    def parameter_count(self) -> int:
        """Parameters of the decoder including embedding and head, without vision tower and draft layers."""
        return self.embedding + self.head + self.hidden + sum(sum(layer.values()) for layer in self.layers)


def model_shape(config: Mapping[str, Any], *, dtype: str = "bfloat16") -> ModelShape:
    """Derives the sizes from a whole ``config.json``. ``dtype``: that of the weights, which the config may omit.

    Raises UnknownShapeError, which names the field, if one is missing or not covered.
    """
    text = text_config(config)
    architecture = architecture_of(config)
    try:
        _refuse_recurrent(text, architecture)
        return _shape(config, text, architecture, dtype)
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError) as error:
        raise UnknownShapeError(f"{architecture[:80]}: config.json lacks or garbles {str(error)[:200]}") from error


def _refuse_recurrent(text: Mapping[str, Any], architecture: str) -> None:
    listed = {"linear_attention", "mamba"} & set(text.get("layer_types") or ())
    if recurrent := listed or ({"mamba"} if any(str(key).startswith(("mamba", "ssm")) for key in text) else set()):
        raise UnknownShapeError(f"{architecture} has {' and '.join(sorted(recurrent))} layers, which hold no KV")


def _shape(config: Mapping[str, Any], text: Mapping[str, Any], architecture: str, dtype: str) -> ModelShape:
    hidden, vocab, count = int(text["hidden_size"]), int(text["vocab_size"]), int(text["num_hidden_layers"])
    heads, kv_heads, head_dim = head_shape(text)
    if min(hidden, vocab, count, heads, kv_heads, head_dim) < 1:
        raise ValueError("hidden_size, vocab_size, layers, heads, KV heads or head_dim is below 1; expected at least 1")
    is_mla = bool(text.get("kv_lora_rank"))
    attention, attention_width = _mla(text, hidden, heads) if is_mla else _gqa(text, hidden, heads, kv_heads, head_dim)
    layers = tuple(attention + _mlp(text, hidden, index) + _norms(text, hidden) for index in range(count))
    experts, top_k, inner, _ = _experts(text)
    draft: Parameters = Counter()
    if int(text.get("num_nextn_predict_layers") or 0) > 0:
        draft = layers[-1] + Counter({"whole": 2 * hidden * hidden + 3 * hidden})  # eh_proj and its norms (DeepSeek-V3)
    return ModelShape(
        architecture=architecture,
        layers=layers,
        embedding=vocab * hidden,
        head=0 if is_tied(config) else vocab * hidden,
        vision=vision_parameters(config.get("vision_config"), hidden),
        draft=draft,
        hidden=hidden,
        vocab=vocab,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        latent=int(text["kv_lora_rank"]) + int(text["qk_rope_head_dim"]) if is_mla else None,
        experts=experts,
        attention_width=attention_width,
        mlp_width=3 * _dense_width(text) if any("mlp" in layer for layer in layers) else 0,
        expert_width=top_k * (hidden + 3 * inner) if experts else 0,
        windows=_windows(text, count),
        context_length=int(text.get("max_position_embeddings") or config.get("max_position_embeddings") or 8192),
        dtype=dtype,
    )


def _gqa(text: Mapping[str, Any], hidden: int, heads: int, kv_heads: int, head_dim: int) -> tuple[Parameters, int]:
    kind, query, key = text.get("model_type"), heads * head_dim, kv_heads * head_dim
    own: Parameters = Counter({"heads": 2 * hidden * query, "kv_heads": 2 * hidden * key})
    if text.get("attention_bias") or kind in _QKV_BIAS:
        own += Counter({"heads": query, "kv_heads": 2 * key})
    if text.get("attention_bias"):
        own += Counter({"whole": hidden})  # the bias of the output projection
    if kind in _QK_NORM:
        own += Counter({"whole": 2 * head_dim})
    if kind == "gpt_oss":
        own += Counter({"heads": heads})  # attention sinks
    return own, 2 * query + 2 * key


def _mla(text: Mapping[str, Any], hidden: int, heads: int) -> tuple[Parameters, int]:
    """Returns the parameters and the width of DeepSeek-V2/V3's latent attention.

    The low-rank projections are replicated on every GPU; the projections per head are sharded.
    """
    nope, rope, value = (int(text[name]) for name in ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"))
    latent, query_rank = int(text["kv_lora_rank"]), text.get("q_lora_rank")
    own: Parameters = Counter({"latent": hidden * (latent + rope), "whole": latent})
    own += Counter({"heads": heads * (latent * (nope + value) + value * hidden)})
    if query_rank:
        own += Counter(
            {"latent": hidden * query_rank, "whole": query_rank, "heads": query_rank * heads * (nope + rope)}
        )
    else:
        own += Counter({"heads": hidden * heads * (nope + rope)})
    return own, heads * (2 * (nope + rope) + 2 * value)


def _experts(text: Mapping[str, Any]) -> tuple[int, int, int, int]:
    """Returns (routed experts, experts per token, width of one expert, total width of the shared experts)."""
    count = int(text.get("n_routed_experts") or text.get("num_local_experts") or text.get("num_experts") or 0)
    inner = int(text.get("moe_intermediate_size") or text["intermediate_size"])
    top_k = int(text.get("num_experts_per_tok") or text.get("experts_per_token") or 1)
    shared = int(text.get("n_shared_experts") or 0) * inner or int(text.get("shared_expert_intermediate_size") or 0)
    if text.get("model_type") == "llama4_text":
        shared = inner  # one shared expert, as wide as a routed one
    return count, top_k, inner, shared


def _dense_width(text: Mapping[str, Any]) -> int:
    return int(text.get("intermediate_size_mlp") or text["intermediate_size"])


def _mlp(text: Mapping[str, Any], hidden: int, layer: int) -> Parameters:
    experts, _, inner, shared = _experts(text)
    if not experts or not _is_sparse(text, layer):
        return Counter({"mlp": 3 * hidden * _dense_width(text)})
    own: Parameters = Counter({"experts": experts * 3 * hidden * inner, "whole": experts * hidden})
    if shared:
        own += Counter({"mlp": 3 * hidden * shared})
    if text.get("shared_expert_intermediate_size"):
        own += Counter({"whole": hidden})  # the gate of Qwen's shared expert
    if text.get("model_type") == "gpt_oss":
        own += Counter({"experts": experts * (2 * inner + hidden), "whole": experts})  # biases
    if text.get("topk_method") == "noaux_tc":
        own += Counter({"whole": experts})  # e_score_correction_bias
    return own


def _is_sparse(text: Mapping[str, Any], layer: int) -> bool:
    if listed := text.get("moe_layers"):
        return layer in listed
    if step := text.get("interleave_moe_layer_step"):  # Llama 4: 2 makes layers 1, 3, 5, … sparse
        return (layer + 1) % int(step) == 0
    if layer in (text.get("mlp_only_layers") or ()) or (layer + 1) % int(text.get("decoder_sparse_step") or 1):
        return False
    return layer >= int(text.get("first_k_dense_replace") or 0)


def _norms(text: Mapping[str, Any], hidden: int) -> Parameters:
    return Counter({"whole": (4 if text.get("model_type") in _OUTPUT_NORMS else 2) * hidden})


def _windows(text: Mapping[str, Any], count: int) -> tuple[int | None, ...]:
    window = text.get("sliding_window") if text.get("use_sliding_window", True) else None
    if not window:
        return (None,) * count
    if kinds := text.get("layer_types"):
        return tuple(int(window) if kind == "sliding_attention" else None for kind in kinds[:count])
    if pattern := text.get("sliding_window_pattern") or (2 if text.get("model_type") == "gpt_oss" else None):
        return tuple(None if (index + 1) % int(pattern) == 0 else int(window) for index in range(count))
    return (int(window),) * count
