"""The fields of an engine config that its engine does not act on: taken out of it, and named to whoever reads of it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from trtx.config.engine_config import ResolvedEngineConfig, given_path
from trtx.config.engine_uses import in_force_and_left_out
from trtx.config.topology import Role

OF_TP = "--tp"  # in the place of an assignment of --set


@dataclass(frozen=True, slots=True)
class LeftOutField:
    """A field that was given to ``role`` and has no effect there. ``is_typed``: by the person who asked for the
    topology; else it is of a config that trtx ships or wrote, or that was published. ``source``: --set, --tp, or the
    file."""

    role: Role
    path: str
    value: Any
    source: str
    is_typed: bool


def without_left_out(
    config: ResolvedEngineConfig, engine: str, *, on_gpu: bool
) -> tuple[dict[str, Any], tuple[LeftOutField, ...]]:
    """What of a config is in force, and what is not: see :func:`trtx.config.engine_uses.in_force_and_left_out`."""
    in_force, left_out = in_force_and_left_out(config.values, engine, config.role, on_gpu=on_gpu)
    return in_force, tuple(_field(config, path, value) for path, value in left_out.items())


def _field(config: ResolvedEngineConfig, path: str, value: Any) -> LeftOutField:
    given = given_path(config.overridden, path) or next(
        (one for one in config.overridden if one.startswith(f"{path}.")), None
    )
    if given is None:
        return LeftOutField(config.role, path, value, config.source, config.is_own)
    is_tp = config.overridden[given] == OF_TP
    return LeftOutField(config.role, path, value, OF_TP if is_tp else "--set", True)


def left_out_warnings(fields: Iterable[LeftOutField], engine: str) -> tuple[str, ...]:
    """One sentence that names what a person typed and has no effect; none where there is no such thing."""
    named = list(_named([one for one in fields if one.is_typed]))
    if not named:
        return ()
    them = "it" if len(named) == 1 else "them"
    return (
        f"engine {engine} does not act on {_joined(named)}, so nothing that is served or measured depends on {them}; "
        f"leave {them} out, or choose an --engine that acts on {them}",
    )


def left_out_notes(fields: Iterable[LeftOutField], engine: str) -> tuple[str, ...]:
    """The same of what nobody typed: one line for the fields and the files of all roles."""
    untyped = [one for one in fields if not one.is_typed]
    if not untyped:
        return ()
    paths, sources = (
        list(dict.fromkeys(values)) for values in zip(*((one.path, one.source) for one in untyped), strict=True)
    )
    return (f"engine {engine} does not act on {_joined(paths)} of {_joined(sources)}",)


def left_out_told(fields: Iterable[LeftOutField], engine: str) -> tuple[str, ...]:
    """Both."""
    known = tuple(fields)
    return (*left_out_warnings(known, engine), *left_out_notes(known, engine))


def _named(fields: list[LeftOutField]) -> Iterator[str]:
    """Each field once for all roles, and those of one source together."""
    by_source: dict[str, list[LeftOutField]] = {}
    for one in fields:
        by_source.setdefault(one.source, []).append(one)
    for source, of_source in by_source.items():
        paths = list(dict.fromkeys(one.path for one in of_source))
        yield from (f"{path} ({source})" if path == paths[-1] else path for path in paths)


def _joined(named: list[str]) -> str:
    return named[0] if len(named) == 1 else f"{', '.join(named[:-1])} and {named[-1]}"
