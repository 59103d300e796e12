"""Converts engine configs to a normal form. Configs with the same meaning to the engine have equal normal forms."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from trtx.config import schema
from trtx.config.torch_limits import TRANSPORT_OF
from trtx.config.versions import DEFAULT_VERSION, schema_version

_VERSION = schema_version(DEFAULT_VERSION)
_TORCH_DEFAULTS: Mapping[str, Any] = {
    "max_batch_size": 256,
    "moe_tensor_parallel_size": -1,
    "moe_expert_parallel_size": -1,
    "kv_cache_config.host_cache_size": 0,
    "cache_transceiver_config.kv_transfer_timeout_ms": 60_000,
    "guided_decoding_backend": "llguidance",
}
"""Defaults of the torch engine that differ from TensorRT-LLM's. A test compares them with the engine's."""
_TENSORRT_DEFAULTS: Mapping[str, Any] = {"guided_decoding_backend": "xgrammar"}
"""Defaults that trtx sets for TensorRT-LLM: see :mod:`trtx.engine.tensorrt_llm.arguments`."""
_NULL_IS_OFF = frozenset(("guided_decoding_backend",))
_OFF_BY_DEFAULT = frozenset(("speculative_config", "sleep_config"))
"""Sections whose null says what holds without them."""


def normal_form(values: Mapping[str, Any], engine: str) -> dict[str, Any]:
    """Returns ``values``, the fields of a config that the engine acts on, by path and without defaults.

    A null is omitted if the engine treats it as the default. A section that is null is kept if it switches something
    off.
    """
    return dict(_flat(values, engine, "LlmArgs", ""))


def _flat(values: Mapping[str, Any], engine: str, model: str, prefix: str) -> list[tuple[str, Any]]:
    found: list[tuple[str, Any]] = []
    for name, value in values.items():
        path, inner = f"{prefix}{name}", schema.nested_model(model, values, name)
        if inner is not None and isinstance(value, Mapping):
            found += _flat(value, engine, inner, f"{path}.")
            continue
        value = _spelt(path, value, engine)
        if value is None and path in _OFF_BY_DEFAULT:
            continue
        if inner is not None or not _holds_anyway(path, value, engine):
            found.append((path, value))
    return found


def _spelt(path: str, value: Any, engine: str) -> Any:
    if path == "load_format" and isinstance(value, str):
        return value.upper()  # TensorRT-LLM accepts it in upper and lower case
    if engine == "torch" and path == "cache_transceiver_config.backend" and isinstance(value, str):
        return TRANSPORT_OF.get(value, value)
    if engine == "torch" and path == "guided_decoding_backend" and value == "xgrammar":
        return "llguidance"  # which computes both
    return value


def _holds_anyway(path: str, value: Any, engine: str) -> bool:
    default = schema.default(path, _VERSION, given=path.count("."))
    if value is None and path in _NULL_IS_OFF:
        return False
    if engine == "torch":
        return value is None or value == _TORCH_DEFAULTS.get(path, default)
    return bool(value == _TENSORRT_DEFAULTS.get(path, default))
