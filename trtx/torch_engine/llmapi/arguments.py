"""Validates the keyword arguments of ``LLM`` and resolves them to ``LlmArgs``."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import fields
from typing import TYPE_CHECKING, Any

import msgspec

from trtx.config import schema
from trtx.config.engine_uses import in_force_and_left_out
from trtx.config.topology import MAX_SHARERS
from trtx.config.torch_fields import FieldRefusal, Unused, record_of, refused_fields
from trtx.config.torch_limits import outside_limits
from trtx.config.torch_together import conflict, sharing_conflict
from trtx.torch_engine.llm_args import (
    CacheTransceiverConfig,
    CudaGraphConfig,
    KvCacheConfig,
    LlmArgs,
    SchedulerConfig,
    SleepConfig,
    SpeculativeConfig,
    WeightGroup,
)

if TYPE_CHECKING:
    from trtx.config import Role

_NULL_IS_OFF = ("cuda_graph_config", "guided_decoding_backend")
"""Arguments that null turns off; for all others, null stands for the default."""

_GROUP_NAME = re.compile(r"[\w.-]{1,64}", re.ASCII)  # it becomes the name of a socket's file

NESTED: dict[str, type[Any]] = {
    "kv_cache_config": KvCacheConfig,
    "cuda_graph_config": CudaGraphConfig,
    "scheduler_config": SchedulerConfig,
    "cache_transceiver_config": CacheTransceiverConfig,
    "speculative_config": SpeculativeConfig,
    "sleep_config": SleepConfig,
}


def resolve_llm_args(model: str, arguments: Mapping[str, Any], role: Role = "agg") -> tuple[LlmArgs, dict[str, str]]:
    """Returns the resolved arguments, and for each argument without effect the reason why ignoring it is correct.

    ``role``: ``encode`` for an encoder, which uses fewer arguments. Raises ValueError for a name that no version of
    TensorRT-LLM has (with the nearest known one), for a wrong type or range, for an unsupported value that would change
    answers (``trtx.config.torch_fields``), and for a value that the engine can't run with
    (``trtx.config.torch_limits``).
    """
    plain = {name: _plain(value) for name, value in arguments.items()}
    problems = [found.message for found in schema.findings(plain) if found.kind != "other-version"]
    if problems:
        raise ValueError("; ".join(problems))
    if refused := [str(field) for field in refused_fields(plain)]:
        raise ValueError("; ".join(refused))
    if outside := [str(found) for found in outside_limits(plain)]:
        raise ValueError("; ".join(outside))
    taken: dict[str, Any] = {"model": model}
    for name, value in plain.items():
        if name in NESTED and isinstance(value, Mapping):
            known = _names(NESTED[name])
            taken[name] = {key: v for key, v in value.items() if key in known and not _means_default(key, v)}
        elif name in _names(LlmArgs) and (value is not None or name in _NULL_IS_OFF):
            taken[name] = value
    try:
        args = msgspec.convert(taken, LlmArgs)
    except msgspec.ValidationError as error:
        raise ValueError(f"the torch engine's arguments: {error}") from error
    if args.tensor_parallel_size > 1 and role == "encode":
        raise ValueError(
            f"tensor_parallel_size is {args.tensor_parallel_size}; expected 1, as an encoder runs on one GPU"
        )
    if (problem := conflict(plain)) is not None:
        raise ValueError(f"the torch engine's arguments: {problem}")
    _, left_out = in_force_and_left_out(plain, "torch", role, on_gpu=True)
    return args, {path: _because(path) for path in left_out}


def resolve_weight_group(given: Mapping[str, Any] | None, arguments: Mapping[str, Any]) -> WeightGroup | None:
    """Returns the group with which an engine of these ``arguments`` shares its weights.

    Raises ValueError for an unsuitable group, and for arguments with which weights can't be shared.
    """
    if given is None:
        return None
    if not isinstance(given, Mapping):
        raise ValueError(f"weight_group is {given!r}; expected a mapping with directory, name and engines")
    try:
        group = msgspec.convert(dict(given), WeightGroup)
    except msgspec.ValidationError as error:
        raise ValueError(f"weight_group: {error}; expected directory, name and engines") from error
    is_named = _GROUP_NAME.fullmatch(group.name) is not None and group.directory and "\0" not in group.directory
    if not is_named or not 2 <= group.engines <= MAX_SHARERS:
        raise ValueError(
            f"weight_group is {dict(given)}; expected a directory, a name of 1 to 64 letters, digits, dots, hyphens or "
            f"underscores, and 2 to {MAX_SHARERS} engines"
        )
    if (problem := sharing_conflict({name: _plain(value) for name, value in arguments.items()})) is not None:
        raise ValueError(f"weight_group: {problem}")
    return group


def _because(path: str) -> str:
    record = record_of(path)
    if isinstance(record, (Unused, FieldRefusal)):
        return record.because
    return "an encoder keeps no tokens and samples none"


def _names(model: type[Any]) -> frozenset[str]:
    return frozenset(f.name for f in fields(model))


def _means_default(name: str, value: Any) -> bool:
    """Whether None stands for the default: for fields whose own type has no None, as in TensorRT-LLM."""
    return value is None and name not in ("max_tokens", "backend", "batch_sizes", "secondary_offload_min_priority")


def _plain(value: Any) -> Any:
    """Converts config objects (dataclasses, pydantic models) to the mappings that YAML would give."""
    if hasattr(value, "model_dump"):
        return value.model_dump(exclude_unset=True)
    if hasattr(value, "__dataclass_fields__"):
        return {f.name: _plain(getattr(value, f.name)) for f in fields(value)}
    return value
