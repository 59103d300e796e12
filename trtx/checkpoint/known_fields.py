"""The fields of ``config.json`` that don't affect a decoder's tokens, and the fields with a required value.

The config of a family in ``families.py`` may contain these fields and those that :mod:`trtx.checkpoint.model_config`
reads. Any other field must be null, false, 0 or empty, because an unknown field may request a computation that the
torch engine does not support.
"""

from __future__ import annotations

from typing import Any

# transformers' own fields; token ids and lengths, which belong to the tokenizer; defaults of generate(), which old
# releases stored here and which requests set themselves; training and initialization (pretraining_tp slices matmuls and
# gives the same sums); the choice of a kernel; and the epsilon of layer norms: these families have only RMS norms,
# which use rms_norm_eps. The losses that balance a router's experts belong to training too.
_NAMES = """
architectures model_type transformers_version auto_map dtype torch_dtype use_cache return_dict return_dict_in_generate
output_attentions output_hidden_states output_scores output_logits torchscript use_bfloat16 tf_legacy_loss
tie_encoder_decoder name_or_path tokenizer_class task_specific_params problem_type id2label label2id num_labels
finetuning_task pruned_heads prefix model_name attn_implementation experts_implementation is_llama_config
transformers.js_config

bos_token_id eos_token_id pad_token_id sep_token_id unk_token_id cls_token_id mask_token_id decoder_start_token_id
forced_bos_token_id forced_eos_token_id suppress_tokens begin_suppress_tokens bad_words_ids model_max_length
max_sequence_length max_seq_len seq_length tokenizer_model_max_length tokenizer_padding_side

temperature top_k top_p typical_p epsilon_cutoff eta_cutoff min_p do_sample num_beams num_beam_groups diversity_penalty
early_stopping length_penalty repetition_penalty encoder_no_repeat_ngram_size no_repeat_ngram_size max_length min_length
max_new_tokens num_return_sequences remove_invalid_values exponential_decay_length_penalty renormalize_logits
cache_implementation

attention_dropout hidden_dropout embd_pdrop resid_pdrop attn_pdrop classifier_dropout classifier_dropout_prob
initializer_range initializer_factor gradient_checkpointing neftune_noise_alpha pretraining_tp chunk_size_feed_forward

output_router_logits router_aux_loss_coef

use_flash_attn layer_norm_eps
"""

WITHOUT_EFFECT = frozenset(_NAMES.split())
"""Fields that have no effect with any value."""

PREFIXES_WITHOUT_EFFECT = ("_", "unsloth_", "trtx_")
"""Prefixes of private fields of the program that wrote the config."""

ONLY: dict[str, tuple[Any, ...]] = {
    "hidden_act": ("silu", "swish"),  # two names of one function
    "mlp_bias": (False,),
    "is_causal": (True,),  # transformers' attention masks depend on it
    "is_decoder": (True, False),  # Llama and Qwen are decoders either way
    "is_encoder_decoder": (False,),
    "add_cross_attention": (False,),
    "rope_interleaved": (False,),
    "rope_ratio": (1, 1.0),
    "tie_last_hidden_states": (True, False),  # affects which states are returned, not their values
}
"""The values that the torch engine supports; null means the first."""

GELU = ("gelu_pytorch_tanh",)
"""The values of ``hidden_act`` in a family whose MLPs have a GELU gate."""
