"""A value other than the default for a field that users set, for tests that try every field or every option."""

from __future__ import annotations

from types import NoneType
from typing import Any, Literal, get_args, get_origin

from pydantic.fields import FieldInfo

# Fields whose type does not tell a value. Of a text, the option takes the same.
TEXTS = {
    "served_model_name": "other",
    "engine": "simulated",
    "model": "synthetic:tiny",
    "tool_call_parser": "hermes",
    "reasoning_parser": "qwen3",
    "conditional_disagg": "isl_bounding",
    "otlp_endpoint": "http://127.0.0.1:1",
}


def another(name: str, field: FieldInfo) -> Any:
    """A value other than the default; None where the type does not tell one."""
    if name in TEXTS:
        return TEXTS[name]
    if get_origin(field.annotation) is dict:
        return None
    kind = next((one for one in get_args(field.annotation) if one is not NoneType), field.annotation)
    kind = field.annotation if get_origin(field.annotation) is Literal else kind
    if get_origin(kind) is Literal:
        return next(one for one in reversed(get_args(kind)) if one != field.default)
    if kind is bool:
        return not field.default
    if kind is int:
        return (field.default or 0) + 2
    return (field.default or 0.0) + 0.5 if kind is float else None
