"""Lists the engine config fields that had no effect, as conditions of a run."""

from __future__ import annotations

import json

from trtx.runs.forms import LeftOut, Provenance

_VALUE_CHARACTERS = 60


def left_out_conditions(provenance: Provenance) -> tuple[tuple[str, str], ...]:
    """Name and value of each condition. Fields that a person typed and fields from recipes have separate conditions."""
    found: dict[str, list[str]] = {}
    for measured in provenance.measured.values():
        for fields in (measured.left_out or {}).values():
            for one in fields:
                name = f"Without effect on engine {measured.engine}{'' if one.typed else ', of recipes'}"
                found.setdefault(name, []).append(f"{one.field} {_value(one)} ({one.source})")
    # List each field once, even if several topologies and roles have it.
    return tuple((name, ", ".join(dict.fromkeys(fields))) for name, fields in sorted(found.items()))


def _value(field: LeftOut) -> str:
    text = json.dumps(field.value, ensure_ascii=False)
    return text if len(text) <= _VALUE_CHARACTERS else text[:_VALUE_CHARACTERS] + "…"
