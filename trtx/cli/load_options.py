"""The options of ``trtx bench`` for its load and the axes of its sweep, and their conversion to a sweep file's fields.

The options of a load are generated from its fields (``trtx/cli/field_options.py``).
"""

from __future__ import annotations

from collections.abc import Mapping, Set
from dataclasses import dataclass
from typing import Annotated, Any, get_args, get_origin

from trtx.bench import LoadSpec
from trtx.cli.command import optional
from trtx.cli.field_options import OptionGroup, option_of, options_with_help
from trtx.cli.request_options import request_fields
from trtx.cli.topology_options import WHOLE_NUMBER
from trtx.config.strict_yaml import parse_yaml
from trtx.config.wording import quoted
from trtx.errors import UsageError

_FIELDS = options_with_help(LoadSpec)


def _panel(panel: str) -> OptionGroup:
    return OptionGroup(LoadSpec, options_with_help(LoadSpec, panel))


# The help page lists them in the order of the fields.
LoadOptions = Annotated[Mapping[str, Any], _panel("Load")]
PromptOptions = Annotated[Mapping[str, Any], _panel("Prompts")]
ImageOptions = Annotated[Mapping[str, Any], _panel("Images")]


@dataclass(frozen=True, slots=True, kw_only=True)
class AxisOptions:
    """The axes of a sweep, the limit on its number of sweep points, and the price of its GPUs."""

    axis: Annotated[
        list[str] | None,
        optional(
            "Topology",
            "--axis",
            "Field of the topology, such as prefill=1,2 or recipe=a,b, or of the engine config, such as "
            "overrides.max_batch_size=8,64, with several values. Repeatable: every combination is measured.",
            metavar="FIELD=V1,V2",
        ),
    ] = None
    max_cells: Annotated[
        int | None,
        optional("Load", "--max-cells", "Largest permitted number of cells. Default: 64."),
    ] = None
    gpu_hour_price: Annotated[
        float | None,
        optional(
            "Load",
            "--gpu-hour-price",
            "Price of one GPU for an hour, in any currency, from which the cost of a million tokens is computed.",
        ),
    ] = None


# Option -> (the use if the option is given, the use if neither the option nor a sweep file is given). A sweep file may
# set the field, so then the use is not known.
_MAKES: Mapping[str, tuple[str | None, str | None]] = {
    "request_rate": ("open loop", "closed loop"),
    "input_file": ("file", "no file"),
    "public_dataset": ("public", None),
    "fixed_schedule": ("schedule", None),
    "session_turns_mean": (None, "one turn"),
    "session_turn_delay_mean": (None, "no delay"),
    "prefix_prompt_length": ("prefix", "no prefix"),
    "image_batch_size": (None, "no images"),
}


def load_uses(named: Set[str]) -> list[str]:
    """Returns the uses of ``trtx bench`` (see ``trtx/cli/placement.py``) that follow from the given load options."""
    uses = ["dataset"] if named & {"input_file", "public_dataset"} else []
    for option, (with_it, without_it) in _MAKES.items():
        use = with_it if option in named else None if named & {"sweep", "sweep_file"} else without_it
        uses += [use] if use else []
    return uses


def _elements(field: str) -> Any:
    """Returns the element type of a list field; None if the field is not a list."""
    annotation = LoadSpec.model_fields[field].annotation
    element = get_args(annotation)[0] if get_origin(annotation) is tuple else None
    return get_args(element)[0] if get_origin(element) is Annotated else element


def load_fields(given: Mapping[str, Any]) -> dict[str, Any]:
    """Converts the load options to the ``load`` section of a sweep file. Raises UsageError, which names the option."""
    load = {name: given[name] for name in _FIELDS if name in given}
    read = {int: _integers, float: _numbers}
    for name, value in load.items():
        if (element := _elements(name)) is not None:
            load[name] = read[element](option_of(name), value)
    return load | request_fields(given)


def sweep_fields(given: Mapping[str, Any]) -> dict[str, Any]:
    """Converts the options of the sweep itself, which belong to neither its load nor its topology."""
    fields: dict[str, Any] = {}
    if "axis" in given:
        fields["axes"] = dict(map(_axis, given["axis"]))
    return fields | {name: given[name] for name in ("max_cells", "gpu_hour_price") if name in given}


def _axis(text: str) -> tuple[str, list[Any]]:
    """Parses ``prefill=1,2`` into the field and its values, which are parsed as YAML."""
    name, _, values = text.partition("=")
    if not name or not values:
        raise UsageError(f"--axis {quoted(text)} is not FIELD=V1,V2; write it like prefill=1,2")
    return name, [parse_yaml(value, f"--axis {name}", is_file=False) for value in values.split(",")]


def _numbers(option: str, text: str) -> list[float]:
    try:
        return [float(part) for part in text.split(",")]
    except ValueError as error:
        raise UsageError(f"{option} {quoted(text)} is not a list of numbers; write it like 2 or 2,4.5") from error


def _integers(option: str, text: str) -> list[int]:
    parts = [part.strip() for part in text.split(",")]
    if not all(WHOLE_NUMBER.fullmatch(part) for part in parts):
        raise UsageError(f"{option} {quoted(text)} is not a list of whole numbers; write it like 8 or 1,8,64")
    return [int(part) for part in parts]
