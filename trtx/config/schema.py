"""The names, types and ranges of ``tensorrt_llm.LLM``'s arguments, as facts per version.

``llm_args.json`` beside this file holds 425 fields over four versions with their provenance. This module answers
two questions with it: is this field known, and is this value one that the field takes.
"""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

# Dynamo 1.4.2 is built against TensorRT-LLM 1.3.0rc22; main-2026-07 is the nearest text that was read.
DEFAULT_VERSION = "main-2026-07"


@dataclass(frozen=True, slots=True)
class Field:
    """One argument. ``allowed`` is a tuple of values, a range such as ``"0..1"`` or ``">= 0"``, or None."""

    name: str
    type: str
    allowed: tuple[object, ...] | str | None
    versions: tuple[str, ...]

    @property
    def model(self) -> str | None:
        """The nested model that this field holds, if any: ``KvCacheConfig`` of ``KvCacheConfig | None``."""
        found = re.search(r"\b([A-Z]\w*Config)\b", self.type)
        return found.group(1) if found else None


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing wrong with a config: the path of the field and a sentence."""

    path: str
    message: str


@cache
def _models() -> dict[str, dict[str, Field]]:
    facts = json.loads((Path(__file__).parent / "llm_args.json").read_text(encoding="utf-8"))
    models = {name: _fields(body["fields"]) for name, body in facts["models"].items()}
    # TorchLlmArgs extends BaseLlmArgs; the unions on decoding_type and algorithm are checked as one set of names.
    models["LlmArgs"] = models["BaseLlmArgs"] | models["TorchLlmArgs"]
    speculative = _anything("decoding_type")
    for body in facts["speculative_config"]["types"].values():
        speculative |= _fields(body["fields"])
    models["SpeculativeConfig"] = speculative
    sparse = _anything("algorithm") | _fields(facts["sparse_attention_config"]["base_fields"])
    for body in facts["sparse_attention_config"]["algorithms"].values():
        sparse |= _fields(body["fields"])
    models["SparseAttentionConfig"] = sparse
    return models


def _anything(name: str) -> dict[str, Field]:
    return {name: Field(name=name, type="str", allowed=None, versions=())}


def _fields(rows: list[Any]) -> dict[str, Field]:
    fields: dict[str, Field] = {}
    for row in rows:
        if isinstance(row, str):
            fields |= _anything(row)
            continue
        allowed = row.get("allowed")
        fields[row["name"]] = Field(
            name=row["name"],
            type=row.get("type", "object"),
            allowed=tuple(allowed) if isinstance(allowed, list) else allowed,
            versions=tuple(version for version, known in row.get("in", {}).items() if known),
        )
    return fields


def known_fields(model: str = "LlmArgs") -> frozenset[str]:
    """Every name that some version knows."""
    return frozenset(_models()[model])


def findings(values: Mapping[str, object], version: str = DEFAULT_VERSION) -> list[Finding]:
    """Everything wrong with a mapping of LLM arguments, in file order."""
    return list(_walk(values, "LlmArgs", "", version))


def _walk(values: Mapping[str, object], model: str, prefix: str, version: str) -> Iterator[Finding]:
    fields = _models()[model]
    for name, value in values.items():
        path = f"{prefix}{name}"
        field = fields.get(str(name))
        if field is None:
            yield Finding(path, f"unknown field {path}; {_nearest(str(name), fields, prefix)}")
        elif field.versions and version not in field.versions:
            yield Finding(path, f"{path} is not known to {version}; it is to {', '.join(field.versions)}")
        elif isinstance(value, Mapping) and field.model in _models():
            yield from _walk(value, field.model, f"{path}.", version)
        elif problem := _type_problem(field, value) or _range_problem(field, value):
            yield Finding(path, f"{path} is {value!r}; expected {problem}")


def _nearest(name: str, fields: Mapping[str, Field], prefix: str) -> str:
    close = difflib.get_close_matches(name, fields, n=1, cutoff=0.6)
    if close:
        return f"did you mean {prefix}{close[0]}?"
    shown = ", ".join(sorted(fields)[:8])
    return f"known here: {shown}{', …' if len(fields) > 8 else ''}"


_PYTHON_TYPES: dict[str, tuple[type, ...]] = {"int": (int,), "float": (int, float), "bool": (bool,), "str": (str,)}


def _type_problem(field: Field, value: object) -> str | None:
    alternatives = [part.strip() for part in field.type.split("|")]
    if value is None:
        return None if "None" in alternatives or "object" in field.type else field.type
    scalars = [part for part in alternatives if part in _PYTHON_TYPES]
    others = [part for part in alternatives if part not in _PYTHON_TYPES and part != "None"]
    if isinstance(value, Mapping):
        return (
            None
            if any(part.startswith(("dict", "object")) or part.endswith("Config") for part in others)
            else field.type
        )
    if isinstance(value, list):
        return None if any(part.startswith(("list", "object")) for part in others) else field.type
    if others and not all(part.endswith("Config") or part.startswith(("list", "dict")) for part in others):
        return None
    accepted = tuple(kind for part in scalars for kind in _PYTHON_TYPES[part])
    if isinstance(value, bool) and bool not in accepted:
        return field.type
    return None if isinstance(value, accepted) else field.type


def _range_problem(field: Field, value: object) -> str | None:
    allowed = field.allowed
    if value is None or allowed is None or isinstance(value, (Mapping, list)):
        return None
    if isinstance(allowed, tuple):
        return None if value in allowed else "one of " + ", ".join(map(str, allowed))
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        return None
    if bounds := re.fullmatch(r"(-?[\d.]+)\.\.(-?[\d.]+)", allowed):
        low, high = map(float, bounds.groups())
        return None if low <= value <= high else f"{allowed}"
    if bound := re.fullmatch(r"(>=|>)\s*(-?[\d.]+)", allowed):
        limit = float(bound.group(2))
        fits = value >= limit if bound.group(1) == ">=" else value > limit
        return None if fits else allowed
    return None
