"""Rules for optional features: speculation, LoRA, encoders."""

from __future__ import annotations

from collections.abc import Iterator

from trtx.config.rules.rule import LLM_ROLES, Breach, RoleRule, Subject

_SPEC, _LORA = "speculative_config", "lora_config"
_NEEDS_MODEL = ("Eagle", "Eagle3", "Draft_Target")
_NEEDS_LENGTH = (*_NEEDS_MODEL, "NGram")
_BESIDE_DRAFT = 2  # tokens of the shortest sequence: one of the prompt and one of the answer
_NO_ENCODER = ("Llama4ForConditionalGeneration",)
_NOT_FOR_ENCODER = ("kv_cache_config", "cache_transceiver_config", _SPEC)
# Arguments of the LLM API that take Python objects.
_OBJECTS = ("batched_logits_processor", "mpi_session", "checkpoint_loader")


def _speculation_is_whole(side: Subject) -> Iterator[Breach]:
    kind = side.get(f"{_SPEC}.decoding_type")
    if kind in _NEEDS_LENGTH and not side.get(f"{_SPEC}.max_draft_len"):
        path = f"{_SPEC}.max_draft_len"
        yield Breach(path, f"{kind} without {path} ({side.role}, {side.source})", side.set(path, 3))
    names = [f"{_SPEC}.{name}" for name in ("speculative_model", "speculative_model_dir")]
    if kind in _NEEDS_MODEL and not any(side.get(name) for name in names):
        yield Breach(names[0], f"{kind} without {names[0]} ({side.role}, {side.source})", None)


def _draft_schedule(side: Subject) -> Iterator[Breach]:
    path, length = f"{_SPEC}.draft_len_schedule", side.get(f"{_SPEC}.max_draft_len")
    schedule = side.get(path)
    if not schedule:
        return
    if side.get(f"{_SPEC}.max_concurrency") is not None:
        off = side.set(f"{_SPEC}.max_concurrency", None)
        yield Breach(path, f"{side.says(path)} with {side.says(f'{_SPEC}.max_concurrency')}", off)
    if schedule[min(schedule)] != length:
        message = f"{side.says(path)} begins with {schedule[min(schedule)]} tokens, max_draft_len is {length}"
        yield Breach(path, message, side.set(path, {**schedule, min(schedule): length}))


def _draft_within_context(side: Subject) -> Iterator[Breach]:
    path, longest = f"{_SPEC}.max_draft_len", side.model.context_length if side.model else None
    if longest is not None and side.draft_length > (most := longest - _BESIDE_DRAFT):
        message = f"{side.says(path)} is beyond the model's context of {longest} tokens"
        yield Breach(path, message, side.set(path, most))


def _lora_targets(side: Subject) -> Iterator[Breach]:
    path = f"{_LORA}.lora_target_modules"
    wanted = side.get("enable_lora") or side.get(_LORA) is not None
    if wanted and not side.get(path) and not side.get(f"{_LORA}.lora_dir"):
        targets = ["attn_q", "attn_k", "attn_v", "attn_dense", "mlp_h_to_4h", "mlp_gate", "mlp_4h_to_h"]
        message = f"LoRA with neither {path} nor {_LORA}.lora_dir ({side.role}, {side.source})"
        yield Breach(path, message, side.set(path, targets))


def _early_first_token(side: Subject) -> Iterator[Breach]:
    path = "enable_early_first_token_response"
    if side.get(path) and (side.get("disable_overlap_scheduler") or side.get("cache_transceiver_config") is not None):
        yield Breach(path, f"{side.says(path)} is switched off by the engine", side.set(path, False))


def _encoder_batch(encode: Subject) -> Iterator[Breach]:
    if not encode.has("max_batch_size") or encode.batch_size is None:
        message = f"no max_batch_size (encode, {encode.source})"
        yield Breach("max_batch_size", message, encode.set("max_batch_size", 4))


def _encoder_sections(encode: Subject) -> Iterator[Breach]:
    for path in _NOT_FOR_ENCODER:
        if encode.get(path) is not None:
            yield Breach(path, f"{encode.says(path)} on an encode worker", encode.set(path, None))


def _encoder_exists(encode: Subject) -> Iterator[Breach]:
    if encode.model is not None and encode.model.architecture in _NO_ENCODER:
        yield Breach("", f"{encode.model.architecture} has no encoder of its own", None)


def _one_encoder_mode(side: Subject) -> Iterator[Breach]:
    if side.get("encode_only") and side.get("mm_encoder_only"):
        message = f"{side.says('encode_only')} with {side.says('mm_encoder_only')}"
        yield Breach("encode_only", message, side.set("encode_only", False))


def _one_encoder_overlap(side: Subject) -> Iterator[Breach]:
    ahead, graph = (f"multimodal_config.{name}" for name in ("encoder_side_stream_max_ahead", "encoder_cuda_graph"))
    if side.get(ahead) and side.get(graph) is not None:
        yield Breach(ahead, f"{side.says(ahead)} with {side.says(graph)}", side.set(ahead, 0))


def _no_python_objects(side: Subject) -> Iterator[Breach]:
    for path in _OBJECTS:
        if side.get(path) is not None:
            yield Breach(path, side.says(path), side.set(path, None))


def _no_consolidator(side: Subject) -> Iterator[Breach]:
    section = "kv_connector_config"
    if side.get(f"{section}.connector") == "kvbm" or str(side.get(f"{section}.connector_module")).startswith("kvbm."):
        message = f"{section} with Dynamo's KVBM ({side.role}, {side.source})"
        yield Breach(section, message, side.set(section, None))


FEATURE_RULES = (
    RoleRule(
        id="speculation-is-whole",
        roles=LLM_ROLES,
        severity="error",
        reason="this kind of speculation needs a draft length, and Eagle3 and Draft_Target a draft model",
        evidence="the speculative configs in TensorRT-LLM's llm_args.py",
        check=_speculation_is_whole,
        unmendable=(f"{_SPEC}.speculative_model",),
    ),
    RoleRule(
        id="draft-schedule",
        roles=LLM_ROLES,
        severity="error",
        reason="a schedule starts at max_draft_len and excludes max_concurrency",
        evidence="DecodingBaseConfig in TensorRT-LLM's llm_args.py",
        check=_draft_schedule,
    ),
    RoleRule(
        id="draft-within-context",
        roles=LLM_ROLES,
        severity="error",
        reason="a sequence has a token of the prompt and one of the answer besides the drafted tokens",
        evidence="trtx",
        check=_draft_within_context,
        every_engine=True,
    ),
    RoleRule(
        id="lora-targets",
        roles=LLM_ROLES,
        severity="error",
        reason="without targets every module that can take an adapter gets memory for one",
        evidence="LoraConfig in TensorRT-LLM's llm_args.py; Dynamo's LoRA configs name 7 modules",
        check=_lora_targets,
    ),
    RoleRule(
        id="early-first-token",
        roles=LLM_ROLES,
        severity="note",
        reason="an early first token needs the overlap scheduler and no transceiver",
        evidence="TorchLlmArgs in TensorRT-LLM's llm_args.py",
        check=_early_first_token,
    ),
    RoleRule(
        id="encoder-batch",
        roles=("encode",),
        severity="error",
        reason="MultimodalEncoder crashes at start without a concrete max_batch_size",
        evidence="aiconfigurator and Dynamo give one, 4 is enough",
        check=_encoder_batch,
    ),
    RoleRule(
        id="encoder-sections",
        roles=("encode",),
        severity="error",
        reason="an encoder holds no KV cache and sends none: the section would never be read",
        evidence="Dynamo's encode configs; aiconfigurator",
        check=_encoder_sections,
    ),
    RoleRule(
        id="encoder-exists",
        roles=("encode",),
        severity="error",
        reason="its images are encoded inside the prefill worker",
        evidence="Dynamo's Llama 4 configs; TensorRT-LLM's support_mm_disagg",
        check=_encoder_exists,
        unmendable=("",),
    ),
    RoleRule(
        id="one-encoder-mode",
        roles=("agg", "prefill", "decode", "encode"),
        severity="error",
        reason="encode_only and mm_encoder_only exclude each other",
        evidence="TorchLlmArgs in TensorRT-LLM's llm_args.py",
        check=_one_encoder_mode,
    ),
    RoleRule(
        id="one-encoder-overlap",
        roles=LLM_ROLES,
        severity="error",
        reason="the encoder's side stream and its CUDA graphs exclude each other",
        evidence="MultimodalConfig in TensorRT-LLM's llm_args.py",
        check=_one_encoder_overlap,
    ),
    RoleRule(
        id="kv-consolidator",
        roles=LLM_ROLES,
        severity="warning",
        reason="trtx starts no KV consolidator, so a router that follows KV events knows the engine's own blocks only, "
        "not those that KVBM keeps in host memory or on disk",
        evidence="dynamo.trtllm of Dynamo 1.6.1 starts one with the package kvbm",
        check=_no_consolidator,
    ),
    RoleRule(
        id="no-python-objects",
        roles=LLM_ROLES,
        severity="error",
        reason="the field takes a Python object, which YAML can't hold",
        evidence="TorchLlmArgs in TensorRT-LLM's llm_args.py",
        check=_no_python_objects,
    ),
)
