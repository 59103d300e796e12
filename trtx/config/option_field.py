"""The record of a field that users set: the text and the place of its option, and its value in older runs.

A field of a load, a topology or its media limits has one in its ``Annotated``, next to its type, default and bounds.
The command-line option (``trtx/cli/field_options.py``), the uses of a verb that refuse it (``trtx/cli/placement.py``)
and the reading of older run manifests (``trtx/experiment/directory.py``) follow from it.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel
from pydantic.fields import FieldInfo

DEFAULT: Any = object()
"""Older runs had the field's default."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OptionField:
    """The record of one field. A field whose record has no ``help`` has no generated option."""

    help: str = ""  # effect and unit; the field's default is appended
    panel: str = ""  # heading in the help of a verb
    metavar: str | None = None
    ignored: tuple[str, ...] = ()  # uses that refuse the option, by their names in USES of trtx/cli/placement.py
    # The first version of run.lock.yaml with this field. A new field says 10, and the version does not rise for it.
    since: int = 1
    # The JSON value in runs that were written before the field existed. Keep a default here before you change it.
    before: Any = DEFAULT


def record_of(field: FieldInfo) -> OptionField | None:
    """Returns the record of a field, or None if it has none."""
    return next((one for one in field.metadata if isinstance(one, OptionField)), None)


@functools.cache
def field_records(model: type[BaseModel]) -> Mapping[str, OptionField]:
    """Returns the record of each field of a model. Raises LookupError for a field without one."""
    found: dict[str, OptionField] = {}
    for name, field in model.model_fields.items():
        if (record := record_of(field)) is None:
            raise LookupError(
                f"{model.__name__}.{name} has no record: put an OptionField of trtx/config/option_field.py, or this "
                "model's own kind of it, into its Annotated; with help= it has an option"
            )
        found[name] = record
    return found


def value_before(field: FieldInfo) -> Any:
    """Returns the JSON value that a field had in runs that were written before the field existed."""
    record = record_of(field)
    if record is not None and record.before is not DEFAULT:
        return record.before
    default = field.get_default(call_default_factory=True)
    if isinstance(default, BaseModel):
        return default.model_dump(mode="json")
    return list(default) if isinstance(default, tuple) else default
