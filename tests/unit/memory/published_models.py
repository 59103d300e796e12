"""``config.json`` of published models, as far as memory planning reads it, and what their publishers count."""

from __future__ import annotations

from typing import Any

from trtx.checkpoint.shapes import SHAPES

QWEN3_8B: dict[str, Any] = dict(SHAPES["qwen3-8b"].config)
LLAMA_3_1_8B: dict[str, Any] = dict(SHAPES["llama-3.1-8b"].config)


def _qwen3_moe(hidden: int, layers: int, heads: int, moe_width: int) -> dict[str, Any]:
    return {
        "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "hidden_size": hidden,
        "num_hidden_layers": layers, "num_attention_heads": heads, "num_key_value_heads": 4, "head_dim": 128,
        "intermediate_size": 6144, "moe_intermediate_size": moe_width, "num_experts": 128, "num_experts_per_tok": 8,
        "decoder_sparse_step": 1, "mlp_only_layers": [], "vocab_size": 151936, "tie_word_embeddings": False,
        "max_position_embeddings": 40960, "torch_dtype": "bfloat16", "sliding_window": None, "attention_bias": False,
    }  # fmt: skip


QWEN3_30B_A3B = _qwen3_moe(2048, 48, 32, 768)
QWEN3_235B_A22B = _qwen3_moe(4096, 94, 64, 1536)

DEEPSEEK_R1: dict[str, Any] = {
    "architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3", "hidden_size": 7168,
    "num_hidden_layers": 61, "num_attention_heads": 128, "num_key_value_heads": 128, "q_lora_rank": 1536,
    "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
    "intermediate_size": 18432, "moe_intermediate_size": 2048, "n_routed_experts": 256, "n_shared_experts": 1,
    "num_experts_per_tok": 8, "first_k_dense_replace": 3, "moe_layer_freq": 1, "topk_method": "noaux_tc",
    "num_nextn_predict_layers": 1, "vocab_size": 129280, "tie_word_embeddings": False,
    "max_position_embeddings": 163840, "torch_dtype": "bfloat16",
    "quantization_config": {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]},
}  # fmt: skip


def _gpt_oss(layers: int, experts: int) -> dict[str, Any]:
    return {
        "architectures": ["GptOssForCausalLM"], "model_type": "gpt_oss", "hidden_size": 2880,
        "num_hidden_layers": layers, "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 64,
        "intermediate_size": 2880, "num_local_experts": experts, "num_experts_per_tok": 4, "attention_bias": True,
        "sliding_window": 128, "layer_types": ["sliding_attention", "full_attention"] * (layers // 2),
        "vocab_size": 201088, "tie_word_embeddings": False, "max_position_embeddings": 131072,
        "quantization_config": {
            "quant_method": "mxfp4",
            "modules_to_not_convert": [
                "model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head",
            ],
        },
    }  # fmt: skip


GPT_OSS_120B = _gpt_oss(36, 128)
GPT_OSS_20B = _gpt_oss(24, 32)

GEMMA_3_27B: dict[str, Any] = {
    "architectures": ["Gemma3ForConditionalGeneration"], "model_type": "gemma3", "torch_dtype": "bfloat16",
    "text_config": {
        "model_type": "gemma3_text", "hidden_size": 5376, "num_hidden_layers": 62, "num_attention_heads": 32,
        "num_key_value_heads": 16, "head_dim": 128, "intermediate_size": 21504, "vocab_size": 262208,
        "sliding_window": 1024, "sliding_window_pattern": 6, "max_position_embeddings": 131072,
    },
    "vision_config": {
        "model_type": "siglip_vision_model", "hidden_size": 1152, "num_hidden_layers": 27,
        "intermediate_size": 4304, "patch_size": 14,
    },
}  # fmt: skip


def _llama4(experts: int, step: int) -> dict[str, Any]:
    return {
        "architectures": ["Llama4ForConditionalGeneration"], "model_type": "llama4", "torch_dtype": "bfloat16",
        "text_config": {
            "model_type": "llama4_text", "hidden_size": 5120, "num_hidden_layers": 48, "num_attention_heads": 40,
            "num_key_value_heads": 8, "head_dim": 128, "intermediate_size": 8192, "intermediate_size_mlp": 16384,
            "num_local_experts": experts, "num_experts_per_tok": 1, "interleave_moe_layer_step": step,
            "vocab_size": 202048, "tie_word_embeddings": False, "max_position_embeddings": 1048576,
        },
    }  # fmt: skip


LLAMA_4_MAVERICK = _llama4(128, 2)
LLAMA_4_SCOUT = _llama4(16, 1)

QWEN2_5_VL_7B: dict[str, Any] = {
    "architectures": ["Qwen2_5_VLForConditionalGeneration"], "model_type": "qwen2_5_vl", "hidden_size": 3584,
    "num_hidden_layers": 28, "num_attention_heads": 28, "num_key_value_heads": 4, "intermediate_size": 18944,
    "vocab_size": 152064, "tie_word_embeddings": False, "max_position_embeddings": 128000,
    "use_sliding_window": False, "sliding_window": 32768, "torch_dtype": "bfloat16",
    "vision_config": {
        "model_type": "qwen2_5_vl", "depth": 32, "hidden_size": 1280, "intermediate_size": 3420, "patch_size": 14,
        "temporal_patch_size": 2, "spatial_merge_size": 2, "out_hidden_size": 3584,
    },
}  # fmt: skip

# Parameters of the decoder with embedding and head, as the model pages give them; gpt-oss after its model card's
# 116.83 B and 20.91 B. DeepSeek's 671 B are without its MTP layer.
COUNTS = {
    "Llama-3.1-8B": (LLAMA_3_1_8B, 8_030_261_248),
    "Qwen3-8B": (QWEN3_8B, 8_190_735_360),
    "Qwen3-30B-A3B": (QWEN3_30B_A3B, 30_532_122_624),
    "Qwen3-235B-A22B": (QWEN3_235B_A22B, 235_093_634_560),
    "DeepSeek-R1": (DEEPSEEK_R1, 671_026_419_200),
    "gpt-oss-120b": (GPT_OSS_120B, 116_829_156_672),
    "gpt-oss-20b": (GPT_OSS_20B, 20_914_757_184),
}

MODELOPT_FP8 = {
    "quantization_config": {"quant_method": "modelopt", "quant_algo": "FP8", "ignore": ["lm_head", "*router*"]}
}
_NVFP4 = {
    "quantization_config": {
        "quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["lm_head", "model.layers.*.self_attn*"],
    }
}  # fmt: skip

# What the shipped engine configs say they are for.
MODELS: dict[str, dict[str, Any]] = {
    "deepseek-ai/DeepSeek-R1": DEEPSEEK_R1,
    "nvidia/DeepSeek-R1-FP4": DEEPSEEK_R1 | _NVFP4,
    "openai/gpt-oss-120b": GPT_OSS_120B,
    "google/gemma-3-27b-it": GEMMA_3_27B,
    "meta-llama/Llama-3.1-8B-Instruct": LLAMA_3_1_8B,
    "meta-llama/Llama-3.1-405B-Instruct": LLAMA_3_1_8B
    | {"hidden_size": 16384, "num_hidden_layers": 126, "num_attention_heads": 128, "intermediate_size": 53248},
    "nvidia/Llama-3.3-70B-Instruct-FP8": LLAMA_3_1_8B
    | {"hidden_size": 8192, "num_hidden_layers": 80, "num_attention_heads": 64, "intermediate_size": 28672}
    | MODELOPT_FP8,
    "nvidia/Llama-4-Maverick-17B-128E-Instruct-FP8": LLAMA_4_MAVERICK | MODELOPT_FP8,
    "Qwen/Qwen2.5-7B-Instruct": dict(SHAPES["qwen2.5-7b"].config),
    "Qwen/Qwen2.5-VL-7B-Instruct": QWEN2_5_VL_7B,
    "Qwen/Qwen3-8B": QWEN3_8B,
    "Qwen/Qwen3-30B-A3B": QWEN3_30B_A3B,
    "Qwen/Qwen3-235B-A22B-FP8": QWEN3_235B_A22B
    | {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}},
}
