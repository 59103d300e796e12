"""Removes the fields that the engine does not act on from an engine config, and formats the messages about them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from trtx.config.engine_config import ResolvedEngineConfig, given_path
from trtx.config.engine_uses import in_force_and_left_out
from trtx.config.topology import Role

OF_TP = "--tp"  # recorded as the source in place of a --set assignment


@dataclass(frozen=True, slots=True)
class LeftOutField:
    """A field in the config of ``role`` that has no effect on its engine.

    ``source``: ``--set``, ``--tp``, or the file. ``is_typed``: the user set the field, in an option or in a config file
    of their own; otherwise it comes from a config that trtx ships or wrote, or from a published one.
    """

    role: Role
    path: str
    value: Any
    source: str
    is_typed: bool


def without_left_out(
    config: ResolvedEngineConfig, engine: str, *, on_gpu: bool
) -> tuple[dict[str, Any], tuple[LeftOutField, ...]]:
    """Returns the fields that the engine acts on, and the fields left out with their sources.

    See :func:`trtx.config.engine_uses.in_force_and_left_out`.
    """
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
    """Returns one warning that names all fields that the user set and that have no effect; empty if there are none."""
    named = list(_named([one for one in fields if one.is_typed]))
    if not named:
        return ()
    them = "it" if len(named) == 1 else "them"
    return (
        f"engine {engine} does not act on {_joined(named)}, so nothing that is served or measured depends on {them}; "
        f"leave {them} out, or choose an --engine that acts on {them}",
    )


def left_out_notes(fields: Iterable[LeftOutField], engine: str) -> tuple[str, ...]:
    """Returns one note for the left-out fields that the user did not set, with the files of all roles; or nothing.

    The paced and the simulated engine compute no model, so there is no note that they ignore a shipped config.
    """
    untyped = [one for one in fields if not one.is_typed]
    if not untyped or engine in ("paced", "simulated"):
        return ()
    paths, sources = (
        list(dict.fromkeys(values)) for values in zip(*((one.path, one.source) for one in untyped), strict=True)
    )
    return (f"engine {engine} does not act on {_joined(paths)} of {_joined(sources)}",)


def left_out_messages(fields: Iterable[LeftOutField], engine: str) -> tuple[str, ...]:
    """Returns the warnings, then the notes."""
    known = tuple(fields)
    return (*left_out_warnings(known, engine), *left_out_notes(known, engine))


def _named(fields: list[LeftOutField]) -> Iterator[str]:
    """Yields each field once for all roles, grouped by source; the last field of a group names the source."""
    by_source: dict[str, list[LeftOutField]] = {}
    for one in fields:
        by_source.setdefault(one.source, []).append(one)
    for source, of_source in by_source.items():
        paths = list(dict.fromkeys(one.path for one in of_source))
        yield from (f"{path} ({source})" if path == paths[-1] else path for path in paths)


def _joined(named: list[str]) -> str:
    return named[0] if len(named) == 1 else f"{', '.join(named[:-1])} and {named[-1]}"
