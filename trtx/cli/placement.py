"""Which options mean something in which use of a verb: one table of all of them.

An option that a use of its verb would ignore is refused in that use. An option means something where the others of its
panel in the help do, or has a row of its own. Tests type each option in each use of its verb: it is refused there, or
something is other than without it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import typer

from trtx.cli.command import option_name, typed
from trtx.errors import UsageError


@dataclass(frozen=True, slots=True)
class Use:
    """One way to call a verb, in the words of the sentence that refuses an option there."""

    where: str
    because: str
    way_out: str = "leave one of them out"


# verb -> use -> words. Several uses of a verb may hold at once.
USES: Mapping[str, Mapping[str, Use]] = {
    "serve": {
        "agg": Use(
            "with --mode agg", "whose workers --workers counts", "leave it out, or choose --mode disagg"
        ),
        "disagg": Use(
            "with --mode disagg", "whose workers --prefill and --decode count", "leave it out, or choose --mode agg"
        ),
        "no GPU": Use("with --engine simulated or paced", "which has nothing to spread over GPUs"),
    },
    "bench": {
        "agg": Use("with --mode agg", "whose workers --workers counts", "leave it out, or choose --mode disagg"),
        "disagg": Use(
            "with --mode disagg", "whose workers --prefill and --decode count", "leave it out, or choose --mode agg"
        ),
        "no GPU": Use("with --engine simulated or paced", "which has nothing to spread over GPUs"),
        "resume": Use("beside --resume", "which goes on with what its run was asked", "leave it out"),
        "attach": Use("beside --url", "which measures what is served already"),
        "serve": Use("without --url", "whose deployment it describes", "add --url, or leave it out"),
        "dry run": Use("beside --dry-run", "which measures nothing"),
    },
    "build": {
        "build": Use("without --check", "to which it belongs", "add --check, or leave it out"),
        "none": Use("beside --quant none", "which calibrates nothing"),
        "tensorrt": Use("beside --backend tensorrt", "which builds for the GPU that is here and proves nothing"),
        "check": Use("beside --check", "which builds nothing"),
        "check all": Use("beside --all", "which checks every shipped config by itself"),
    },
    "doctor": {},
}  # fmt: skip

# verb -> panel of its help -> the uses in which the panel's options would be ignored
PANELS: Mapping[str, Mapping[str | None, tuple[str, ...]]] = {
    "serve": {"Model": (), "Topology": (), "Output": ()},
    "bench": {
        "Load": ("resume",),
        "Attach": ("resume", "serve"),
        "Model": ("resume", "attach"),
        "Topology": ("resume", "attach"),
        "Output": (),
    },
    "build": {None: (), "Quantization": ("check",), "Output": ("check",), "Model": (), "Check": ()},
    "doctor": {None: ()},
}

# verb -> option -> the same, of an option that differs from its panel
PLACES: Mapping[str, Mapping[str, tuple[str, ...]]] = {
    "serve": {
        "--workers": ("disagg",),
        "--prefill": ("agg",),
        "--decode": ("agg",),
        "--tp": ("no GPU",),
        "--gpus": ("no GPU",),
    },
    "bench": {
        "--url": ("resume",),
        "--model": ("resume",),
        "--workers": ("resume", "attach", "disagg"),
        "--prefill": ("resume", "attach", "agg"),
        "--decode": ("resume", "attach", "agg"),
        "--tp": ("resume", "attach", "no GPU"),
        "--gpus": ("resume", "attach", "no GPU"),
        "--output": ("resume",),
        "--dry-run": ("resume",),
        "--json": ("dry run",),
    },
    "build": {
        "MODEL": ("check all",),
        "--calib": ("check", "none"),
        "--calib-size": ("check", "none"),
        "--max-ppl-increase": ("check", "tensorrt"),
        "--config": ("check all",),
        "--gpu": ("tensorrt",),
        "--mode": ("build",),
        "--recipe": ("check all",),
        "--all": ("build",),
        "--json": ("build",),
    },
    "doctor": {},
}


def ignored_in(verb: str, parameter: Any) -> tuple[str, ...]:
    """The uses of ``verb`` in which one of its parameters would be ignored."""
    own = PLACES[verb].get(option_name(parameter))
    return PANELS[verb][parameter.rich_help_panel] if own is None else own


def refuse_ignored(context: typer.Context, uses: Iterable[str]) -> None:
    """Raises UsageError for the first option that was typed and means nothing in one of ``uses``."""
    verb, held = str(context.info_name), tuple(uses)
    for parameter in typed(context):
        for use in ignored_in(verb, parameter):
            if use in held:
                words = USES[verb][use]
                raise UsageError(
                    f"{option_name(parameter)} means nothing {words.where}, {words.because}; {words.way_out}"
                )
