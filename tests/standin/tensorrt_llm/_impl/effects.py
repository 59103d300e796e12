"""What becomes of each argument of ``LLM`` here: acted on, without effect, or refused as the real package's alone.

Every field is in one of the lists below (``test_sections.py`` holds it), so that none which changes answers, or brings
an object that somebody expects to be called, can pass unseen.
"""

from __future__ import annotations

from typing import Any

from tensorrt_llm._standin import absent


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


HANDED_ON = (
    "skip_tokenizer_init",
    "trust_remote_code",
    "dtype",
    "max_batch_size",
    "max_num_tokens",
    "max_seq_len",
    "enable_chunked_prefill",
    "enable_iter_perf_stats",
    "max_stats_len",
    "return_perf_metrics",
    "guided_decoding_backend",
)
HANDED_ON_NESTED = {
    "kv_cache_config": (
        "tokens_per_block",
        "free_gpu_memory_fraction",
        "max_tokens",
        "enable_block_reuse",
        "dtype",
        "event_buffer_max_size",
    ),
    "cuda_graph_config": ("batch_sizes",),
    "scheduler_config": ("waiting_queue_policy",),
    "cache_transceiver_config": ("backend", "kv_transfer_timeout_ms"),
}
ACTED_ON = frozenset(
    (
        *HANDED_ON,
        *HANDED_ON_NESTED,
        *("model", "tokenizer", "backend", "env_overrides"),
        # ranks
        *(
            "tensor_parallel_size",
            "pipeline_parallel_size",
            "context_parallel_size",
            "enable_attention_dp",
            "world_size",
        ),
        # one value of them is served, the others are refused below
        *("load_format", "checkpoint_format", "quant_config", "max_beam_width"),
    )
)
"""Arguments that this package or the torch engine behind it does something about."""
ONLY_THE_REAL_ONE = _names(
    """
    batched_logits_processor build_config checkpoint_loader cp_config custom_tokenizer decoding_config
    draft_checkpoint_loader enable_lora enable_sleep encode_only force_dynamic_quantization kv_cache_compression_config
    kv_connector_config lora_config mm_encoder_only model_kwargs mpi_session orchestrator_type post_processor_hook
    skip_loading_weights sleep_config sparse_attention_config speculative_config speculative_model_kwargs
    tokenizer_kwargs
    """
)
"""They change answers, or bring an object that somebody expects to be called."""
WITHOUT_EFFECT = _names(
    """
    allreduce_strategy attention_dp_config attn_backend batch_wait_max_tokens_ratio batch_wait_timeout_iters
    batch_wait_timeout_ms compile_backend device disable_flashinfer_sampling disable_overlap_scheduler dwdp_config
    enable_autotuner enable_early_first_token_response enable_energy_metrics enable_iter_req_stats
    enable_layerwise_nvtx_marker enable_lm_head_tp_in_adp enable_low_latency_host_dispatch enable_min_latency
    enable_resource_governor enable_speculative_beam_history_d2h encoder_max_batch_size encoder_max_num_tokens
    fail_fast_on_attention_window_too_large garbage_collection_gen0_threshold gather_generation_logits gms_config
    gpus_per_node iter_stats_max_iterations layer_wise_benchmarks_config max_input_len mode
    model_factory moe_cluster_parallel_size moe_config moe_expert_parallel_size moe_tensor_parallel_size
    multimodal_config mx_config num_postprocess_workers nvfp4_gemm_config otlp_traces_endpoint peft_cache_config
    perf_metrics_max_requests postprocess_tokenizer_dir pp_partition print_iter_log prometheus_metrics_config
    ray_placement_config ray_worker_extension_cls ray_worker_nsight_options reasoning_parser reorder_policy_config
    request_stats_max_iterations revision runtime sampler_force_async_worker sampler_type stream_interval
    telemetry_config tokenizer_mode tokenizer_revision torch_compile_config transforms use_cute_dsl_bf16_bmm
    use_cute_dsl_bf16_gemm use_cute_dsl_blockscaling_bmm use_cute_dsl_blockscaling_mm yaml_extra
    """
)
"""Speed, hardware, logs, and what only another argument would bring to life."""
KV_ONLY_THE_REAL_ONE = frozenset({"kv_cache_event_hash_algo", "sink_token_length"})
KV_WITHOUT_EFFECT = _names(
    """
    attention_dp_events_gather_period_ms avg_seq_len block_reuse_policy copy_on_partial_reuse cross_kv_cache_fraction
    disk_cache_path disk_cache_size disk_prefetch_num_reqs enable_kv_pool_rebalance enable_partial_reuse
    enable_swa_scratch_reuse host_cache_size iteration_stats_interval mamba_ssm_cache_dtype mamba_ssm_philox_rounds
    mamba_ssm_stochastic_rounding mamba_state_cache_interval max_attention_window max_gpu_total_bytes
    max_util_for_resume onboard_blocks pool_ratio secondary_offload_min_priority use_kv_cache_manager_v2 use_uvm
    """
)
"""``max_attention_window`` shapes KV events alone: attention stays full (docs/trtllm-coverage.md)."""


def refuse_what_only_the_real_one_does(args: Any) -> None:
    for holder, names, prefix in (
        (args, ONLY_THE_REAL_ONE, ""),
        (args.kv_cache_config, KV_ONLY_THE_REAL_ONE, "kv_cache_config."),
    ):
        for name in sorted(names & set(type(holder).model_fields)):
            default = type(holder).model_fields[name].get_default(call_default_factory=True)
            value = getattr(holder, name)
            if value and value != default:
                raise absent(f"{prefix}{name}")
    if (args.max_beam_width or 1) > 1:
        raise absent("max_beam_width above 1")
    if args.load_format.name != "AUTO":
        raise absent(f"load_format {args.load_format.name}")
    if getattr(args, "checkpoint_format", None) not in (None, "HF"):
        raise absent(f"checkpoint_format {args.checkpoint_format}")
    quantization = getattr(args, "quant_config", None)
    if quantization is not None and (quantization.quant_algo or quantization.kv_cache_quant_algo):
        raise absent("quant_config: a quantized checkpoint says itself how it is quantized")


def for_torch_engine(args: Any) -> dict[str, Any]:
    """Of the given arguments those that the torch engine acts on. The others change speed or hardware, not tokens."""
    given = {name: getattr(args, name) for name in HANDED_ON if name in args.model_fields_set}
    for name, known in HANDED_ON_NESTED.items():
        value = getattr(args, name)
        if value is None:
            if name == "cuda_graph_config":
                given[name] = None
            continue
        nested = {key: getattr(value, key) for key in known if key in value.model_fields_set}
        if nested:
            given[name] = {key: v for key, v in nested.items() if v is not None}
    given.setdefault("guided_decoding_backend", None)  # None is off, and the real one's default
    is_off = ("cuda_graph_config", "guided_decoding_backend")
    return {name: value for name, value in given.items() if value is not None or name in is_off}
