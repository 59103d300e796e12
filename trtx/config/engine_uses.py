"""Defines, for all engines, which fields of an engine config each engine acts on.

A field that the engine does not act on has no effect on serving or on measurements. :mod:`trtx.config.left_out`
removes such a field from the config, and every view of the topology lists it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any

from trtx.config import schema
from trtx.config.torch_fields import ENCODER_FIELDS, FIELDS, FieldRefusal, Honoured, record_of

if TYPE_CHECKING:
    from trtx.config.topology import Role

# Arguments that the engines take in addition to TensorRT-LLM's. Those of "simulated" are dynamo.mocker's flags.
OWN_FIELDS: dict[str, frozenset[str]] = {
    "torch": frozenset(),
    "tensorrt-llm": frozenset(),
    "paced": frozenset({"paced_ttft_ms", "paced_itl_ms"}),
    "simulated": frozenset({"speedup_ratio"}),
}
# All fields that the two engines without a model act on.
_ACTED_ON: Mapping[str, frozenset[str]] = {
    "paced": OWN_FIELDS["paced"] | {"max_seq_len", "max_batch_size", "max_num_tokens"},
    "simulated": OWN_FIELDS["simulated"]
    | {
        "max_batch_size",
        "max_num_tokens",
        "kv_cache_config.tokens_per_block",
        "kv_cache_config.max_tokens",
        "kv_cache_config.enable_block_reuse",
    },
}
ENCODER_ARGUMENTS = ("dtype", "max_batch_size", "trust_remote_code", "tensor_parallel_size", "model_kwargs")
"""The fields that reach TensorRT-LLM's MultimodalEncoder. All other fields concern KV or tokens."""
# AutoDeploy's LlmArgs refuses the first six fields unless they have their defaults, and its executor refuses the last.
# Dynamo 1.4.2 drops the same fields (ai-dynamo/dynamo, dynamo/trtllm/engine.py).
NOT_FOR_AUTODEPLOY = (
    "build_config",
    "moe_cluster_parallel_size",
    "moe_tensor_parallel_size",
    "moe_expert_parallel_size",
    "enable_attention_dp",
    "cp_config",
    "scheduler_config",
)
AUTODEPLOY_SIZES = ("tensor_parallel_size", "pipeline_parallel_size", "context_parallel_size")
"""Their product is AutoDeploy's world_size if the config has no world_size."""


def acts_on(engine: str, role: Role, path: str, values: Mapping[str, Any], *, on_gpu: bool) -> bool:
    """Returns whether workers of ``role`` act on the field ``path``, or on any field if ``path`` is a section.

    ``engine``: the resolved engine, not ``auto``. ``values``: the whole config that holds the field.
    """
    if engine == "torch":
        return _torch_acts_on(role, path, on_gpu=on_gpu)
    if engine == "tensorrt-llm":
        return _tensorrt_llm_acts_on(role, path, values)
    return _is_among(path, _ACTED_ON[engine])


def in_force_and_left_out(
    values: Mapping[str, Any], engine: str, role: Role, *, on_gpu: bool
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Splits a config into the fields that its engine acts on and the fields left out, the latter by path.

    A field whose value is None is never listed as left out, because None requests nothing. Any other value is listed,
    even TensorRT-LLM's own default, because that default says nothing about the behaviour of another engine. A section
    is kept if the engine acts on at least one of its fields.
    """
    left_out: dict[str, Any] = {}

    def kept_of(part: Mapping[str, Any], model: str, prefix: str) -> dict[str, Any]:
        kept: dict[str, Any] = {}
        for name, value in part.items():
            path, inner = f"{prefix}{name}", schema.nested_model(model, part, name)
            acts = acts_on(engine, role, path, values, on_gpu=on_gpu)
            if isinstance(value, Mapping) and value and inner is not None:
                before = len(left_out)
                held = kept_of(value, inner, f"{path}.")
                if held or acts:
                    kept[name] = held
                elif before == len(left_out):  # a section whose fields are all null still requests the section
                    left_out[path] = dict(value)
            elif acts:
                kept[name] = value
            elif value is not None:
                left_out[path] = value
        return kept

    return kept_of(values, "LlmArgs", ""), left_out


def _is_among(path: str, fields: Collection[str]) -> bool:
    """Returns whether ``path`` is one of ``fields``, lies inside one, or is a section that contains one."""
    return any(f"{path}.".startswith(f"{one}.") or one.startswith(f"{path}.") for one in fields)


def _torch_acts_on(role: Role, path: str, *, on_gpu: bool) -> bool:
    usable = ENCODER_FIELDS
    if role != "encode":
        usable = tuple(
            one for one, use in FIELDS.items() if isinstance(use, Honoured) and (on_gpu or not use.needs_gpu)
        )
    record = record_of(path)
    if isinstance(record, FieldRefusal):  # the value passed the check, so it describes what the engine does anyway
        section = path.rpartition(".")[0]
        return not record.unused and (not section or _is_among(section, usable))
    return _is_among(path, usable)


def _tensorrt_llm_acts_on(role: Role, path: str, values: Mapping[str, Any]) -> bool:
    if role == "encode":
        return _is_among(path, (*ENCODER_ARGUMENTS, "backend"))
    if values.get("backend") != "_autodeploy":
        return True
    unused = (*NOT_FOR_AUTODEPLOY, *(AUTODEPLOY_SIZES if values.get("world_size") else ()))
    return not any(f"{path}.".startswith(f"{one}.") for one in unused)
