"""One spelling for each engine config, so that two that mean the same to their engine compare as equal."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from trtx.config import schema
from trtx.config.torch_limits import TRANSPORT_OF
from trtx.config.versions import DEFAULT_VERSION, SchemaVersion, schema_version

_VERSION = schema_version(DEFAULT_VERSION)
_TORCH_DEFAULTS: Mapping[str, Any] = {
    "max_batch_size": 256,
    "cache_transceiver_config.kv_transfer_timeout_ms": 60_000,
}
"""Where the torch engine's default is another than TensorRT-LLM's; a test holds the two beside each other."""


def normal_form(values: Mapping[str, Any], engine: str, version: SchemaVersion = _VERSION) -> dict[str, Any]:
    """``values`` by path, without those that say what holds anyway.

    ``values``: the fields of a config that are in force. A default is left out, as is null where the engine takes it
    for the default. A section that is null switches something off, and stays.
    """
    return dict(_flat(values, engine, version, "LlmArgs", ""))


def _flat(
    values: Mapping[str, Any], engine: str, version: SchemaVersion, model: str, prefix: str
) -> list[tuple[str, Any]]:
    found: list[tuple[str, Any]] = []
    for name, value in values.items():
        path, inner = f"{prefix}{name}", schema.nested_model(model, values, name)
        if inner is not None and isinstance(value, Mapping):
            found += _flat(value, engine, version, inner, f"{path}.")
            continue
        value = _spelt(path, value, engine)
        if inner is not None or not _holds_anyway(path, value, engine, version):
            found.append((path, value))
    return found


def _spelt(path: str, value: Any, engine: str) -> Any:
    if path == "load_format" and isinstance(value, str):
        return value.upper()  # TensorRT-LLM takes it in either case
    if engine == "torch" and path == "cache_transceiver_config.backend" and isinstance(value, str):
        return TRANSPORT_OF.get(value, value)
    return value


def _holds_anyway(path: str, value: Any, engine: str, version: SchemaVersion) -> bool:
    default = schema.default(path, version, given=path.count("."))
    if engine == "torch":
        return value is None or value == _TORCH_DEFAULTS.get(path, default)
    return bool(value == default)
