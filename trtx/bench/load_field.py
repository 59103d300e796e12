"""The record of a load field: that of any field, and the aiperf argument that gets the field's value."""

from __future__ import annotations

from dataclasses import dataclass

from pydantic import BaseModel

from trtx.config.option_field import OptionField, record_of


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadField(OptionField):
    """The record of a field of a load. ``--resume`` ignores the option of each."""

    panel: str = "Load"
    # aiperf's flag; it gets the field's value unless that is the default, which must be aiperf's default too.
    flag: str = ""


def load_flags(load: type[BaseModel]) -> dict[str, str]:
    """aiperf's flag of each field that has one."""
    records = {name: record_of(field) for name, field in load.model_fields.items()}
    return {name: one.flag for name, one in records.items() if isinstance(one, LoadField) and one.flag}


def aiperf_words(load: BaseModel) -> tuple[str, ...]:
    """aiperf's arguments for the fields that have a flag and a non-default value."""
    words: list[str] = []
    for name, flag in load_flags(type(load)).items():
        value = getattr(load, name)
        if value != type(load).model_fields[name].default:
            words += [flag] if value is True else [flag, plain(value)]
    return tuple(words)


def plain(value: object) -> str:
    """A value as a user types it: no digit is lost, and an integral float has no decimal point."""
    return str(value).removesuffix(".0") if isinstance(value, float) else str(value)
