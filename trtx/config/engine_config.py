"""Engine configs: one YAML a role, with TensorRT-LLM's own field names.

Resolution order, later wins: the shipped ``engine_configs/<family>/<role>.yaml`` or the file that was named, then
``--set a.b=c`` for every role, then ``--set <role>.a.b=c`` for one.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

import yaml

from trtx.config import schema
from trtx.config.topology import Role
from trtx.errors import UsageError

CONFIG_ROOT = Path(__file__).resolve().parents[2] / "engine_configs"

# Arguments that only trtx's own engines take, beside TensorRT-LLM's. simulated: dynamo.mocker's flags.
OWN_FIELDS: dict[str, frozenset[str]] = {
    "torch": frozenset(),
    "tensorrt-llm": frozenset(),
    "paced": frozenset({"paced_ttft_ms", "paced_itl_ms"}),
    "simulated": frozenset({"speedup_ratio"}),
}

_FAMILIES = {
    "Qwen3ForCausalLM": "qwen3",
    "Qwen2ForCausalLM": "qwen2.5",
    "LlamaForCausalLM": "llama3",
}


@dataclass(frozen=True, slots=True)
class ResolvedEngineConfig:
    """Keyword arguments of the LLM for one role, where they came from, and why each override holds."""

    role: Role
    values: dict[str, Any]
    source: str
    reasons: tuple[str, ...]


def config_family(architecture: str, *, on_gpu: bool) -> str:
    """The folder of ``engine_configs`` for a model: ``tiny`` wherever there is no GPU."""
    return _FAMILIES.get(architecture, architecture.lower()) if on_gpu else "tiny"


def resolve_engine_config(
    role: Role, *, family: str, path: Path | None, overrides: tuple[str, ...], engine: str
) -> ResolvedEngineConfig:
    """Loads, overlays and checks the config of one role; raises UsageError with every finding."""
    shipped = CONFIG_ROOT / family / f"{role}.yaml"
    if path is not None:
        values, source = _read(path), str(path)
    elif shipped.is_file():
        values, source = _read(shipped), f"engine_configs/{family}/{role}.yaml"
    else:
        values, source = {}, "the engine's defaults"
    reasons = [f"{role}: engine config from {source}"]
    for key, value in _assignments(overrides, role):
        before = _set(values, key, value)
        reasons.append(f"{role}: {key} = {value!r} from --set" + ("" if before is None else f", was {before!r}"))
    origin = f"{source} and --set" if len(reasons) > 1 else source
    if role != "agg" and "cache_transceiver_config" not in values:
        values["cache_transceiver_config"] = {"backend": "DEFAULT"}
        reasons.append(
            f"{role}: cache_transceiver_config.backend = 'DEFAULT' because disaggregation needs a KV transport"
        )
    _check(values, origin, OWN_FIELDS.get(engine, frozenset()))
    return ResolvedEngineConfig(role, values, source, tuple(reasons))


def check_pair(prefill: ResolvedEngineConfig, decode: ResolvedEngineConfig) -> None:
    """Prefill hands KV blocks to decode as they lie: both must agree on what a block looks like."""
    for key, default in (("tokens_per_block", 32), ("dtype", "auto")):
        left, right = (side.values.get("kv_cache_config", {}).get(key, default) for side in (prefill, decode))
        if left != right:
            raise UsageError(
                f"kv_cache_config.{key} is {left!r} for prefill ({prefill.source}) and {right!r} for decode "
                f"({decode.source}); KV blocks move as they lie, so set both to the same value"
            )


def _read(path: Path) -> dict[str, Any]:
    try:
        values = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(
            f"engine config {path} can't be read ({error.strerror}); expected a YAML file with TensorRT-LLM's field "
            "names, such as those in engine_configs/"
        ) from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise UsageError(f"engine config {path} is not YAML: {' '.join(str(error).split())}") from error
    if values is None:
        return {}
    if not isinstance(values, dict):
        raise UsageError(f"engine config {path} holds a {type(values).__name__}; expected a mapping of field: value")
    return values


def _assignments(overrides: Iterable[str], role: Role) -> Iterable[tuple[str, object]]:
    everyone, this_role = [], []
    for text in overrides:
        key, equals, raw = text.partition("=")
        if not equals or not key or any(not part for part in key.split(".")):
            raise UsageError(f"--set {text!r} is not an assignment; expected a.b=value, for one role role.a.b=value")
        try:
            value = yaml.safe_load(raw)
        except yaml.YAMLError as error:
            raise UsageError(f"--set {text!r}: {raw!r} is not a YAML value; quote it") from error
        head, _, rest = key.partition(".")
        if head in get_args(Role):
            if head == role:
                this_role.append((rest, value))
        else:
            everyone.append((key, value))
    return everyone + this_role


def _set(values: dict[str, Any], key: str, value: object) -> object:
    *parents, leaf = key.split(".")
    node = values
    for parent in parents:
        child = node.get(parent)
        if not isinstance(child, dict):
            child = node[parent] = {}
        node = child
    before = copy.copy(node.get(leaf))
    node[leaf] = value
    return before


# TensorRT-LLM checks these when it builds its engine, minutes later; nothing else bounds them in the schema.
_POSITIVE = (
    "max_batch_size",
    "max_num_tokens",
    "max_seq_len",
    "tensor_parallel_size",
    "kv_cache_config.tokens_per_block",
)


def _check(values: Mapping[str, Any], origin: str, own: frozenset[str]) -> None:
    problems = [found.message for found in schema.findings({k: v for k, v in values.items() if k not in own})]
    for path in _POSITIVE:
        head, _, leaf = path.rpartition(".")
        node = values.get(head) if head else values
        value = node.get(leaf) if isinstance(node, Mapping) else None
        if isinstance(value, int) and value < 1:
            problems.append(f"{path} is {value}; expected at least 1")
    if reserved := sorted({"model", "tokenizer"} & values.keys()):
        problems.append(f"{', '.join(reserved)} is set; give it with --model instead")
    if problems:
        more = f" (and {len(problems) - 1} more: {'; '.join(problems[1:4])})" if len(problems) > 1 else ""
        raise UsageError(f"engine config from {origin}: {problems[0]}{more}")
