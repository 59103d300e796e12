"""Axes of a sweep: topology fields that take several values, and the topologies that result from them."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, cast, get_args

from pydantic import AfterValidator, Field, TypeAdapter, ValidationError

from trtx.config import Mode, Role, TopologySpec, recipe_files
from trtx.config.strict_json import validate_strictly
from trtx.config.wording import quoted, shown
from trtx.errors import UsageError

MAX_TOPOLOGIES = 1_000  # every topology is validated before cells are counted
_SET = "overrides."  # prefix of an axis over an engine-config field
_COUNTS = {"workers": "agg", "prefill": "disagg", "decode": "disagg"}
OWN_MODE = {**_COUNTS, "conditional_disagg": "disagg"}  # topology field → the only mode that has it
_ENCODERS = {"encode": "e", "encode_shared": "s"}  # topology field of either mode → its letter in a label
_NO_AXIS = {
    "mode": "the modes are listed in modes",
    "overrides": "name the field, as overrides.max_batch_size",
    "engine_configs": "recipe names the configs of every role",
    "port": "each topology takes a free one",
    "host": "it changes nothing that is measured",
    "tls_cert": "it belongs to the machine, and changes nothing that is compared",
    "tls_key": "it belongs to the machine, and changes nothing that is compared",
    "chat_template": "metrics of different prompts can't be compared; run each template separately",
    "model": "metrics of two models can't be compared; run each model separately",
    "served_model_name": "it changes nothing that is measured",
}
AXIS_FIELDS = (*(name for name in TopologySpec.model_fields if name not in _NO_AXIS), "recipe")
"""Topology fields that can be an axis, in addition to fields of engine configs."""


def _known(axes: dict[str, tuple[Any, ...]]) -> dict[str, tuple[Any, ...]]:
    for name, values in axes.items():
        if name not in AXIS_FIELDS and not (name.startswith(_SET) and name != _SET):
            why = _NO_AXIS.get(
                name, f"expected one of {', '.join(AXIS_FIELDS)}, or overrides.FIELD of an engine config"
            )
            raise ValueError(f"axes.{name} is not an axis: {why}")
        if len(set(map(repr, values))) != len(values):
            raise ValueError(f"axes.{name} lists a value twice; list each once")
    return axes


Axes = Annotated[dict[str, Annotated[tuple[Any, ...], Field(min_length=1)]], AfterValidator(_known)]


@dataclass(frozen=True, slots=True)
class NamedTopology:
    """One topology of a sweep, with the label used for its directory, its cells and in the report."""

    label: str
    spec: TopologySpec


def expand(modes: Sequence[Mode], base: TopologySpec, axes: Mapping[str, Sequence[Any]]) -> tuple[NamedTopology, ...]:
    """All modes with all combinations of the axes that apply to them. Raises ValueError that names an invalid value."""
    found: dict[str, NamedTopology] = {}
    for mode in modes:
        own = {name: values for name, values in axes.items() if OWN_MODE.get(name, mode) == mode}
        if (count := math.prod(map(len, own.values()))) > MAX_TOPOLOGIES:
            raise ValueError(
                f"axes make {count} topologies of mode {mode}; expected at most {MAX_TOPOLOGIES}, so remove some values"
            )
        for values in itertools.product(*own.values()):
            chosen = dict(zip(own, values, strict=True))
            label = "-".join((mode, *_parts(mode, base, chosen)))
            if label in found:
                raise ValueError(f"axes make two topologies that are both called {label}; use values that differ more")
            found[label] = NamedTopology(label, _with(mode, base, chosen))
    for name in axes:
        if (mode_of := OWN_MODE.get(name)) and mode_of not in modes:
            raise ValueError(f"axes.{name} belongs to mode {mode_of}, and modes are {', '.join(modes)}; leave it out")
    return tuple(found.values())


def refuse_replaced(document: Mapping[str, Any], typed: Mapping[str, Any], source: str) -> None:
    """Raises UsageError for a topology field that is given together with an axis over the same field.

    The axis values would replace the field in every topology. ``document`` is a sweep file; ``typed`` contains
    command-line values, which win over the file. An axis on the command line over a field of the file is therefore
    accepted.
    """
    axes, own = (_mapping(document.get(part)) for part in ("axes", "topology"))
    typed_axes, options = (_mapping(typed.get(part)) for part in ("axes", "topology"))
    for field, text, axis in _replaced(options, {**axes, **typed_axes}):
        name = next(iter(options["media"])) if field == "media" else field
        option = _OPTIONS.get(name, f"--{name.replace('_', '-')}") + text
        by = f"--axis {axis}" if axis in typed_axes else f"axes.{axis}"
        raise UsageError(f"{source}{shown(option)} has no effect with {shown(by)}, {_IN_PLACE}")
    for field, text, axis in _replaced(own, [name for name in axes if name not in typed_axes]):
        raise UsageError(f"{source}{shown(f'topology.{field}{text}')} has no effect with axes.{axis}, {_IN_PLACE}")


# For fields whose option has a different name.
_OPTIONS = {"engine_configs": "--config or --recipe", "overrides": "--set"}
_IN_PLACE = "whose values replace it; leave one of them out"


def _replaced(topology: Mapping[str, Any], axes: Iterable[str]) -> Iterator[tuple[str, str, str]]:
    """The given fields that an axis replaces, as (field, text of the override if it is one, axis)."""
    for axis in axes:
        if axis.startswith(_SET):
            for text in _texts(topology.get("overrides")):
                if _is_of(text.partition("=")[0], axis.removeprefix(_SET)):
                    yield "overrides", f" {quoted(text)}", axis
        elif (field := "engine_configs" if axis == "recipe" else axis) in topology:
            yield field, "", axis


def _mapping(raw: Any) -> Mapping[str, Any]:
    """``raw`` as a mapping, or an empty one: other types are refused when the sweep is read."""
    return {str(name): value for name, value in raw.items()} if isinstance(raw, dict) else {}


def _texts(value: Any) -> list[str]:
    return [one for one in value if isinstance(one, str)] if isinstance(value, (list, tuple)) else []


def _is_of(path: str, axis: str) -> bool:
    """Whether an override of ``path`` conflicts with the axis.

    The axis would replace it or, if the override is for one role, it would win over every axis value.
    """
    of, by = (_role_and_field(text) for text in (path, axis))
    return by[0] in (of[0], None) and f"{of[1]}.".startswith(f"{by[1]}.")


def engine_field(axis: str) -> tuple[Role | None, str] | None:
    """Role and path of the engine-config field behind an axis; None if the axis is another topology field."""
    return _role_and_field(axis.removeprefix(_SET)) if axis.startswith(_SET) else None


def _role_and_field(path: str) -> tuple[Role | None, str]:
    head, _, rest = path.partition(".")
    return (cast(Role, head), rest) if head in get_args(Role) else (None, path)


def _with(mode: Mode, base: TopologySpec, chosen: Mapping[str, Any]) -> TopologySpec:
    fields = base.model_dump(exclude_unset=True) | {"mode": mode}
    overrides = [*base.overrides]
    for name, value in chosen.items():
        if name.startswith(_SET):
            overrides.append(f"{name.removeprefix(_SET)}={_yaml(value)}")
        elif name == "recipe":
            fields["engine_configs"] = _recipe(
                mode, value, any(chosen.get(name, getattr(base, name)) for name in _ENCODERS)
            )
        else:
            fields[name] = value
    try:
        return validate_strictly(TopologySpec, fields | {"overrides": tuple(overrides)})
    except ValidationError as error:
        first = error.errors()[0]
        name = str(first["loc"][0])
        raise ValueError(f"axes.{name} has {quoted(str(chosen.get(name)))}: {first['msg']}") from error


def _recipe(mode: Mode, value: Any, has_encoders: bool) -> dict[str, Path]:
    roles = {*(("agg",) if mode == "agg" else ("prefill", "decode")), *(("encode",) if has_encoders else ())}
    try:
        return {role: path for role, path in recipe_files(str(value)).items() if role in roles}
    except UsageError as error:
        raise ValueError(f"axes.recipe: {error}") from error


def _yaml(value: Any) -> str:
    return str(TypeAdapter(Any).dump_json(value).decode()) if not isinstance(value, str) else value


def _parts(mode: Mode, base: TopologySpec, chosen: Mapping[str, Any]) -> Iterator[str]:
    """The parts of a label: worker counts in short form (2p1d), other axes by name and value."""
    encoders = "".join(f"{chosen[name]}{short}" for name, short in _ENCODERS.items() if chosen.get(name))
    if mode == "agg" and chosen.keys() & {"workers", *_ENCODERS}:
        yield f"{encoders}{chosen.get('workers', base.workers)}w"
    if mode == "disagg" and chosen.keys() & {"prefill", "decode", *_ENCODERS}:
        yield f"{encoders}{chosen.get('prefill', base.prefill)}p{chosen.get('decode', base.decode)}d"
    for name, value in chosen.items():
        if name in _COUNTS or name in _ENCODERS:
            continue
        label = Path(value).stem if name == "recipe" else str(value)
        if not isinstance(value, str):
            label = f"{name.rpartition('.')[2]}_{label}"
        yield re.sub(r"[^A-Za-z0-9._-]+", "_", label).strip("_")
