"""What of a run's engine configs was not in force, as conditions of the run."""

from __future__ import annotations

import json

from trtx.runs.forms import LeftOut, Provenance

_VALUE_CHARACTERS = 60


def left_out_conditions(provenance: Provenance) -> tuple[tuple[str, str], ...]:
    """Name and value of each condition: what a person typed, and apart from it what the recipes have."""
    found: dict[str, list[str]] = {}
    for measured in provenance.measured.values():
        for fields in (measured.left_out or {}).values():
            for one in fields:
                name = f"Without effect on engine {measured.engine}{'' if one.typed else ', of recipes'}"
                found.setdefault(name, []).append(f"{one.field} {_value(one)} ({one.source})")
    # Each once, however many topologies and roles have it.
    return tuple((name, ", ".join(dict.fromkeys(told))) for name, told in sorted(found.items()))


def _value(field: LeftOut) -> str:
    text = json.dumps(field.value, ensure_ascii=False)
    return text if len(text) <= _VALUE_CHARACTERS else text[:_VALUE_CHARACTERS] + "…"
