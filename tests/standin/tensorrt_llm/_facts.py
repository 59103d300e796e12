"""``llm_api.json`` as Python: signatures, dataclasses, enums and the module tree of the version under test.

The part "source" of that file (transcribed from TensorRT-LLM's public source) lies over the part "page" (read from the
facts' tables by ``tools/standin``). What is not in it does not exist in this package.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import importlib
import inspect
import json
import sys
import types
from collections.abc import Callable, Mapping
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

from tensorrt_llm._standin import is_known

PACKAGE = "tensorrt_llm"
IMPLEMENTATION = f"{PACKAGE}._impl"


def _overlay(page: Any, source: Any) -> Any:
    """``source`` over ``page``: objects by key, lists of named entries by name, everything else replaced."""
    if isinstance(page, dict) and isinstance(source, dict):
        return page | {key: _overlay(page[key], value) if key in page else value for key, value in source.items()}
    if isinstance(page, list) and isinstance(source, list) and page and isinstance(page[0], dict):
        given = {entry["name"]: entry for entry in source}
        kept = [_overlay(entry, given.pop(entry["name"], {})) for entry in page]
        return kept + list(given.values())
    return source


@functools.cache
def facts() -> dict[str, Any]:
    read = json.loads((Path(__file__).parents[1] / "llm_api.json").read_text(encoding="utf-8"))
    return _overlay(read["page"], read["source"])


def known(entries: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The entries that the version under test has."""
    return [entry for entry in entries if is_known(entry.get("since"), entry.get("until"))]


def signature(name: str, *, bound: bool = False) -> inspect.Signature:
    """Of ``LLM.generate`` or ``get_global_disagg_request_id``; methods begin with ``self`` unless ``bound``."""
    entries = known(facts()["functions"][name])
    kinds = inspect.Parameter
    parameters = [kinds("self", kinds.POSITIONAL_OR_KEYWORD)] if "." in name and not bound else []
    for entry in entries:
        kind = {"keyword": kinds.KEYWORD_ONLY, "rest": kinds.VAR_KEYWORD}.get(entry.get("kind"))
        default = entry.get("default", kinds.empty)
        parameters.append(kinds(entry["name"], kind or kinds.POSITIONAL_OR_KEYWORD, default=default))
    return inspect.Signature(parameters)


def follows(name: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """A function takes exactly what the facts say, and hands it on by keyword, defaults filled in."""
    expected = signature(name)
    rest = next((p.name for p in expected.parameters.values() if p.kind is p.VAR_KEYWORD), None)

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def checked(*args: Any, **kwargs: Any) -> Any:
            bound = expected.bind(*args, **kwargs)
            bound.apply_defaults()
            arguments = dict(bound.arguments)
            more = arguments.pop(rest) if rest else {}
            return function(**arguments, **more)

        checked.__signature__ = expected  # type: ignore[attr-defined]
        del checked.__wrapped__  # type: ignore[attr-defined] # whoever asks for the signature gets the facts'
        return checked

    return decorate


def public(cls: type[Any]) -> type[Any]:
    """Gives a class the module and methods of the facts. A public name that they lack is an error of the stand-in."""
    entry = facts()["classes"][cls.__name__]
    cls.__module__ = entry["module"]
    names = {member["name"]: member for member in entry["members"]}
    for name, value in list(vars(cls).items()):
        if name not in names:
            if not name.startswith("_"):
                raise TypeError(f"{cls.__name__}.{name} is not among the facts of llm_api.json")
        elif not is_known(names[name].get("since")):
            delattr(cls, name)
        elif inspect.isfunction(value):
            setattr(cls, name, follows(f"{cls.__name__}.{name}")(value))
    return cls


def dataclass(name: str, namespace: Mapping[str, Any] | None = None) -> type[Any]:
    """The dataclass of that name: fields, defaults, slots and keyword-only as the facts say."""
    entry = facts()["classes"][name]
    fields: list[Any] = []
    for field in known(facts()["dataclasses"][name]):
        if "factory" in field:
            fields.append((field["name"], Any, dataclasses.field(default_factory={"list": list}[field["factory"]])))
        elif "default" in field:
            is_hidden = field["name"].startswith("_")
            spec = dataclasses.field(default=field["default"], init=not is_hidden, repr=not is_hidden)
            fields.append((field["name"], Any, spec))
        else:
            fields.append((field["name"], Any))
    made = dataclasses.make_dataclass(
        name, fields, namespace=dict(namespace or {}), slots=entry["slots"], kw_only=entry["kw_only"]
    )
    made.__module__ = entry["module"]
    return made


def enumeration(name: str) -> type[enum.Enum]:
    entry = facts()["enums"][name]
    kind = {"int": enum.IntEnum, "str": enum.StrEnum, "plain": enum.Enum}[entry["kind"]]
    made: Any = kind(name, [(member["name"], member["value"]) for member in known(entry["members"])])
    made.__module__ = entry["module"]
    return made


# --- the module tree ---


def plant() -> None:
    """Puts every module of the facts into ``sys.modules``; its names are found in ``_impl`` when somebody asks."""
    modules = facts()["modules"]
    paths = {path for module in modules for path in _with_parents(module)}
    for path in sorted(paths):
        names = {entry["name"]: entry for entry in known(modules.get(path, []))}
        module = sys.modules.get(path)
        if module is None:
            module = types.ModuleType(path)
            module.__spec__ = ModuleSpec(path, None, is_package=True)
            module.__path__ = []
            sys.modules[path] = module
            parent, _, leaf = path.rpartition(".")
            setattr(sys.modules[parent], leaf, module)
        module.__getattr__ = functools.partial(_find, path, names)  # type: ignore[method-assign]
        module.__dir__ = functools.partial(sorted, names)  # type: ignore[method-assign]
        module.__all__ = sorted(name for name in names if not name.startswith("_"))  # type: ignore[attr-defined]


def _with_parents(path: str) -> list[str]:
    parts = path.split(".")
    return [".".join(parts[: count + 1]) for count in range(len(parts))]


def _find(module: str, names: Mapping[str, Mapping[str, Any]], name: str) -> Any:
    if name not in names:
        raise AttributeError(f"module {module!r} has no attribute {name!r}")
    home, _, attribute = names[name].get("is", "").partition(":")
    return getattr(importlib.import_module(f"{IMPLEMENTATION}.{home}"), attribute or name)
