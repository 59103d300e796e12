"""The options of ``trtx bench`` that describe its loads and the axes of its sweep, and what a sweep file would say."""

from __future__ import annotations

from collections.abc import Mapping, Set
from dataclasses import dataclass
from typing import Annotated, Any

import typer

from trtx.cli.prompt_options import request_fields
from trtx.cli.topology_options import WHOLE_NUMBER
from trtx.config.strict_yaml import parse_yaml
from trtx.config.wording import quoted
from trtx.errors import UsageError

_LOAD = "Load"


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadOptions:
    """As it is typed; help shows the options in this order. Each has its field's name in ``LoadSpec``."""

    concurrency: Annotated[
        str | None,
        typer.Option(
            "--concurrency",
            metavar="1,8,64",
            help="Requests in flight, one cell each. Default: 1,8,64.",
            rich_help_panel=_LOAD,
            show_default=False,
        ),
    ] = None
    request_rate: Annotated[
        str | None,
        typer.Option(
            "--request-rate",
            metavar="2,4.5",
            help="Requests sent a second, one cell each, in place of --concurrency.",
            rich_help_panel=_LOAD,
            show_default=False,
        ),
    ] = None
    arrival: Annotated[
        str | None,
        typer.Option(
            "--arrival",
            metavar="poisson|constant",
            help="How requests of a rate are spaced. Default: poisson.",
            rich_help_panel=_LOAD,
            show_default=False,
        ),
    ] = None
    burstiness: Annotated[
        float | None,
        typer.Option(
            "--burstiness",
            help="Space them by a gamma distribution: 1 is poisson, below it they come in bursts.",
            rich_help_panel=_LOAD,
            show_default=False,
        ),
    ] = None
    isl: Annotated[
        str | None,
        typer.Option(
            "--isl",
            metavar="512,2048",
            help="Input tokens a request; several make cells, in pairs with --osl. Default: 512.",
            rich_help_panel=_LOAD,
            show_default=False,
        ),
    ] = None
    osl: Annotated[
        str | None,
        typer.Option(
            "--osl",
            metavar="128,256",
            help="Output tokens a request, exactly; several as with --isl. Default: 128.",
            rich_help_panel=_LOAD,
            show_default=False,
        ),
    ] = None
    isl_stddev: Annotated[
        float | None,
        typer.Option(
            "--isl-stddev",
            help="Draw input lengths with this standard deviation. Default: 0.",
            rich_help_panel=_LOAD,
            show_default=False,
        ),
    ] = None
    osl_stddev: Annotated[
        float | None,
        typer.Option(
            "--osl-stddev", help="The same for output lengths. Default: 0.", rich_help_panel=_LOAD, show_default=False
        ),
    ] = None
    request_count: Annotated[
        int | None,
        typer.Option(
            "--request-count",
            help="Measured requests a cell. Default: 64 and 3 times the concurrency, 4 times it where that is more.",
            rich_help_panel=_LOAD,
            show_default=False,
        ),
    ] = None
    warmup_request_count: Annotated[
        int | None,
        typer.Option(
            "--warmup-request-count",
            help="Requests before them, not measured. Default: as many as it takes to judge whether they were enough.",
            rich_help_panel=_LOAD,
            show_default=False,
        ),
    ] = None
    trials: Annotated[
        int | None,
        typer.Option(
            "--trials",
            help="Times every cell is measured, with prompts of its own. Default: 1.",
            rich_help_panel=_LOAD,
            show_default=False,
        ),
    ] = None
    seed: Annotated[
        int | None,
        typer.Option(
            "--seed",
            help="Seed of the prompts, the same in every mode. Default: 7.",
            rich_help_panel=_LOAD,
            show_default=False,
        ),
    ] = None


@dataclass(frozen=True, slots=True, kw_only=True)
class AxisOptions:
    """What of a topology takes several values, and how many cells that may make."""

    axis: Annotated[
        list[str] | None,
        typer.Option(
            "--axis",
            metavar="FIELD=V1,V2",
            help="A field of the topology that takes several values, such as prefill=1,2 or recipe=a,b, or of the "
            "engine config, such as overrides.max_batch_size=8,64. Repeatable: every combination is measured.",
            rich_help_panel="Topology",
            show_default=False,
        ),
    ] = None
    max_cells: Annotated[
        int | None,
        typer.Option(
            "--max-cells", help="Refuse a sweep of more cells. Default: 64.", rich_help_panel=_LOAD, show_default=False
        ),
    ] = None


# Option -> the use that it makes when it is typed, and the one when neither it nor a sweep file is, which may say it.
_MAKES: Mapping[str, tuple[str | None, str | None]] = {
    "request_rate": ("open loop", "closed loop"),
    "input_file": ("file", "no file"),
    "public_dataset": ("public", None),
    "fixed_schedule": ("schedule", None),
    "session_turns_mean": (None, "one turn"),
    "session_turn_delay_mean": (None, "no delay"),
    "prefix_prompt_length": ("prefix", "no prefix"),
}


def load_uses(named: Set[str]) -> list[str]:
    """The uses of ``trtx bench`` (``trtx/cli/placement.py``) that the load makes, of the options that were typed."""
    uses = ["dataset"] if named & {"input_file", "public_dataset"} else []
    for option, (with_it, without_it) in _MAKES.items():
        use = with_it if option in named else None if named & {"sweep", "sweep_file"} else without_it
        uses += [use] if use else []
    return uses


_INTEGERS, _NUMBERS = ("concurrency", "isl", "osl"), ("request_rate",)


def load_fields(given: Mapping[str, Any]) -> dict[str, Any]:
    """What was typed of a load, as a sweep file would say it under ``load``. Raises UsageError naming the option."""
    from trtx.bench import LoadSpec

    load = {name: given[name] for name in LoadSpec.model_fields if name in given}
    for name, value in load.items():
        option = f"--{name.replace('_', '-')}"
        if name in _INTEGERS:
            load[name] = _integers(option, value)
        elif name in _NUMBERS:
            load[name] = _numbers(option, value)
    return load | request_fields(given)


def sweep_fields(given: Mapping[str, Any]) -> dict[str, Any]:
    """The same of the sweep itself: its axes, and how many cells they may make."""
    fields: dict[str, Any] = {}
    if "axis" in given:
        fields["axes"] = dict(map(_axis, given["axis"]))
    if "max_cells" in given:
        fields["max_cells"] = given["max_cells"]
    return fields


def _axis(text: str) -> tuple[str, list[Any]]:
    """``prefill=1,2``: a field, and its values as YAML reads them."""
    name, _, values = text.partition("=")
    if not name or not values:
        raise UsageError(f"--axis {quoted(text)} is not FIELD=V1,V2; expected such as prefill=1,2")
    return name, [parse_yaml(value, f"--axis {name}", is_file=False) for value in values.split(",")]


def _numbers(option: str, text: str) -> list[float]:
    try:
        return [float(part) for part in text.split(",")]
    except ValueError as error:
        raise UsageError(f"{option} {quoted(text)} is not a list of numbers; expected such as 2 or 2,4.5") from error


def _integers(option: str, text: str) -> list[int]:
    parts = [part.strip() for part in text.split(",")]
    if not all(WHOLE_NUMBER.fullmatch(part) for part in parts):
        raise UsageError(f"{option} {quoted(text)} is not a list of whole numbers; expected such as 8 or 1,8,64")
    return [int(part) for part in parts]
