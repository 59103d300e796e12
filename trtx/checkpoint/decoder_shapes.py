"""The configs of the ``synthetic:`` text models, as their publishers write them."""

from __future__ import annotations

from typing import Any


def qwen3(hidden: int, layers: int, heads: int, kv_heads: int, intermediate: int, *, tied: bool) -> dict[str, Any]:
    """Returns the config of a dense Qwen3, after Qwen/Qwen3-*: 40,960 positions, theta 1e6, always head_dim 128."""
    return {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "head_dim": 128,
        "hidden_act": "silu",
        "hidden_size": hidden,
        "initializer_range": 0.02,
        "intermediate_size": intermediate,
        "max_position_embeddings": 40960,
        "max_window_layers": layers,
        "num_attention_heads": heads,
        "num_hidden_layers": layers,
        "num_key_value_heads": kv_heads,
        "rms_norm_eps": 1e-6,
        "rope_scaling": None,
        "rope_theta": 1000000.0,
        "sliding_window": None,
        "tie_word_embeddings": tied,
        "torch_dtype": "bfloat16",
        "use_cache": True,
        "use_sliding_window": False,
        "vocab_size": 151936,
    }


def qwen3_moe(
    hidden: int, layers: int, heads: int, kv_heads: int, *, experts: int, per_token: int, expert_width: int
) -> dict[str, Any]:
    """Returns the config of a mixture of experts, after Qwen/Qwen3-30B-A3B: every layer has experts."""
    return qwen3(hidden, layers, heads, kv_heads, 3 * hidden, tied=False) | {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "moe_intermediate_size": expert_width,
        "norm_topk_prob": True,
        "num_experts": experts,
        "num_experts_per_tok": per_token,
        "output_router_logits": False,
        "router_aux_loss_coef": 0.001,
    }


def qwen2(hidden: int, layers: int, heads: int, kv_heads: int, intermediate: int, vocab: int) -> dict[str, Any]:
    """Returns the config of a dense Qwen2.5, after Qwen/Qwen2.5-7B-Instruct.

    It has biases on q, k and v, an untied head and no head_dim field.
    """
    return {
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "attention_dropout": 0.0,
        "hidden_act": "silu",
        "hidden_size": hidden,
        "initializer_range": 0.02,
        "intermediate_size": intermediate,
        "max_position_embeddings": 32768,
        "max_window_layers": layers,
        "num_attention_heads": heads,
        "num_hidden_layers": layers,
        "num_key_value_heads": kv_heads,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1000000.0,
        "sliding_window": None,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "use_cache": True,
        "use_sliding_window": False,
        "vocab_size": vocab,
    }


def llama3(hidden: int, layers: int, heads: int, kv_heads: int, intermediate: int, vocab: int) -> dict[str, Any]:
    """Returns the config of a dense Llama 3.1, after meta-llama/Llama-3.1-8B-Instruct.

    It has 131,072 positions by rope scaling of type llama3.
    """
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "hidden_act": "silu",
        "hidden_size": hidden,
        "initializer_range": 0.02,
        "intermediate_size": intermediate,
        "max_position_embeddings": 131072,
        "mlp_bias": False,
        "num_attention_heads": heads,
        "num_hidden_layers": layers,
        "num_key_value_heads": kv_heads,
        "pretraining_tp": 1,
        "rms_norm_eps": 1e-5,
        "rope_scaling": {
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
            "rope_type": "llama3",
        },
        "rope_theta": 500000.0,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "use_cache": True,
        "vocab_size": vocab,
    }


def mistral(hidden: int, layers: int, heads: int, kv_heads: int, intermediate: int, window: int) -> dict[str, Any]:
    """Returns the config of a Mistral, after mistralai/Mistral-7B-v0.1: every layer attends to a window."""
    return {
        "architectures": ["MistralForCausalLM"],
        "model_type": "mistral",
        "attention_dropout": 0.0,
        "hidden_act": "silu",
        "hidden_size": hidden,
        "initializer_range": 0.02,
        "intermediate_size": intermediate,
        "max_position_embeddings": 32768,
        "num_attention_heads": heads,
        "num_hidden_layers": layers,
        "num_key_value_heads": kv_heads,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "sliding_window": window,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "use_cache": True,
        "vocab_size": 32000,
    }


def gpt_oss(
    hidden: int, layers: int, heads: int, kv_heads: int, *, experts: int, per_token: int, expert_width: int
) -> dict[str, Any]:
    """Returns the config of a gpt-oss, after openai/gpt-oss-20b, with its experts in bfloat16 instead of MXFP4.

    Heads have sinks and are 64 wide; every second layer attends to a window of 128; 131,072 positions by YaRN.
    """
    return {
        "architectures": ["GptOssForCausalLM"],
        "model_type": "gpt_oss",
        "attention_bias": True,
        "attention_dropout": 0.0,
        "head_dim": 64,
        "hidden_act": "silu",
        "hidden_size": hidden,
        "initializer_range": 0.02,
        "intermediate_size": expert_width,
        "layer_types": [("sliding_attention", "full_attention")[layer % 2] for layer in range(layers)],
        "max_position_embeddings": 131072,
        "num_attention_heads": heads,
        "num_experts_per_tok": per_token,
        "num_hidden_layers": layers,
        "num_key_value_heads": kv_heads,
        "num_local_experts": experts,
        "output_router_logits": False,
        "rms_norm_eps": 1e-5,
        "rope_scaling": {
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "factor": 32.0,
            "original_max_position_embeddings": 4096,
            "rope_type": "yarn",
            "truncate": False,
        },
        "rope_theta": 150000,
        "router_aux_loss_coef": 0.9,
        "sliding_window": 128,
        "swiglu_limit": 7.0,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "use_cache": True,
        "vocab_size": 201088,
    }


def gemma3(hidden: int, layers: int, heads: int, kv_heads: int, intermediate: int) -> dict[str, Any]:
    """Returns the config of a text-only Gemma 3, after google/gemma-3-1b-it: five layers of six have windows of 512."""
    return {
        "architectures": ["Gemma3ForCausalLM"],
        "model_type": "gemma3_text",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "attn_logit_softcapping": None,
        "cache_implementation": "hybrid",
        "final_logit_softcapping": None,
        "head_dim": 256,
        "hidden_activation": "gelu_pytorch_tanh",
        "hidden_size": hidden,
        "initializer_range": 0.02,
        "intermediate_size": intermediate,
        "max_position_embeddings": 32768,
        "num_attention_heads": heads,
        "num_hidden_layers": layers,
        "num_key_value_heads": kv_heads,
        "query_pre_attn_scalar": 256,
        "rms_norm_eps": 1e-6,
        "rope_local_base_freq": 10000,
        "rope_scaling": None,
        "rope_theta": 1000000,
        "sliding_window": 512,
        "sliding_window_pattern": 6,
        "torch_dtype": "bfloat16",
        "use_cache": True,
        "vocab_size": 262144,
    }
