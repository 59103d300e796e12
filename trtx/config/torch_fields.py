"""Defines how the torch engine treats each of TensorRT-LLM's arguments: :data:`FIELDS` has one record for each.

The table is here and not in ``torch_engine`` because planning refuses the same fields as the engine, and planning
imports no engine. When the engine starts to act on a field, move the field's name to :data:`_HONOURED`. A test asserts
that each field of ``llm_args.json`` has one record.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

SHOWN_CHARACTERS = 80


@dataclass(frozen=True, slots=True)
class Honoured:
    """The engine acts on the field.

    ``needs_gpu``: only when it runs on a GPU. ``by_encoder``: its vision encoder acts on the field too.
    """

    needs_gpu: bool = False
    by_encoder: bool = False


@dataclass(frozen=True, slots=True)
class Unused:
    """The engine accepts the field and ignores it. Such a field affects speed, memory or logging, never an answer.

    ``because``: the reason, which names what the engine lacks.
    """

    because: str


def _of(section: str, text: str) -> tuple[str, ...]:
    return tuple(f"{section}.{name}" if section else name for name in text.split())


# Each field of a section has its own record. If a section itself has a record, that record applies to all its fields.
_HONOURED: Mapping[str, Honoured] = {
    **dict.fromkeys(
        _of(
            "",
            "model tokenizer skip_tokenizer_init trust_remote_code max_seq_len enable_chunked_prefill "
            "disable_overlap_scheduler enable_iter_perf_stats max_stats_len guided_decoding_backend "
            "tensor_parallel_size moe_tensor_parallel_size moe_expert_parallel_size",
        ),
        Honoured(),
    ),
    **dict.fromkeys(("dtype", "max_batch_size", "max_num_tokens"), Honoured(by_encoder=True)),
    **dict.fromkeys(
        _of(
            "kv_cache_config",
            "tokens_per_block max_tokens enable_block_reuse dtype event_buffer_max_size host_cache_size "
            "secondary_offload_min_priority",
        ),
        Honoured(),
    ),
    "kv_cache_config.free_gpu_memory_fraction": Honoured(needs_gpu=True),
    "cuda_graph_config.batch_sizes": Honoured(needs_gpu=True),
    "scheduler_config.waiting_queue_policy": Honoured(),
    "sleep_config.restore_modes": Honoured(),
    "cache_transceiver_config.backend": Honoured(),
    "cache_transceiver_config.kv_transfer_timeout_ms": Honoured(),
    **dict.fromkeys(
        _of(
            "speculative_config",
            "decoding_type max_draft_len max_concurrency draft_len_schedule max_matching_ngram_size is_keep_all "
            "is_use_oldest is_public_pool enable_global_pool global_pool_size speculative_model speculative_model_dir "
            "eagle3_one_model eagle3_layers_to_capture",
        ),
        Honoured(),
    ),
}

_SCHEDULER = Unused("the torch engine has only one batching policy")
_KERNELS = Unused("the torch engine has kernels of its own")
_PROCESSES = Unused("the torch engine starts a process for each GPU, which this does not shape")
_LOADING = Unused("the torch engine has one way to load weights and to move KV")
_OBSERVING = Unused("the torch engine does not report it")
_EXPERTS = Unused("the torch engine has one way to compute experts")
_ABSENT = Unused("the torch engine has nothing that it would apply to")
_KV = Unused("the torch engine has one pool of equal KV blocks, and host memory by host_cache_size")
_GRAPHS = Unused("the torch engine pads to the sizes of batch_sizes")
_TRANSFER = Unused("the torch engine moves KV in one way")
# Speculation accepts a draft token only if the model itself would have sampled it: it gives the same tokens, sooner.
_DRAFTS = Unused("the torch engine drafts chains of tokens, by lengths that it measures")
_UNUSED: Mapping[str, Unused] = {
    **dict.fromkeys(
        _of(
            "",
            "batch_wait_timeout_ms batch_wait_timeout_iters batch_wait_max_tokens_ratio "
            "enable_early_first_token_response enable_low_latency_host_dispatch reorder_policy_config stream_interval "
            "enable_resource_governor attention_dp_config max_input_len",
        ),
        _SCHEDULER,
    ),
    **dict.fromkeys(
        _of(
            "",
            "sampler_type sampler_force_async_worker enable_speculative_beam_history_d2h disable_flashinfer_sampling "
            "enable_in_graph_sampling torch_compile_config enable_autotuner enable_min_latency nvfp4_gemm_config "
            "use_cute_dsl_blockscaling_mm use_cute_dsl_blockscaling_bmm use_cute_dsl_bf16_bmm use_cute_dsl_bf16_gemm "
            "prefill_capture_num_tokens prefill_cuda_graph_backend use_fine_grained_sync",
        ),
        _KERNELS,
    ),
    "moe_config": _EXPERTS,
    **dict.fromkeys(
        _of(
            "",
            "gpus_per_node enable_lm_head_tp_in_adp pp_partition allreduce_strategy dwdp_config "
            "garbage_collection_gen0_threshold num_postprocess_workers num_serve_frontends mpi_session "
            "orchestrator_type ray_worker_extension_cls ray_placement_config ray_worker_nsight_options",
        ),
        _PROCESSES,
    ),
    "enable_sleep": Unused("the torch engine sleeps with sleep_config, the newer name"),
    **dict.fromkeys(_of("", "mx_config gms_config checkpoint_io_policy kv_connector_config"), _LOADING),
    **dict.fromkeys(
        _of(
            "",
            "iter_stats_max_iterations request_stats_max_iterations enable_iter_req_stats print_iter_log "
            "perf_metrics_max_requests prometheus_metrics_config enable_energy_metrics otlp_traces_endpoint "
            "telemetry_config enable_layerwise_nvtx_marker layer_wise_benchmarks_config",
        ),
        _OBSERVING,
    ),
    "return_perf_metrics": Unused("each result of the torch engine has its metrics"),
    # Fields of media, adapters and reasoning parsers: the engine refuses requests that use them, or no request can.
    **dict.fromkeys(
        _of(
            "",
            "multimodal_config encoder_max_batch_size encoder_max_num_tokens encoder_cuda_graph_config "
            "disable_mm_encoder enable_encoder_decoder_mixed_cuda_graph peft_cache_config reasoning_parser "
            "gather_generation_logits fail_fast_on_attention_window_too_large",
        ),
        _ABSENT,
    ),
    # Where KV is stored and what is kept for reuse. mamba_* and MLA fields belong to models that the engine refuses.
    **dict.fromkeys(
        _of(
            "kv_cache_config",
            "onboard_blocks disk_cache_size disk_cache_path cross_kv_cache_fraction "
            "attention_dp_events_gather_period_ms enable_partial_reuse "
            "copy_on_partial_reuse use_uvm max_gpu_total_bytes iteration_stats_interval mamba_ssm_cache_dtype "
            "mamba_ssm_stochastic_rounding mamba_ssm_philox_rounds mamba_state_cache_interval mamba_state_config "
            "use_kv_cache_manager_v2 max_util_for_resume enable_swa_scratch_reuse kv_cache_event_hash_algo "
            "enable_kv_pool_rebalance disk_prefetch_num_reqs pool_ratio avg_seq_len block_reuse_policy "
            "block_reuse_config kv_events_config fp8_context_mla_kv_len_cap",
        ),
        _KV,
    ),
    **dict.fromkeys(
        _of("cuda_graph_config", "max_batch_size enable_padding mode num_tokens max_num_token seq_lens max_seq_len"),
        _GRAPHS,
    ),
    **dict.fromkeys(
        _of(
            "scheduler_config",
            "capacity_scheduler_policy context_chunking_policy dynamic_batch_config use_python_scheduler "
            "enable_prefix_aware_scheduling",
        ),
        _SCHEDULER,
    ),
    **dict.fromkeys(
        _of(
            "cache_transceiver_config",
            "transceiver_runtime max_tokens_in_buffer kv_transfer_sender_future_timeout_ms "
            "kv_transfer_poll_interval_ms kv_cache_bounce_size_mb enable_pipelined_transfer agent_bounce_buffer_enable "
            "agent_bounce_params",
        ),
        _TRANSFER,
    ),
    **dict.fromkeys(
        _of(
            "speculative_config",
            "max_total_draft_tokens load_format acceptance_window "
            "acceptance_length_threshold acceptance_rate_threshold acceptance_rate_window_size "
            "use_rejection_sampling allow_advanced_sampling attention_backend eagle_choices use_dynamic_tree "
            "dynamic_tree_max_topK num_eagle_layers max_non_leaves_per_layer eagle3_model_arch sa_config "
            "num_nextn_predict_layers use_mtp_vanilla mtp_eagle_one_model begin_thinking_phase_token "
            "end_thinking_phase_token mask_token_id target_layer_ids block_size "
            "markov_head_type markov_rank write_interval file_prefix drafter resource_manager max_window_size "
            "max_ngram_size max_verification_set_size medusa_choices num_medusa_heads",
        ),
        _DRAFTS,
    ),
}


@dataclass(frozen=True, slots=True)
class FieldRefusal:
    """The engine refuses the field unless its value is None or harmless.

    ``because``: what the torch engine lacks. ``harmless``: the values besides None that request nothing; error messages
    recommend the first. ``instead``: the advice, if it is not to leave the field out. ``unused``: the engine ignores
    the harmless values as well and does something else than they request.
    """

    because: str
    harmless: tuple[Any, ...] = ()
    instead: str = "leave it out, or use the tensorrt-llm engine"
    unused: bool = False


_SPLIT = "the torch engine splits every layer over the GPUs of a worker, experts by their number or their columns"
_USE_TP = "use --tp, or the tensorrt-llm engine"
_PIPELINE = (
    "the torch engine has no pipeline stages: on one machine they answer later than --tp at the same number of GPUs"
)
_WEIGHTS = "the torch engine takes weights and their quantization as the checkpoint has them"
_ATTENTION = "the torch engine computes exact attention, and skips no token of a layer's context"
_WINDOW = (
    "the torch engine takes the windows of layers from config.json of the checkpoint (sliding_window, layer_types)"
)
_ACCEPTANCE = "relaxed acceptance changes tokens"
_OTHER_MODEL = "the torch engine serves the directory as it is"
_TEXT = "the torch engine makes text with the checkpoint's own fast tokenizer"
_LORA = "the torch engine serves no adapters"
_HOOK = "the torch engine calls no code of others"
_BEAMS = "the torch engine samples and searches no beams"

REFUSED: Mapping[str, FieldRefusal] = {
    "pipeline_parallel_size": FieldRefusal(_PIPELINE, (1,), _USE_TP),
    **{
        f"{name}_parallel_size": FieldRefusal(_SPLIT, harmless, _USE_TP)
        for name, harmless in {
            "context": (1,),
            "moe_cluster": (1, -1),
        }.items()
    },
    "cp_config": FieldRefusal(_SPLIT, ({},), _USE_TP),
    "enable_attention_dp": FieldRefusal(
        "the torch engine splits the attention heads of every layer over the GPUs of a worker",
        (False,),
        "use more workers, or the tensorrt-llm engine",
    ),
    "max_beam_width": FieldRefusal(_BEAMS, (1,)),
    "encode_only": FieldRefusal("the torch engine has no encoder", (False,)),
    "mm_encoder_only": FieldRefusal("the torch engine has no encoder", (False,)),
    "backend": FieldRefusal("the torch engine is not a backend of TensorRT-LLM", ("pytorch",)),
    "attn_backend": FieldRefusal(_ATTENTION, ("TRTLLM", "VANILLA", "FLASHINFER"), unused=True),
    "sparse_attention_config": FieldRefusal(_ATTENTION),
    "kv_cache_compression_config": FieldRefusal("the torch engine keeps KV whole; kv_cache_config.dtype fp8 halves it"),
    "enable_mla_skip_correction": FieldRefusal(_ATTENTION, (False,)),
    "mla_skip_correction_threshold": FieldRefusal(_ATTENTION),
    "kv_cache_config.max_attention_window": FieldRefusal(_WINDOW),
    "kv_cache_config.sink_token_length": FieldRefusal(_ATTENTION, (0,)),
    "speculative_config.use_relaxed_acceptance_for_thinking": FieldRefusal(_ACCEPTANCE, (False,)),
    "speculative_config.relaxed_topk": FieldRefusal(_ACCEPTANCE, (1,)),
    "speculative_config.relaxed_delta": FieldRefusal(_ACCEPTANCE, (0.0,)),
    "speculative_config.posterior_threshold": FieldRefusal(_ACCEPTANCE),
    "speculative_config.greedy_sampling": FieldRefusal(_ACCEPTANCE, (True,)),
    "speculative_config.advanced_sampling_mode": FieldRefusal(_ACCEPTANCE, ("full",)),
    "speculative_config.enable_penalty": FieldRefusal("the torch engine always applies penalties", (True,)),
    "speculative_config.output_directory": FieldRefusal("the torch engine writes no hidden states"),
    "quant_config.quant_algo": FieldRefusal(_WEIGHTS),
    "quant_config.kv_cache_quant_algo": FieldRefusal("the torch engine reads kv_cache_config.dtype for it"),
    "quant_config.group_size": FieldRefusal(_WEIGHTS, (128,)),
    "quant_config.smoothquant_val": FieldRefusal(_WEIGHTS, (0.5,)),
    "quant_config.clamp_val": FieldRefusal(_WEIGHTS),
    "quant_config.use_meta_recipe": FieldRefusal(_WEIGHTS, (False,)),
    "quant_config.has_zero_point": FieldRefusal(_WEIGHTS, (False,)),
    "quant_config.pre_quant_scale": FieldRefusal(_WEIGHTS, (False,)),
    "quant_config.exclude_modules": FieldRefusal(_WEIGHTS),
    "quant_config.mamba_ssm_cache_dtype": FieldRefusal(_WEIGHTS),
    "force_dynamic_quantization": FieldRefusal(_WEIGHTS, (False,)),
    "load_format": FieldRefusal(_WEIGHTS, ("AUTO", "auto", 0)),
    "checkpoint_format": FieldRefusal(_WEIGHTS, ("HF",)),
    "checkpoint_loader": FieldRefusal(_WEIGHTS),
    "model_kwargs": FieldRefusal(_OTHER_MODEL, ({},)),
    "revision": FieldRefusal(_OTHER_MODEL),
    "tokenizer_revision": FieldRefusal(_OTHER_MODEL),
    "generation_config": FieldRefusal("the torch engine samples as each request says", ("trtllm",)),
    "tokenizer_mode": FieldRefusal(_TEXT, ("auto",)),
    "custom_tokenizer": FieldRefusal(_TEXT),
    "postprocess_tokenizer_dir": FieldRefusal(_TEXT),
    "post_processor_hook": FieldRefusal(_HOOK),
    "batched_logits_processor": FieldRefusal(
        "it is a Python object, which only the Python API takes", (), "leave it out, and pass it to LLM"
    ),
    "enable_lora": FieldRefusal(_LORA, (False,)),
    "lora_config": FieldRefusal(_LORA),
    "decoding_config": FieldRefusal("the torch engine reads speculative_config for it"),
    "env_overrides": FieldRefusal(
        "the torch engine's process gets the environment of its worker", ({},), "set it in the environment"
    ),
}

FIELDS: Mapping[str, Honoured | Unused | FieldRefusal] = {**_HONOURED, **_UNUSED, **REFUSED}
"""The record of each field, by path."""
SECTIONS = frozenset(path.partition(".")[0] for path in FIELDS if "." in path)
ENCODER_FIELDS = tuple(path for path, one in FIELDS.items() if isinstance(one, Honoured) and one.by_encoder)


def record_of(path: str) -> Honoured | Unused | FieldRefusal | None:
    """Returns the record of a field, or of the innermost section around it that has one; None if there is none."""
    while path not in FIELDS and "." in path:
        path = path.rpartition(".")[0]
    return FIELDS.get(path)


@dataclass(frozen=True, slots=True)
class RefusedField:
    """A field with a value that the torch engine can neither honour nor safely ignore."""

    path: str
    value: Any
    refusal: FieldRefusal

    @property
    def message(self) -> str:
        """The start of the error, such as ``kv_cache_config.max_attention_window is [512]; expected none``."""
        text = repr(self.value)
        shown = text if len(text) <= SHOWN_CHARACTERS else text[:SHOWN_CHARACTERS] + "…"
        harmless = self.refusal.harmless
        return f"{self.path} is {shown}; expected {repr(harmless[0]) if harmless else 'none'}"

    def __str__(self) -> str:
        return f"{self.message}, {self.refusal.because}; {self.refusal.instead}"


def refused_fields(values: Mapping[str, Any]) -> Iterator[RefusedField]:
    """Yields the fields of ``values`` that the torch engine refuses, in order. The schema reports unknown fields."""
    for path, value in _fields(values):
        refusal = REFUSED.get(path)
        if refusal is not None and value is not None and value not in refusal.harmless:
            yield RefusedField(path, value, refusal)


def _fields(values: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for name, value in values.items():
        if name not in SECTIONS:
            yield name, value
        elif isinstance(value, Mapping):
            yield from ((f"{name}.{inner}", held) for inner, held in value.items())
