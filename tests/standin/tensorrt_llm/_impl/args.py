"""Arguments of ``LLM`` as pydantic models, made from ``trtx/config/llm_args.json`` for the version under test.

Like the real ones they refuse unknown names, hold defaults, and nest. Types the facts give only in words are ``Any``.
Models that no argument of the PyTorch backend has (``CalibConfig``, …) are in ``llm_api.json``; speculative and sparse
configurations in ``speculation``.
"""

from __future__ import annotations

import json
from functools import cache, partial
from pathlib import Path
from typing import Annotated, Any, Literal

import pydantic
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from tensorrt_llm._facts import enumeration
from tensorrt_llm._facts import facts as api_facts
from tensorrt_llm._impl import effects
from tensorrt_llm._standin import VERSION
from trtx.config import schema

# llm_args.json has no column for 1.3.0rc22; this is the text nearest to it.
COLUMN = {"1.3.0rc22": "main-2026-07"}.get(VERSION, VERSION)
HOME = "tensorrt_llm.llmapi.llm_args"
AUTODEPLOY_HOME = "tensorrt_llm._torch.auto_deploy.llm_args"
_OBJECT = "<constructed default object>"
TOKENIZER_ALIASES = {
    "deepseek_v32": "tensorrt_llm.tokenizer.deepseek_v32.DeepseekV32Tokenizer",
    "deepseek_v4": "tensorrt_llm.tokenizer.deepseek_v4.DeepseekV4Tokenizer",
}

CapacitySchedulerPolicy = enumeration("CapacitySchedulerPolicy")
ContextChunkingPolicy = enumeration("ContextChunkingPolicy")
LoadFormat = enumeration("LoadFormat")
BatchingType = enumeration("BatchingType")
QuantAlgo = enumeration("QuantAlgo")
_ENUMS: dict[str, Any] = {
    "capacity_scheduler_policy": CapacitySchedulerPolicy,
    "context_chunking_policy": ContextChunkingPolicy,
    "quant_algo": QuantAlgo,
    "kv_cache_quant_algo": QuantAlgo,
}


def _load_format(value: Any) -> Any:
    return LoadFormat[value.upper()] if isinstance(value, str) else value


class StrictBaseModel(BaseModel):
    """Unknown names are refused, by construction and by assignment."""

    model_config = ConfigDict(extra="forbid", protected_namespaces=(), arbitrary_types_allowed=True)


@cache
def _facts() -> dict[str, Any]:
    path = Path(schema.__file__).with_name("llm_args.json")
    read: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return read


@cache
def model(name: str) -> type[BaseModel]:
    """``KvCacheConfig``, ``TorchLlmArgs``, …; AttributeError where the version has none."""
    facts = _facts()
    if name == "AutoDeployLlmArgs":
        rows, base, shown, home = facts["autodeploy"]["fields"], _without_parallel_sizes(), "LlmArgs", AUTODEPLOY_HOME
    else:
        body = facts["legacy_tensorrt"][name] if name == "BuildConfig" else facts["models"].get(name)
        body = body or api_facts()["models"].get(name)
        if body is None or body.get("in", {}).get(COLUMN) is False:
            raise AttributeError(f"module {HOME!r} has no attribute {name!r}")
        rows, shown, home = body["fields"], name, HOME
        base = model("BaseLlmArgs") if name == "TorchLlmArgs" else StrictBaseModel
    allowed_in = facts["models"].get(name, {}).get("allowed_in", {})  # by field, where a model lists them by version
    rows = [row | {"allowed_in": allowed_in[row["name"]]} if row["name"] in allowed_in else row for row in rows]
    fields: Any = known_fields(rows)
    return pydantic.create_model(shown, __base__=base, __module__=home, **fields)


def known_fields(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Name -> type and ``Field`` of every row that the version under test has."""
    return {row["name"]: _field(row) for row in rows if row.get("in", {}).get(COLUMN) is not False}


def _without_parallel_sizes() -> type[BaseModel]:
    """AutoDeploy's arguments are TorchLlmArgs, of which some may only be left at their defaults."""

    def refuse(given: Any) -> Any:
        for name in _facts()["autodeploy"]["refused_unless_default"]:
            field = model("TorchLlmArgs").model_fields.get(name)  # None: it left with the TensorRT backend
            default = None if field is None else field.get_default(call_default_factory=True)
            if name in given and given[name] != default:
                raise ValueError(f"{name} is not supported by the AutoDeploy backend; expected it to be left out")
        return given

    checks: Any = {"refuse_parallel_sizes": model_validator(mode="before")(refuse)}
    return pydantic.create_model("LlmArgs", __base__=model("TorchLlmArgs"), __validators__=checks)


def __getattr__(name: str) -> Any:
    if name.startswith("_"):
        raise AttributeError(name)
    return model(name)


def _field(row: dict[str, Any]) -> tuple[Any, Any]:
    kind = _type(row)
    default = row.get("default_in", {}).get(COLUMN, row.get("default"))
    if row.get("required"):
        return kind, Field()
    if default == _OBJECT:
        nested = [part for part in _parts(row) if part in _facts()["models"]]
        return kind, Field(default_factory=partial(_construct, nested[0])) if nested else Field(default=None)
    if isinstance(default, (list, dict)):
        return kind, Field(default_factory=partial(json.loads, json.dumps(default)))
    if isinstance(default, str) and default.startswith("<"):
        default = None
    return kind, Field(
        default=default, validate_default=default is not None and row["name"] in ("load_format", *_ENUMS)
    )


def _construct(name: str) -> BaseModel:
    return model(name)()


def _parts(row: dict[str, Any]) -> list[str]:
    return [part.strip() for part in row["type"].split("|")]


def _type(row: dict[str, Any]) -> Any:
    name, parts = row["name"], _parts(row)
    if name == "speculative_config":
        from tensorrt_llm._impl import speculation  # which is made of this module's models

        return speculation.union() | None
    allowed = row.get("allowed_in", {}).get(COLUMN, row.get("allowed"))
    if name == "load_format" and "int" in parts:  # of LLM; a draft model's is a plain string
        return Annotated[LoadFormat, BeforeValidator(_load_format)]
    kinds: list[Any] = []
    for part in parts:
        if part == "None":
            kinds.append(None)
        elif part == "str" and name in _ENUMS:
            kinds.append(_ENUMS[name])
        elif part == "str" and isinstance(allowed, list):
            kinds.append(Literal[tuple(allowed)])
        elif part in ("int", "float"):
            kinds.append(Annotated[{"int": int, "float": float}[part], _range(allowed)])
        elif part in ("bool", "str"):
            kinds.append({"bool": bool, "str": str}[part])
        elif part.startswith("list["):
            kinds.append(list)
        elif part in ("dict", "list") or part.startswith("dict["):
            kinds.append({"d": dict, "l": list}[part[0]])
        elif part in _facts()["models"] and _is_here(part):
            kinds.append(model(part))
        else:
            return Any
    if row.get("default", ...) is None and None not in kinds:
        kinds.append(None)
    union = kinds[0]
    for kind in kinds[1:]:
        union = union | kind if union is not None else kind | None
    return union


def _is_here(name: str) -> bool:
    return _facts()["models"][name].get("in", {}).get(COLUMN) is not False


def _range(allowed: Any) -> Any:
    if not isinstance(allowed, str):
        return Field()
    for sign, bound in ((">=", "ge"), (">", "gt")):
        if allowed.startswith(sign):
            return Field(**{bound: float(allowed.removeprefix(sign))})
    low, dots, high = allowed.partition("..")
    return Field(ge=float(low), le=float(high)) if dots else Field()


# --- what an LLM does with its arguments ---


def resolve(class_name: str, backend: str, given: dict[str, Any]) -> Any:
    """The args object of an LLM. ValueError for names and values that the real one refuses."""
    if backend not in ("pytorch", "_autodeploy"):
        raise ValueError(f"Unsupported backend {backend!r}: the TensorRT backend is gone; expected pytorch")
    is_autodeploy = backend == "_autodeploy"
    kind = model("AutoDeployLlmArgs" if is_autodeploy else "TorchLlmArgs")
    for name in given:
        if name not in kind.model_fields and name != "_mpi_session":
            raise ValueError(f"{class_name} got invalid argument: {name}")
    given = {name: value for name, value in given.items() if name != "_mpi_session"}
    args = kind(**given, backend=backend)
    effects.refuse_what_only_the_real_one_does(args)
    return args


def update_llm_args_with_extra_options(llm_args: dict[str, Any], extra_llm_api_options: str) -> dict[str, Any]:
    """``llm_args`` with a YAML file laid over it."""
    import yaml

    if not extra_llm_api_options:
        return llm_args
    options = yaml.safe_load(Path(extra_llm_api_options).read_text(encoding="utf-8")) or {}
    return update_llm_args_with_extra_dict(llm_args, options, extra_llm_api_options)


def update_llm_args_with_extra_dict(
    llm_args: dict[str, Any], llm_args_dict: dict[str, Any], extra_llm_api_options: str | None = None
) -> dict[str, Any]:
    """Shallow: a section of the second replaces the first's, but for the three that merge field by field."""
    merge = _facts()["yaml_merge"]
    renamed = {merge["renames"].get(name, name): value for name, value in llm_args_dict.items()}
    merged = llm_args | renamed
    for name in ("kv_cache_config", "telemetry_config", "multimodal_config"):
        before, after = llm_args.get(name), renamed.get(name)
        if before is not None and isinstance(after, dict):
            merged[name] = _set_fields(before) | after
    for name in merge["dict_coercion"]:
        kind = "".join(part.capitalize() for part in name.split("_"))
        value = merged.get(name)
        if isinstance(value, dict) and kind in _facts()["models"] and _is_here(kind):
            merged[name] = model(kind)(**value)
    return merged


def _set_fields(value: Any) -> dict[str, Any]:
    return value.model_dump(exclude_unset=True) if isinstance(value, BaseModel) else dict(value)


for function in (update_llm_args_with_extra_options, update_llm_args_with_extra_dict):
    function.__module__ = HOME
