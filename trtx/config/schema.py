"""The names, types, ranges and defaults of ``tensorrt_llm.LLM``'s arguments, for each version.

``llm_args.json`` in this directory lists the fields of four versions with their provenance. With it this module
decides whether a field is known and whether it takes a given value, and returns the default of an unset field.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, Literal

from trtx.config.value_types import model_of, range_problem, type_problem
from trtx.config.versions import COLUMNS, DEFAULT_VERSION, SchemaVersion, is_newer, schema_version

Kind = Literal["unknown-field", "other-version", "missing-field", "wrong-type", "wrong-value"]

_CONSTRUCTED = "<constructed default object>"
# TensorRT-LLM checks these only when it builds its engine, minutes later; llm_args.json has no bounds for them.
_AT_LEAST_ONE = frozenset(
    {
        "max_batch_size",
        "max_num_tokens",
        "max_seq_len",
        "tensor_parallel_size",
        "pipeline_parallel_size",
        "context_parallel_size",
        "kv_cache_config.tokens_per_block",
    }
)
# Fields renamed between versions: (old name, new name). The lookup goes both ways: an older engine needs the old name.
_MOVED = (
    ("enable_sleep", "sleep_config"),
    ("kv_cache_config.block_reuse_policy", "kv_cache_config.block_reuse_config"),
    ("speculative_config.speculative_model_dir", "speculative_config.speculative_model"),
    ("speculative_config.acceptance_window", "speculative_config.acceptance_rate_window_size"),
    ("speculative_config.acceptance_length_threshold", "speculative_config.acceptance_rate_threshold"),
)
_OTHER_NAME = dict(_MOVED) | {new: old for old, new in _MOVED}


@dataclass(frozen=True, slots=True)
class ConfigField:
    """One argument of the LLM, or one field of a nested config.

    ``known_in`` maps each column of ``llm_args.json`` to True, False or None (not checkable). ``allowed``: a tuple of
    values, a range such as ``"0..1"`` or ``">= 0"``, or None. ``allowed_in``: the columns whose allowed values differ.
    ``default_in``: the versions whose default differs.
    """

    name: str
    type: str
    known_in: Mapping[str, bool | None]
    required: bool
    default: object
    default_in: Mapping[str, object]
    allowed: tuple[object, ...] | str | None
    allowed_in: Mapping[str, tuple[object, ...] | None]

    def allowed_at(self, column: str) -> tuple[object, ...] | str | None:
        return self.allowed_in.get(column, self.allowed)

    def default_at(self, version: SchemaVersion) -> object:
        """Returns the default in ``version``.

        An entry of ``default_in`` for a version newer than ``DEFAULT_VERSION`` applies from that version on; an entry
        for an older version applies up to and including it.
        """
        default = self.default
        for stated, other in self.default_in.items():
            holds = not version.is_before(stated) if is_newer(stated) else not version.is_after(stated)
            default = other if holds else default
        return default


Fields = dict[str, ConfigField]  # by name


@dataclass(frozen=True, slots=True)
class SchemaFinding:
    """One error in a config: the path of the field, a sentence, the fix, and the kind of error.

    ``fix``: None if the sentence already names the expected value.
    """

    path: str
    message: str
    fix: str | None = None
    kind: Kind = "wrong-value"


@cache
def _models() -> dict[str, Fields]:
    facts = json.loads((Path(__file__).parent / "llm_args.json").read_text(encoding="utf-8"))
    models: dict[str, Fields] = {name: _fields(body) for name, body in facts["models"].items()}
    # TorchLlmArgs extends BaseLlmArgs, which has the fields of every backend; AutoDeploy's arguments extend both.
    models["LlmArgs"] = models["TorchLlmArgs"] | models["BaseLlmArgs"]
    models["AutoDeployLlmArgs"] = models["LlmArgs"] | _fields(facts["autodeploy"])
    types, algorithms = facts["speculative_config"], facts["sparse_attention_config"]
    models |= _union("SpeculativeConfig", "decoding_type", types["types"], types["types_in"], ["DecodingBaseConfig"])
    models |= _union("SparseAttentionConfig", "algorithm", algorithms["algorithms"], {}, [])
    base = _fields({"fields": algorithms["base_fields"]})
    models |= {name: {**fields, **base} for name, fields in models.items() if name.startswith("SparseAttentionConfig")}
    dsa = models["SparseAttentionConfig:dsa"]
    models["SparseAttentionConfig:deepseek_v4"] = {**dsa, **models["SparseAttentionConfig:deepseek_v4"]}
    models["SpeculativeConfig:Eagle"] = models["SpeculativeConfig:Eagle3"]  # TensorRT-LLM converts it, with a warning
    return models


def _union(
    model: str, discriminator: str, types: Mapping[str, Any], types_in: Mapping[str, Any], shared: list[str]
) -> dict[str, Fields]:
    """Builds the models of a tagged union.

    Returns ``model`` with the fields of all variants, and ``model:<type>`` with the fields of one variant for each
    type. Every model includes the field ``discriminator``.
    """
    named = [name for name in types if name not in shared]
    in_some = [*named, *(name for names in types_in.values() for name in names if name not in types)]
    chooser = {
        "name": discriminator,
        "type": "str",
        "required": True,
        "in": dict.fromkeys(COLUMNS, True),
        "allowed": list(dict.fromkeys(in_some)),
        "allowed_in": types_in,
    }
    common = _fields({"fields": [chooser, *(row for name in shared for row in types[name]["fields"])]})
    own = {name: common | _fields(types[name]) for name in named}
    everything = {name: replace(field, required=False) for fields in own.values() for name, field in fields.items()}
    return {model: everything | common} | {f"{model}:{name}": fields for name, fields in own.items()}


def _fields(body: Mapping[str, Any]) -> dict[str, ConfigField]:
    fields: dict[str, ConfigField] = {}
    for row in body["fields"]:
        allowed = row.get("allowed")
        allowed_in = row.get("allowed_in") or body.get("allowed_in", {}).get(row["name"], {})
        fields[row["name"]] = ConfigField(
            name=row["name"],
            type=row["type"],
            known_in=row.get("in", {}),
            required=bool(row.get("required")),
            default=row.get("default"),
            default_in=row.get("default_in", {}),
            allowed=tuple(allowed) if isinstance(allowed, list) else allowed,
            allowed_in={at: None if values is None else tuple(values) for at, values in allowed_in.items()},
        )
    return fields


def _fields_of(model: str, values: Mapping[str, object]) -> Fields:
    """Returns the fields of one object; ``values`` selects the variant of a union."""
    if model == "LlmArgs" and values.get("backend") == "_autodeploy":
        model = "AutoDeployLlmArgs"
    elif model == "CudaGraphConfig" and {"num_tokens", "max_num_token", "seq_lens", "max_seq_len"} & values.keys():
        model = "EncodeCudaGraphConfig"
    elif model in ("SpeculativeConfig", "SparseAttentionConfig"):
        chosen = values.get("decoding_type" if model == "SpeculativeConfig" else "algorithm")
        model = f"{model}:{chosen}" if f"{model}:{chosen}" in _models() else model
    return _models()[model]


def nested_model(model: str, values: Mapping[str, object], name: str) -> str | None:
    """Returns the model of the field ``name`` if its type is a nested config, else None.

    ``values``: the object of type ``model`` that contains the field.
    """
    field = _fields_of(model, values).get(name)
    inner = None if field is None else model_of(field.type)
    return inner if inner in _models() else None


def known_fields(model: str = "LlmArgs") -> frozenset[str]:
    """Returns the names of all fields that at least one version has."""
    return frozenset(_models()[model])


def default(path: str, version: SchemaVersion, *, given: int = 0) -> object:
    """Returns the default of an unset field such as ``kv_cache_config.dtype``.

    ``given``: how many leading parts of ``path`` the config sets. Returns None if the default is None or unknown, and
    for a field in a section that the config does not set and TensorRT-LLM does not construct by default.
    """
    fields: Fields = _models()["LlmArgs"]
    value: object = None
    for depth, part in enumerate(parts := path.split("."), start=1):
        field = fields.get(part)
        value = None if field is None else field.default_at(version)
        if field is None or (given < depth < len(parts) and value != _CONSTRUCTED):
            return None
        fields = _models().get(model_of(field.type) or "", {})
    return None if value == _CONSTRUCTED else value


def findings(values: Mapping[str, object], version: str = DEFAULT_VERSION) -> list[SchemaFinding]:
    """Returns all errors in a mapping of LLM arguments, in file order.

    ``version``: a column of ``llm_args.json`` or a version of TensorRT-LLM. For a version between two columns, only
    errors in both columns count.
    """
    certain, _ = findings_for(values, schema_version(version))
    return certain


def findings_for(
    values: Mapping[str, object], version: SchemaVersion
) -> tuple[list[SchemaFinding], list[SchemaFinding]]:
    """Returns the certain errors, and the errors in only one of the two columns that ``version`` lies between."""
    by_column = [list(_walk(values, "LlmArgs", "", column)) for column in version.columns]
    keys = [{(found.path, found.kind) for found in column} for column in by_column]
    certain = [found for found in by_column[0] if all((found.path, found.kind) in column for column in keys)]
    taken = {found.path for found in certain}
    doubtful = {found.path: found for column in by_column for found in column if found.path not in taken}
    return certain, list(doubtful.values())


def _walk(values: Mapping[str, object], model: str, prefix: str, column: str) -> Iterator[SchemaFinding]:
    fields = _fields_of(model, values)
    if prefix and all(field.known_in.get(column) is False for field in fields.values()):
        return  # this version has the field but not yet its model: a plain mapping, as cp_config was in 1.2.1
    for name, value in values.items():
        path = f"{prefix}{name}"
        field = fields.get(str(name))
        if field is None:
            yield _unknown(path, str(name), fields, prefix)
        elif field.known_in.get(column) is False:
            yield _elsewhere(path, field, column)
        elif isinstance(value, Mapping) and model_of(field.type) in _models():
            yield from _walk(value, model_of(field.type) or "", f"{path}.", column)
        elif expected := type_problem(field.type, value):
            yield SchemaFinding(path, f"{path} is {value!r}; expected {expected}", kind="wrong-type")
        elif found := _value_finding(path, field, value, column):
            yield found
    if prefix:
        for name, field in fields.items():
            if field.required and name not in values:
                path, expected = f"{prefix}{name}", _text(field.allowed_at(column)) or field.type
                message = f"{path} is missing; expected {expected}"
                yield SchemaFinding(path, message, f"add it: {expected}", "missing-field")


def _value_finding(path: str, field: ConfigField, value: object, column: str) -> SchemaFinding | None:
    if path in _AT_LEAST_ONE and isinstance(value, int) and value < 1:
        return SchemaFinding(path, f"{path} is {value}; expected at least 1")
    allowed, ignore_case = field.allowed_at(column), field.name == "load_format"
    expected = range_problem(allowed, value, ignore_case=ignore_case)
    if expected is None:
        return None
    known_to = [other for other in field.known_in if not range_problem(field.allowed_at(other), value)]
    if isinstance(allowed, tuple) and known_to:
        message = f"{path} {value!r} is not known to {column}; it is to {', '.join(known_to)}; expected {expected}"
        return SchemaFinding(path, message, f"make it {expected}", "other-version")
    return SchemaFinding(path, f"{path} is {value!r}; expected {expected}")


def _elsewhere(path: str, field: ConfigField, column: str) -> SchemaFinding:
    known_to = [other for other, known in field.known_in.items() if known]
    message = f"{path} is not known to {column}; it is to {', '.join(known_to) or 'none that was read'}"
    if path in _OTHER_NAME:
        return SchemaFinding(path, f"{message}; {column} has {_OTHER_NAME[path]}", "rename it", "other-version")
    came_later = known_to and COLUMNS.index(known_to[0]) > COLUMNS.index(column)
    fix = f"leave it out, or use TensorRT-LLM {known_to[0]} or later" if came_later else "leave it out: it is gone"
    return SchemaFinding(path, message, fix, "other-version")


def _unknown(path: str, name: str, fields: Fields, prefix: str) -> SchemaFinding:
    close = difflib.get_close_matches(name, fields, n=1, cutoff=0.6)
    if close:
        near = f"{prefix}{close[0]}"
        return SchemaFinding(path, f"unknown field {path}; did you mean {near}?", f"rename it {near}", "unknown-field")
    shown = ", ".join(sorted(fields)[:8]) + (", …" if len(fields) > 8 else "")
    return SchemaFinding(path, f"unknown field {path}; known here: {shown}", "leave it out", "unknown-field")


def _text(allowed: tuple[object, ...] | str | None) -> str | None:
    return "one of " + ", ".join(map(str, allowed)) if isinstance(allowed, tuple) else allowed
