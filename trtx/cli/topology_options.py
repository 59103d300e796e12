"""The options that describe a topology, shared by all verbs that serve one, and their conversion to a spec."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Any, cast, get_args

import typer

from trtx.cli.command import optional
from trtx.cli.field_options import OptionGroup, option_of, options_with_help, validated
from trtx.cli.field_options import spread as spread  # verbs take it from here, with the groups
from trtx.config import Mode, Role, TopologySpec, recipe_files
from trtx.config.media import MediaLimits
from trtx.config.topology import refuse_idle
from trtx.config.wording import quoted
from trtx.errors import UsageError

WHOLE_NUMBER = re.compile(r"[0-9]{1,9}")  # an item of a list; str.isdigit() would accept ² and any length
_MODEL, _OUTPUT = "Model", "Output"

ConfigOption = Annotated[
    list[str] | None,
    optional(
        _MODEL,
        "--config",
        "Engine config of one role (agg, prefill, decode): a YAML file with TensorRT-LLM's field names. Repeatable.",
        metavar="ROLE=FILE",
    ),
]
RecipeOption = Annotated[
    str | None,
    optional(
        _MODEL,
        "--recipe",
        "Folder of engine_configs to use, such as deepseek-r1-mtp. Default: the model family's. --config overrides it.",
        metavar="NAME",
    ),
]
SetOption = Annotated[
    list[str] | None,
    optional(
        _MODEL,
        "--set",
        "Override a field of the engine configs of all roles except encode; ROLE.A.B=C: of one role. Repeatable.",
        metavar="A.B=C",
    ),
]
OutputOption = Annotated[
    Path,
    typer.Option("-o", "--output", help="Directory in which a new run directory is created.", rich_help_panel=_OUTPUT),
]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelOptions:
    """The options of the model and its engine, in the order of the help page."""

    model: Annotated[
        str | None,
        optional(
            _MODEL,
            "--model",
            "Directory, Hugging Face name or synthetic:<shape>. Default: a small synthetic one that fits this machine.",
        ),
    ] = None
    served_model_name: Annotated[
        str | None,
        optional(
            _MODEL, "--served-model-name", "Model name in the requests of clients. Default: the model's short name."
        ),
    ] = None
    engine: Annotated[
        str,
        typer.Option(
            "--engine",
            help="torch, tensorrt-llm, simulated (no real tokens), paced (fixed speed) or auto: tensorrt-llm if it is "
            "installed and there is a GPU, else torch.",
            rich_help_panel=_MODEL,
        ),
    ] = "auto"
    config: ConfigOption = None
    recipe: RecipeOption = None
    overrides: SetOption = None


TOPOLOGY_FIELDS = options_with_help(TopologySpec)
"""The fields of a topology that have an option of their own name, in the order of the help."""
TopologyOptions = Annotated[Mapping[str, Any], OptionGroup(TopologySpec, TOPOLOGY_FIELDS, ignored=("attach",))]
MEDIA_FIELDS = options_with_help(MediaLimits)
MediaOptions = Annotated[Mapping[str, Any], OptionGroup(MediaLimits, MEDIA_FIELDS, ignored=("attach",))]
OPTION_NAMES = (*(field.name for field in fields(ModelOptions)), *TOPOLOGY_FIELDS)


def build_spec(*, mode: str, **typed: Any) -> TopologySpec:
    """Builds a validated spec from the options above; None means that an option was not given.

    Raises UsageError, which names the option, for invalid and contradictory values.
    """
    given = {name: value for name, value in typed.items() if value is not None}
    recipe = recipe_roles(given.pop("recipe", None), encode=any(map(given.get, ("encode", "encode_shared"))))
    engine_configs = recipe | role_files(given.pop("config", None))
    if media := {name: given.pop(name) for name in MEDIA_FIELDS if name in given}:
        given["media"] = media
    if "gpus" in given:
        given["gpus"] = _indices(given["gpus"])
    if "router_args" in given:
        given["router_args"] = split_words("--router-args", given["router_args"])
    spec = validated(TopologySpec, {"mode": mode, "engine_configs": engine_configs, **given}, _OPTIONS)
    refuse_idle(spec, option_of)
    return spec


_OPTIONS = {"engine_configs": "config", "overrides": "set"}  # field -> option, if they differ
_FIELDS = {"config": "engine_configs", "recipe": "engine_configs"}  # option -> field, if they differ


def engine_uses(engine: str) -> tuple[str, ...]:
    """Returns the uses that follow from the engine, by their names in :mod:`trtx.cli.placement`."""
    return ("no GPU",) if engine in ("simulated", "paced") else ()


def check_roles(
    modes: Sequence[Mode],
    config: list[str] | None,
    overrides: list[str] | None,
    recipe: str | None,
    *,
    encode: int | None = None,
    beside: Sequence[Role] = (),
) -> None:
    """Refuses configs and overrides that no role uses.

    Raises UsageError for a given config or override of a role that is neither in a topology of ``modes`` nor in
    ``beside``, and for a recipe whose configs are all replaced. ``encode``: the number of encode workers of each
    topology; None if the verb can't serve any.
    """
    served = {role for mode in modes for role in TopologySpec(mode=mode, encode=encode or 0).roles} | {*beside}
    for option, entries in (("--config", config), ("--set", overrides)):
        for entry in entries or ():
            role = entry.partition("=")[0].partition(".")[0]
            if role in get_args(Role) and role not in served:
                way_out = "leave it out, or choose another --mode"
                if role == "encode":
                    way_out = "leave it out" if encode is None else "leave it out, or add --encode 1"
                raise UsageError(
                    f"{option} {quoted(entry)} is for {role} workers, and --mode {','.join(modes)} has "
                    f"{' and '.join(sorted(served))} workers alone; {way_out}"
                )

    if recipe is not None and served - {*beside} <= role_files(config).keys():
        raise UsageError(unused_recipe(recipe))


def unused_recipe(recipe: str) -> str:
    """Returns the error message for a recipe combined with a ``--config`` for every role."""
    return f"--recipe {quoted(recipe)} has no effect with a --config for every role; leave one of them out"


def recipe_roles(recipe: str | None, *, encode: bool = False) -> dict[Role, Path]:
    """Returns the configs of ``--recipe`` for the roles of a topology. ``encode``: whether it has encode workers."""
    files = recipe_files(recipe) if recipe is not None else {}
    return {role: path for role, path in files.items() if encode or role != "encode"}


def role_files(config: list[str] | None) -> dict[Role, Path]:
    """Parses ``--config ROLE=FILE`` options, with at most one for each role. Raises UsageError."""
    files: dict[Role, Path] = {}
    for entry in config or ():
        role, equals, path = entry.partition("=")
        if not equals or role not in get_args(Role) or not path.strip():
            raise UsageError(
                f"--config {quoted(entry)} is not ROLE=FILE; expected a role of {', '.join(get_args(Role))}"
            )
        if role in files:
            raise UsageError(f"--config names {role} twice; leave one of them out")
        files[cast(Role, role)] = Path(path)
    return files


def split_words(option: str, text: str) -> tuple[str, ...]:
    try:
        return tuple(shlex.split(text))
    except ValueError as error:
        raise UsageError(f"{option} {quoted(text)} can't be split into words ({error}); close the quotes") from error


def _indices(text: str) -> tuple[int, ...]:
    parts = [part.strip() for part in text.split(",")]
    if not all(WHOLE_NUMBER.fullmatch(part) for part in parts):
        raise UsageError(f"--gpus {quoted(text)} is not a list of indices; expected a value such as 0 or 0,1")
    return tuple(int(part) for part in parts)


def topology_fields(given: dict[str, Any], modes: list[str]) -> dict[str, Any]:
    """Returns the given topology options, checked by the same rules as ``trtx serve``'s."""
    chosen = {name: given[name] for name in OPTION_NAMES if name in given}
    roles = {"agg": ("workers",), "disagg": ("prefill", "decode")}
    both = len(modes) != 1
    fields: dict[str, Any] = {}
    for mode, own in roles.items():
        if mode in modes or both:
            others = {name for names in roles.values() for name in names} - set(own)
            kept = {name: value for name, value in chosen.items() if not both or name not in others}
            checked = build_spec(mode=mode, **kept).model_dump(mode="json")
            fields |= {field: checked[field] for field in (_FIELDS.get(name, name) for name in kept)}
    if media := {name: given[name] for name in MEDIA_FIELDS if name in given}:
        fields["media"] = _typed_media(media, {name: chosen[name] for name in chosen if name.startswith("encode")})
    return fields


_AT_ODDS = ("media_memory_bytes", "max_media_bytes")


def _typed_media(media: dict[str, Any], encoders: dict[str, Any]) -> dict[str, Any]:
    """Returns the given media options, checked by the same rules together with the given encode workers.

    An option that may contradict a field in the sweep file is skipped here; it is checked together with the file.
    """
    is_half = sum(name in media for name in _AT_ODDS) == 1
    alone = {name: value for name, value in media.items() if not (is_half and name in _AT_ODDS)}
    checked = build_spec(mode="agg", **alone, **encoders).model_dump(mode="json")["media"]
    return {name: checked[name] if name in alone else value for name, value in media.items()}


def parse_modes(text: str) -> list[str]:
    """Parses the value of ``--mode``, such as ``agg,disagg``. Raises UsageError."""
    modes = [part.strip() for part in text.split(",")]
    for mode in modes:
        if mode not in get_args(Mode):
            raise UsageError(
                f"--mode {quoted(mode)} is not a mode; expected {' or '.join(get_args(Mode))}, or agg,disagg"
            )
    return modes
