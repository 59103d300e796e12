"""The record attached to each load field, next to its type, default and bounds.

From this record in the field's ``Annotated`` follow: the command-line option and the uses of trtx that would ignore it
(``trtx/cli``), the aiperf argument (``aiperf/command.py``), the flags that ``--aiperf-args`` must not contain
(``aiperf/flags.py``), and the behaviour of runs that are older than the field (``experiment/directory.py``).
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import BaseModel


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadField:
    """Metadata of a load field, given in its ``Annotated``. A field without ``help`` has no option of its own name."""

    help: str = ""  # help text of the option; the field's default is appended
    panel: Literal["Load", "Prompts", "Images"] = "Load"  # panel in the help output
    metavar: str | None = None
    ignored: tuple[str, ...] = ()  # uses of trtx bench that ignore the option; --resume ignores all
    # aiperf's flag; it gets the field's value unless that is the default, which must be aiperf's default too.
    flag: str = ""
    since: int = 1  # first version of run.lock.yaml with this field
    before: Any = None  # the value that describes runs of earlier versions


@functools.cache
def field_records(model: type[BaseModel]) -> Mapping[str, LoadField]:
    """The record of each field of a load model. Raises LookupError for a field without one."""
    found: dict[str, LoadField] = {}
    for name, field in model.model_fields.items():
        records = [one for one in field.metadata if isinstance(one, LoadField)]
        if len(records) != 1:
            raise LookupError(
                f"{model.__name__}.{name} has no record: put LoadField(…) of trtx/bench/load_field.py into its "
                "Annotated; without help it has no option, without flag nothing of it reaches aiperf by itself"
            )
        found[name] = records[0]
    return found


def aiperf_words(load: BaseModel) -> tuple[str, ...]:
    """aiperf's arguments for the fields that have a flag and a non-default value."""
    words: list[str] = []
    for name, record in field_records(type(load)).items():
        value = getattr(load, name)
        if record.flag and value != type(load).model_fields[name].default:
            words += [record.flag] if value is True else [record.flag, plain(value)]
    return tuple(words)


def plain(value: object) -> str:
    """A value as a user types it: no digit is lost, and an integral float has no decimal point."""
    return str(value).removesuffix(".0") if isinstance(value, float) else str(value)
