"""Rules for the KV cache of one engine: the form of a block, and the requirements and effects of block reuse."""

from __future__ import annotations

from collections.abc import Iterator

from trtx.config.families import is_multimodal
from trtx.config.rules.rule import LLM_ROLES, RECIPES, Breach, RoleRule, Subject

_KV = "kv_cache_config"
_REUSE = f"{_KV}.enable_block_reuse"


def _dtype_auto(side: Subject) -> Iterator[Breach]:
    path = f"{_KV}.dtype"
    if side.get(path) in ("float16", "bfloat16"):
        yield Breach(path, side.says(path), side.set(path, "auto"))


def _blocks_power_of_two(side: Subject) -> Iterator[Breach]:
    path = f"{_KV}.tokens_per_block"
    tokens = side.get(path)
    if isinstance(tokens, int) and tokens > 0 and tokens & (tokens - 1):
        yield Breach(path, f"{side.says(path)} is not a power of two", side.set(path, 1 << (tokens.bit_length() - 1)))


def _windows_without_reuse(side: Subject) -> Iterator[Breach]:
    windows = side.get(f"{_KV}.max_attention_window")
    if windows and len(set(windows)) > 1 and side.get(_REUSE):
        message = f"{side.says(_REUSE)} with windows of {', '.join(map(str, sorted(set(windows))))} tokens"
        yield Breach(_REUSE, message, side.set(_REUSE, False))


def _images_without_reuse(side: Subject) -> Iterator[Breach]:
    if side.model is not None and is_multimodal(side.model.architecture) and side.get(_REUSE):
        yield Breach(_REUSE, f"{side.says(_REUSE)} for {side.model.architecture}", side.set(_REUSE, False))


def _offload_needs_reuse(side: Subject) -> Iterator[Breach]:
    path = f"{_KV}.host_cache_size"
    if side.get(path) and not side.get(_REUSE):
        yield Breach(path, f"{side.says(path)} with {side.says(_REUSE)}", side.set(path, None))


def _events_need_reuse(side: Subject) -> Iterator[Breach]:
    path = f"{_KV}.event_buffer_max_size"
    if side.get(path) and not side.get(_REUSE):
        yield Breach(path, f"{side.says(path)} with {side.says(_REUSE)}", side.set(_REUSE, True))


def _decode_reuse(decode: Subject) -> Iterator[Breach]:
    if decode.get(_REUSE):
        yield Breach(_REUSE, decode.says(_REUSE), decode.set(_REUSE, False))


def _helix_blocks(side: Subject) -> Iterator[Breach]:
    path = "cp_config.tokens_per_block"
    own = side.get(path)
    if side.get("cp_config.cp_type") == "HELIX" and own is not None and own != side.get(f"{_KV}.tokens_per_block"):
        message = f"{side.says(path)} but {side.says(f'{_KV}.tokens_per_block')}"
        yield Breach(path, message, side.set(path, side.get(f"{_KV}.tokens_per_block")))


MEMORY_RULES = (
    RoleRule(
        id="kv-dtype-auto",
        roles=LLM_ROLES,
        severity="warning",
        reason="a 16-bit KV cache is what auto gives; only fp8 and nvfp4 are asked for by name",
        evidence="aiconfigurator",
        check=_dtype_auto,
    ),
    RoleRule(
        id="block-power-of-two",
        roles=LLM_ROLES,
        severity="warning",
        reason="TensorRT-LLM's kernels take blocks of 2^n tokens",
        evidence="llm_args.json, unverified there; 64 and 128 are the other published sizes",
        check=_blocks_power_of_two,
    ),
    RoleRule(
        id="windows-without-reuse",
        roles=LLM_ROLES,
        severity="warning",
        reason="block reuse with sliding windows was incomplete when the published configs were written",
        evidence="Dynamo's VSWA configs; TensorRT-LLM #5722, #6768",
        check=_windows_without_reuse,
    ),
    RoleRule(
        id="images-without-reuse",
        roles=LLM_ROLES,
        severity="warning",
        reason="block reuse with image tokens was incomplete when the published configs were written",
        evidence="Dynamo's multimodal configs; TensorRT-LLM #5722, #6768",
        check=_images_without_reuse,
    ),
    RoleRule(
        id="offload-needs-reuse",
        roles=LLM_ROLES,
        severity="warning",
        reason="host memory holds blocks for reuse alone: without reuse it is wasted",
        evidence="KvCacheConfig in TensorRT-LLM's llm_args.py",
        check=_offload_needs_reuse,
    ),
    RoleRule(
        id="events-need-reuse",
        roles=LLM_ROLES,
        severity="warning",
        reason="without block reuse there are no KV events, and KV-aware routing sees nothing",
        evidence="KvCacheConfig in TensorRT-LLM's llm_args.py",
        check=_events_need_reuse,
    ),
    RoleRule(
        id="decode-reuse",
        roles=("decode",),
        severity="note",
        reason="published decode workers reuse no blocks: prefill sends the whole prompt",
        evidence=f"off in 828 of 847 published workers, on only in prefill and aggregated ones, {RECIPES}",
        check=_decode_reuse,
    ),
    RoleRule(
        id="helix-blocks",
        roles=LLM_ROLES,
        severity="error",
        reason="HELIX splits the KV cache by its blocks",
        evidence="CpConfig in TensorRT-LLM's llm_args.py",
        check=_helix_blocks,
    ),
)
