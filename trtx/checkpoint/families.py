"""The decoders that the torch engine supports: what transformers' config class and model of each imply.

The defaults of missing fields are copied from transformers 5.23, because importing it takes seconds.
``tests/unit/checkpoint/test_class_defaults.py`` compares them with the installed classes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

DEFAULT_THETA = 10000.0


@dataclass(frozen=True, slots=True)
class MropeSections:
    """The rotary sections of a family with three positions per token.

    ``silent``: transformers' default if the file has no sections.
    """

    silent: tuple[int, int, int]
    interleaved: bool


@dataclass(frozen=True, slots=True)
class Arithmetic:
    """What the layers of a model compute in another way than most decoders do.

    ``norm_adds_one``: norms multiply by 1 plus the stored weight, in float32, and round once. ``has_output_norms``:
    attention and MLP end with norms of their own. ``gates_with_gelu``: the gate of an MLP is GELU in its tanh
    approximation, in place of SiLU. ``scales_embeddings``: embeddings are multiplied by the root of their size.
    """

    norm_adds_one: bool = False
    has_output_norms: bool = False
    gates_with_gelu: bool = False
    scales_embeddings: bool = False


COMMON = Arithmetic()
"""What most decoders compute."""


@dataclass(frozen=True, slots=True)
class Family:
    """The features of transformers' model of an architecture, and the fields that its config class derives.

    ``defaults``: the defaults of missing fields. ``theta``: the default of rope_theta.
    ``kv_heads``: "derived" if null means as many KV heads as query heads. ``derives_head_dim``: the class computes
    head_dim if it is missing or null. ``window``: whether ``sliding_window`` applies only if ``use_sliding_window`` is
    true ("switched"), the class does not have the field ("unknown"), or it applies whatever the switch says ("always").
    "whole" is "switched" for all layers at once: the model reads no ``max_window_layers`` and no ``layer_types``.
    "alternating" is "always", and without ``layer_types`` every second layer slides, from the first one on.
    ``aliases``: other names of fields, as in the class's ``attribute_map``. ``experts``: the MLPs of some layers are
    mixtures of experts, with the fields and the arithmetic of this model (:mod:`trtx.checkpoint.experts`).
    "patterned" is "always", and without ``layer_types`` all but every ``sliding_window_pattern``-th layer slide.
    ``silent_rope``: the class's ``rope_parameters`` if the file has none. ``has_sinks``: each head has a learned logit
    in the denominator of its softmax. ``is_gemma3``: the config has what :mod:`trtx.checkpoint.gemma3` reads.
    """

    model_type: str
    defaults: Mapping[str, Any]
    theta: float = DEFAULT_THETA
    kv_heads: Literal["derived", "stated"] = "derived"
    derives_head_dim: bool = False
    window: Literal["switched", "unknown", "always", "whole", "alternating", "patterned"] = "switched"
    qkv_bias: bool | None = None  # None: attention_bias decides, for the output projection too; else it is ignored
    qk_norm: bool = False
    takes_head_dim: bool = True  # False: always hidden_size / num_attention_heads; the field is ignored
    mrope: MropeSections | None = None
    experts: Literal["qwen3_moe", "gpt_oss"] | None = None
    aliases: Mapping[str, str] = field(default_factory=dict)
    silent_rope: Mapping[str, Any] | None = None
    has_sinks: bool = False
    arithmetic: Arithmetic = COMMON
    is_gemma3: bool = False


def decoder_defaults(
    vocab: int, hidden: int, inner: int, layers: int, heads: int, positions: int, **more: Any
) -> dict[str, Any]:
    """Returns the defaults of the fields that every decoder class has, and of those in ``more``."""
    return {
        "vocab_size": vocab,
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "max_position_embeddings": positions,
        "rms_norm_eps": 1e-6,
        **more,
    }


UNTIED = {"tie_word_embeddings": False}
NO_BIAS = {"attention_bias": False}
_SILU = {"hidden_act": "silu"}
_SWITCHED = {"use_sliding_window": False, "sliding_window": 4096}

FAMILIES: Mapping[str, Family] = {
    "LlamaForCausalLM": Family(
        "llama",
        decoder_defaults(32000, 4096, 11008, 32, 32, 2048, mlp_bias=False, **_SILU, **UNTIED, **NO_BIAS),
        derives_head_dim=True,
        window="unknown",
    ),
    "Qwen2ForCausalLM": Family(
        "qwen2",
        decoder_defaults(
            151936, 4096, 22016, 32, 32, 32768, num_key_value_heads=32, max_window_layers=28,
            **_SILU, **UNTIED, **_SWITCHED,
        ),
        derives_head_dim=True,
        qkv_bias=True,
    ),
    "Qwen3ForCausalLM": Family(
        "qwen3",
        decoder_defaults(
            151936, 4096, 22016, 32, 32, 32768, num_key_value_heads=32, head_dim=128, max_window_layers=28,
            **_SILU, **UNTIED, **_SWITCHED, **NO_BIAS,
        ),
        qk_norm=True,
    ),
    "MistralForCausalLM": Family(
        "mistral",
        decoder_defaults(
            32000, 4096, 14336, 32, 32, 131072, num_key_value_heads=8, sliding_window=4096, **_SILU, **UNTIED
        ),
        kv_heads="stated",
        derives_head_dim=True,
        window="always",
        qkv_bias=False,
    ),
    "Qwen3MoeForCausalLM": Family(
        "qwen3_moe",
        decoder_defaults(
            151936, 2048, 6144, 24, 32, 32768, num_key_value_heads=4, decoder_sparse_step=1,
            moe_intermediate_size=768, num_experts_per_tok=8, num_experts=128, norm_topk_prob=False,
            **_SILU, **UNTIED, **_SWITCHED, **NO_BIAS,
        ),
        kv_heads="stated",
        derives_head_dim=True,
        window="whole",
        qk_norm=True,
        experts="qwen3_moe",
        aliases={"num_experts": "num_local_experts"},
    ),
    "GptOssForCausalLM": Family(
        "gpt_oss",
        decoder_defaults(
            201088, 2880, 2880, 36, 64, 131072, num_key_value_heads=8, head_dim=64, sliding_window=128,
            num_local_experts=128, num_experts_per_tok=4, swiglu_alpha=1.702, swiglu_limit=7.0, attention_bias=True,
            **_SILU, **UNTIED,
        ) | {"rms_norm_eps": 1e-5},
        theta=150000.0,
        kv_heads="stated",
        derives_head_dim=True,
        window="alternating",
        experts="gpt_oss",
        aliases={"num_experts": "num_local_experts"},
        silent_rope={
            "rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False,
            "original_max_position_embeddings": 4096,
        },
        has_sinks=True,
    ),
    "Gemma3ForCausalLM": Family(
        "gemma3_text",
        decoder_defaults(
            262208, 2304, 9216, 26, 8, 131072, num_key_value_heads=4, head_dim=256,
            hidden_activation="gelu_pytorch_tanh", sliding_window=4096, query_pre_attn_scalar=256,
            use_bidirectional_attention=False, tie_word_embeddings=True, **NO_BIAS,
        ),
        kv_heads="stated",
        window="patterned",
        qk_norm=True,
        arithmetic=Arithmetic(norm_adds_one=True, has_output_norms=True, gates_with_gelu=True, scales_embeddings=True),
        is_gemma3=True,
    ),
}  # fmt: skip
"""By architecture."""

NESTED_FAMILIES: Mapping[str, Family] = {
    "qwen2_5_vl_text": Family(
        "qwen2_5_vl_text",
        decoder_defaults(
            152064, 8192, 29568, 80, 64, 32768, num_key_value_heads=8, max_window_layers=80, **_SILU, **_SWITCHED
        ) | {"rms_norm_eps": 1e-5},
        theta=1e6,
        derives_head_dim=True,
        takes_head_dim=False,
        qkv_bias=True,
        mrope=MropeSections((16, 24, 24), interleaved=False),
    ),
    "qwen3_vl_text": Family(
        "qwen3_vl_text",
        decoder_defaults(
            151936, 4096, 22016, 32, 32, 128000, num_key_value_heads=32, head_dim=128, **_SILU, **NO_BIAS
        ),
        theta=5e5,
        window="unknown",
        qk_norm=True,
        mrope=MropeSections((24, 20, 20), interleaved=True),
    ),
}  # fmt: skip
"""Decoders that exist only nested in a multimodal model, by ``model_type``."""
