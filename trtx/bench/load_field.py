"""What is written once of each field of a load, beside its type, default and bounds, and what is made of it.

Its option and the uses that would ignore that (``trtx/cli``), its word for aiperf (``aiperf.py``), the flag that
``--aiperf-args`` may not hold (``aiperf_flags.py``), and what a run did before there was the field
(``experiment/directory.py``) follow from the record in its ``Annotated``.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import BaseModel


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadField:
    """Stands in the ``Annotated`` of each field of a load. A field without ``help`` has no option of its own name."""

    help: str = ""  # of its option; the default is added where the field has one
    panel: Literal["Load", "Prompts", "Images"] = "Load"  # of the help
    metavar: str | None = None
    ignored: tuple[str, ...] = ()  # uses of trtx bench that would ignore the option; --resume ignores all of them
    flag: str = ""  # aiperf's, which gets a value other than the default (aiperf's too) as it stands
    since: int = 1  # version of run.lock.yaml that the field came with
    before: Any = None  # what runs of the versions before that did


@functools.cache
def field_records(model: type[BaseModel]) -> Mapping[str, LoadField]:
    """The records of a load by field. Raises LookupError for a field that has none."""
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
    """What aiperf is told of the fields that have a flag of its own, where they have another value than the default."""
    words: list[str] = []
    for name, record in field_records(type(load)).items():
        value = getattr(load, name)
        if record.flag and value != type(load).model_fields[name].default:
            words += [record.flag] if value is True else [record.flag, plain(value)]
    return tuple(words)


def plain(value: object) -> str:
    """As a person types it: no digit is lost, and a whole number has no point."""
    return str(value).removesuffix(".0") if isinstance(value, float) else str(value)
