"""Fields of ``config.json`` that leave the tokens of a dense decoder as they are, and those that must have one value.

A config of a dense family may hold these, the fields that :mod:`trtx.checkpoint.model_config` reads, and nothing else
but what is null, false, 0 or empty: a field that nobody here knows may ask for a computation that the torch engine does
not do.
"""

from __future__ import annotations

from typing import Any

# transformers' own; token ids and lengths, which are the tokenizer's; defaults of generate(), which old releases kept
# here and a request has of its own; training and initialization (pretraining_tp: slices of products, the same sums);
# a choice of kernel, and the epsilon of another norm: these families have RMS norms alone, which read rms_norm_eps.
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

attention_dropout hidden_dropout embd_pdrop resid_pdrop attn_pdrop classifier_dropout classifier_dropout_prob
initializer_range initializer_factor gradient_checkpointing neftune_noise_alpha pretraining_tp chunk_size_feed_forward

use_flash_attn layer_norm_eps
"""

WITHOUT_EFFECT = frozenset(_NAMES.split())
"""Whatever their value."""

PREFIXES_WITHOUT_EFFECT = ("_", "unsloth_", "trtx_")
"""Private notes of the program that wrote them."""

ONLY: dict[str, tuple[Any, ...]] = {
    "hidden_act": ("silu", "swish"),  # two names of one function
    "mlp_bias": (False,),
    "is_causal": (True,),  # transformers' masks follow it
    "is_decoder": (True, False),  # Llama and Qwen are decoders either way
    "is_encoder_decoder": (False,),
    "add_cross_attention": (False,),
    "rope_interleaved": (False,),
    "rope_ratio": (1, 1.0),
    "tie_last_hidden_states": (True, False),  # which states are returned, not how they come about
}
"""The values that the torch engine computes; null counts as the first."""
